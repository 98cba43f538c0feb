"""The border to Spark: errors leave without the stack that raised them, which would bury their message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from penstock.errors import PenstockError

C = TypeVar("C", bound=type)


def without_tracebacks(kind: C) -> C:
    """A class decorator: Penstock's errors leave the class's public methods without their stack."""
    for name, method in list(vars(kind).items()):
        if callable(method) and not name.startswith("_"):
            setattr(kind, name, _plain(method))
    return kind


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            result = method(*arguments, **named)
        except PenstockError as error:
            raise error.with_traceback(None) from None
        return iterate_without_tracebacks(result) if isinstance(result, Iterator) else result

    return call


def iterate_without_tracebacks(rows: Iterator[Any]) -> Iterator[Any]:
    """The same rows; Penstock's errors leave the iteration without their stack."""
    try:
        yield from rows
    except PenstockError as error:
        raise error.with_traceback(None) from None
