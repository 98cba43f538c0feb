"""Rows as they come, until there are enough."""

from __future__ import annotations

import threading

import pyarrow as pa

from penstock.arrow.batches import first_rows


class Found:
    """No more rows than were asked for; those of a query come in a thread of its own.

    Parameters
    ----------
    asked
        How many rows are enough.
    """

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.tables: list[pa.Table] = []
        self._once: list[pa.Table] = []
        self._enough = threading.Event()

    @property
    def rows(self) -> int:
        return _rows(self.tables)

    @property
    def lacking(self) -> int:
        return self.asked - self.rows

    @property
    def is_enough(self) -> bool:
        return self._enough.is_set()

    def add(self, table: pa.Table) -> None:
        """Take what is lacking."""
        self.tables.extend(first_rows([table], self.lacking))
        if self.lacking == 0:
            self._enough.set()

    def forget_behind(self, tables: int) -> None:
        """Keep the first tables only: the rows of the others come again, if there is time for that."""
        self._once = self.given
        self.tables = self.tables[:tables]

    @property
    def given(self) -> list[pa.Table]:
        """What is there when the time is over: also what has come once, where less of it came again."""
        return self.tables if self.rows >= _rows(self._once) else self._once

    def wait(self, seconds: float) -> bool:
        """Until there are enough, or so many seconds; whether there are."""
        return self._enough.wait(seconds)


def _rows(tables: list[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)
