"""Packages that come with an extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.errors import MissingDependency


def deltalake(name: str, what: str) -> Any:
    """A module of deltalake.

    Parameters
    ----------
    name
        Such as ``deltalake.fs``.
    what
        What needs it, as the message says: ``a Delta feed``.

    Raises
    ------
    MissingDependency
        When it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"{what} needs deltalake ({error}): pip install penstock[delta]", extra="delta"
        ) from None
