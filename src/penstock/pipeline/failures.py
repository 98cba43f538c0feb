"""Spark's account of a failure, brought back to the error that caused it."""

from __future__ import annotations

import re

from penstock import errors
from penstock.errors import PenstockError, QueryFailed

_OURS = re.compile(r"^\s*(?:Caused by: )?penstock\.errors\.(\w+): \[([A-Z_.]+)\] (.*)$", re.MULTILINE)


def plain(error: Exception) -> Exception:
    """Penstock's error in what Spark reports; Spark's own error when there is none."""
    found = _OURS.findall(str(error))
    if not found:
        return error
    kind, condition, message = found[-1]
    known = getattr(errors, kind, QueryFailed)
    made = known if isinstance(known, type) and issubclass(known, PenstockError) else QueryFailed
    return made(message.strip(), condition=condition)
