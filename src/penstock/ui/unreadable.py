"""Records that the page cannot read. They are left out and named in the notes; all others are shown.

A program that may write to the store can write anything into its records, and monitoring must survive that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.arguments import brief
from penstock.errors import PenstockError
from penstock.json_text import Json

T = TypeVar("T")
_MOST_NOTES = 20


class Unreadable:
    """The records of one snapshot that cannot be read."""

    def __init__(self) -> None:
        self.count = 0
        self._notes: list[str] = []

    def each(
        self, items: Iterable[T], build: Callable[[T], Json | None], called: Callable[[T], str]
    ) -> list[Json]:
        """Build a row of each item; leave out items without a row, and those that cannot be read."""
        rows = []
        for item in items:
            try:
                row = build(item)
            except Exception as error:
                self.add(called(item), error)
            else:
                rows += [] if row is None else [row]
        return rows

    def add(self, what: str, error: Exception) -> None:
        self.count += 1
        if len(self._notes) < _MOST_NOTES:
            why = error.message if isinstance(error, PenstockError) else brief(str(error))
            self._notes.append(
                f"{what} cannot be shown, because its record in the store is not what Penstock writes: "
                f"{why or type(error).__name__}"
            )

    @property
    def notes(self) -> list[str]:
        more = self.count - len(self._notes)
        return self._notes if not more else [*self._notes, f"{more} more records cannot be shown"]


def named(kind: str, name: object) -> str:
    """Return the name of a record for a note."""
    return f"{kind} {brief(repr(name))}"


def finite(number: float | None) -> float | None:
    """Return a number that JSON has; None for any other."""
    return number if number is not None and math.isfinite(number) else None
