"""A formatter that writes Penstock's log records as lines of JSON.

All loggers are below ``penstock``. Every record has an ``action`` and its values as fields (see
``docs/logging.md``).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Set
from datetime import UTC, datetime

from penstock.instants import moment_text
from penstock.json_text import Json, JsonValue

__all__ = ["JsonFormatter"]

# The attributes that logging itself sets (taskName since Python 3.12); all others come from ``extra``.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formatter that writes a record as one line of JSON, for any handler.

    The keys are ``at`` (UTC, ISO 8601), ``level``, ``logger`` and ``message``, then the fields of ``extra``,
    such as ``action``, with their own names, and ``traceback`` if the record has one. Values of types that
    JSON lacks are written as text, and numbers that are not finite as null.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a newline."""
        return json.dumps(self.fields(record))

    def fields(self, record: logging.LogRecord) -> Json:
        """Return the line's keys and values."""
        at = datetime.fromtimestamp(record.created, UTC)
        fields: Json = {
            "at": moment_text(at, "microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                fields.setdefault(name, _plain(value))
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = self.formatException(record.exc_info)
        return fields


def _plain(value: object) -> JsonValue:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | Set):
        return [_plain(each) for each in value]
    return str(value)
