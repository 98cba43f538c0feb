"""Instants as the store keeps them: microseconds since 1970, UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def micros_of(moment: datetime) -> int:
    """An instant in microseconds.

    Raises
    ------
    ValueError
        When it has no time zone.
    """
    if moment.tzinfo is None:
        raise ValueError("give the time zone too, such as datetime(…, tzinfo=UTC)")
    return (moment - _EPOCH) // _MICROSECOND


def moment_of(micros: int) -> datetime:
    return _EPOCH + micros * _MICROSECOND
