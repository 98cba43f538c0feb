"""Spark's account of a failure, brought back to the error that caused it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock import errors
from penstock.errors import PenstockError, QueryFailed

# One line of a Python traceback: the error's class, its condition, its message.
_OURS = re.compile(r"^\s*(?:Caused by: )?penstock\.[\w.]+: \[([A-Z_.]+)\] (.*)$", re.MULTILINE)


def plain(error: Exception) -> Exception:
    """Penstock's error in what Spark reports; Spark's own error when there is none."""
    found = _OURS.findall(str(error))
    if not found:
        return error
    condition, message = found[-1]
    # A sub-condition follows its condition after a dot.
    base = condition.partition(".")[0]
    kind = next((kind for kind in _kinds(PenstockError) if kind.condition == base), QueryFailed)
    return kind(message.strip(), condition=condition)


def _kinds(base: type[PenstockError]) -> Iterator[type[PenstockError]]:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, base):
            yield kind
