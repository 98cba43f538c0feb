"""Packages that come with an extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.errors import MissingDependency

EXTRAS = {
    "click": "cli",
    "deltalake": "delta",
    "fastapi": "ui",
    "numpy": "spark",
    "pandas": "spark",
    "prometheus_client": "ui",
    "psycopg": "postgres",
    "py4j": "spark",
    "pyiceberg": "iceberg",
    "pyspark": "spark",
    "rich": "cli",
    "typer": "cli",
    "uvicorn": "ui",
}
"""The extra that a package comes with."""


def missing(package: str, what: str) -> MissingDependency:
    """The error that says what to install.

    Parameters
    ----------
    package
        What is not there, as it is imported.
    what
        What needs it, as the message says: ``a Delta feed``.
    """
    extra = EXTRAS[package]
    return MissingDependency(
        f"{what} needs {package}: pip install 'penstock[{extra}]'", package=package, extra=extra
    )


def instead(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError | MissingDependency:
    """The error to raise in place of one of Python's; the same where no extra has what is missing."""
    package = (error.name or "").partition(".")[0]
    return missing(package, what) if package in EXTRAS else error


def load(home: str, name: str, what: str) -> Any:
    """A name of a module.

    Raises
    ------
    MissingDependency
        When a package is missing that an extra has.
    """
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        raise instead(error, what) from None


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
    except ModuleNotFoundError:
        raise missing("deltalake", what) from None
