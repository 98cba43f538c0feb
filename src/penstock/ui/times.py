"""Instants as the page gets them."""

from __future__ import annotations

from penstock.instants import moment_of, moment_text


def iso(micros: int | None) -> str | None:
    """An instant (microseconds since 1970) as ISO 8601 with Z, in milliseconds."""
    return None if micros is None else moment_text(moment_of(int(micros)), "milliseconds")


def seconds(earlier: int | None, later: int) -> float | None:
    """Seconds between two instants, 0 where the first is the later one."""
    return None if earlier is None else round(max(later - earlier, 0) / 1e6, 3)
