"""Instants in microseconds since 1970 (UTC), the form in which the store keeps them, and interval lengths."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import overload

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def now_micros() -> int:
    return time.time_ns() // 1000


def micros_of(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise ValueError("give the time zone too, such as datetime(…, tzinfo=UTC)")
    return (moment - _EPOCH) // _MICROSECOND


def moment_of(micros: int) -> datetime:
    return _EPOCH + micros * _MICROSECOND


@overload
def moment_text(moment: datetime, timespec: str = ...) -> str: ...


@overload
def moment_text(moment: datetime | None, timespec: str = ...) -> str | None: ...


def moment_text(moment: datetime | None, timespec: str = "auto") -> str | None:
    """Return an instant in UTC as ISO 8601 with Z."""
    return None if moment is None else moment.isoformat(timespec=timespec).replace("+00:00", "Z")


UNITS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
"""The microseconds of each unit of an interval; months and years vary in length."""
_SHORT = {
    "us": "microsecond",
    "ms": "millisecond",
    "s": "second",
    "sec": "second",
    "min": "minute",
    "h": "hour",
    "d": "day",
}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def interval_micros(text: str) -> int | None:
    """Return the microseconds of an interval such as ``1 minute 30 seconds``; None for any other text."""
    words = text.strip().lower().removeprefix("interval ").strip()
    parts = list(_PART.finditer(words))
    units = [_SHORT.get(part[2], part[2].removesuffix("s")) for part in parts]
    if not parts or _PART.sub("", words) or any(unit not in UNITS for unit in units):
        return None
    return round(sum(float(part[1]) * UNITS[unit] for part, unit in zip(parts, units, strict=True)))
