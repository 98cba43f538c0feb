"""A limit of rows in a continuous query: the driver hands out what is left of it to whoever is about to write rows.

A writer asks for as many rows as it has in hand, so that nothing is held back by one task while another one could write it. Epochs
are served one after the other: where one task's rows were dropped, no other task's of a later epoch have been counted in their place.
What a run has handed out and not committed comes to nothing with the run; the next one begins with what was committed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """Of the rows that a query writes over its whole life.

    Parameters
    ----------
    rows
        How many.
    stops
        Whether the query ends when it has them; else it drops what comes.
    """

    rows: int
    stops: bool = True


@dataclass
class Quota:
    """What is left for one run; not for several threads at once."""

    left: int

    def take(self, wanted: int) -> int:
        """How many of the wanted rows may be written."""
        given = max(min(wanted, self.left), 0)
        self.left -= given
        return given

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0
