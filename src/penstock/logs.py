"""Records of Penstock's log as lines of JSON.

Every logger is one of the tree ``penstock``, and every record has an ``action`` and its values as fields (``docs/logging.md``).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from typing import Any

from penstock.instants import moment_text

__all__ = ["JsonFormatter"]

# What logging itself gives a record (taskName since Python 3.12); the rest was given by whoever wrote it.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON, for any handler.

    Its keys are ``at`` (UTC, ISO 8601), ``level``, ``logger`` and ``message``; then what the record was given as ``extra``, such as
    ``action``, by its own name; and ``traceback`` where it has one. What JSON does not know becomes text, and a number that is not
    finite becomes null.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        return json.dumps(self.fields(record))

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """What the line has, as JSON has it."""
        at = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, Any] = {
            "at": moment_text(at, "microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _OWN:
                fields.setdefault(name, _plain(value))
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = self.formatException(record.exc_info)
        return fields


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | Set):
        return [_plain(each) for each in value]
    return str(value)
