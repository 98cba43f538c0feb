"""What an export asks of the table that it fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True)
class QueueId:
    """A queue among all queues of all stores, as a table records whose rows it has."""

    store: str
    """The identity of the store."""
    name: str
    generation: int
    """It tells the queue from others that have had its name."""


class TableChangedError(Exception):
    """Another writer was faster: look at the table again, and repeat."""


class ExportTable(Protocol):
    """A table that records in each commit up to where it has the rows of a queue."""

    @property
    def shown(self) -> str:
        """The table for messages, without a password."""
        ...

    def prepare(self, schema: pa.Schema) -> None:
        """Create the table, or add the columns that it lacks; refuse one that does not take the rows."""

    def load(self) -> None:
        """Load the newest version."""

    def generation(self) -> int | None:
        """Return the generation of the queue whose rows the loaded version has; None if it has none."""
        ...

    def positions(self, partitions: int) -> dict[int, int]:
        """Return the index after the last row that the loaded version has, of each partition with rows."""
        ...

    def append(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch], ends: Mapping[int, int]) -> None:
        """Append rows to the loaded version and record the positions after them, in one commit.

        Raises
        ------
        TableChangedError
            When another process has exported the same rows; nothing is appended.
        """

    def tidy(self) -> None:
        """Merge small files, if there are many."""
