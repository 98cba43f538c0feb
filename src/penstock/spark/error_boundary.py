"""Removal of tracebacks from Penstock's errors where Spark calls Penstock: they would bury the message in
Spark's report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from penstock.errors import PenstockError

C = TypeVar("C", bound=type)


def without_tracebacks(kind: C) -> C:
    """Decorate a class, so that Penstock's errors leave its public methods without their traceback."""
    for name, method in list(vars(kind).items()):
        if callable(method) and not name.startswith("_"):
            setattr(kind, name, _without_traceback(method))
    return kind


def _without_traceback(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            result = method(*arguments, **named)
        except PenstockError as error:
            raise error.with_traceback(None) from None
        return iterate_without_tracebacks(result) if isinstance(result, Iterator) else result

    return call


def iterate_without_tracebacks(rows: Iterator[Any]) -> Iterator[Any]:
    """Yield the same rows; Penstock's errors leave the iteration without their traceback."""
    try:
        yield from rows
    except PenstockError as error:
        raise error.with_traceback(None) from None
