"""Records that the page cannot read: they are omitted and named in the notes, and all others are shown.

A program that may write to the store can write anything into its records, and monitoring must not fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.arguments import brief
from penstock.errors import PenstockError
from penstock.json_text import Json

T = TypeVar("T")
_MAX_NOTES = 20


class UnreadableRecords:
    """The records of one snapshot that cannot be read."""

    def __init__(self) -> None:
        self.count = 0
        self._notes: list[str] = []

    def build_rows(
        self, items: Iterable[T], build: Callable[[T], Json | None], describe: Callable[[T], str]
    ) -> list[Json]:
        """Build a row for each item; omit items without a row, and items that cannot be read."""
        rows = []
        for item in items:
            try:
                row = build(item)
            except Exception as error:
                self.add(describe(item), error)
            else:
                rows += [] if row is None else [row]
        return rows

    def add(self, description: str, error: Exception) -> None:
        self.count += 1
        if len(self._notes) < _MAX_NOTES:
            reason = error.message if isinstance(error, PenstockError) else brief(str(error))
            self._notes.append(
                f"{description} cannot be shown, because its record in the store is not what Penstock "
                f"writes: {reason or type(error).__name__}"
            )

    @property
    def notes(self) -> list[str]:
        omitted_notes = self.count - len(self._notes)
        return (
            self._notes
            if not omitted_notes
            else [*self._notes, f"{omitted_notes} more records cannot be shown"]
        )


def record_name(kind: str, name: object) -> str:
    """Return the name of a record for a note."""
    return f"{kind} {brief(repr(name))}"


def finite_or_none(number: float | None) -> float | None:
    """Return a finite number; None for NaN and infinity, which JSON does not have."""
    return number if number is not None and math.isfinite(number) else None
