"""The interface of the tables that a queue is exported to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from penstock.arrow.schema import is_wider
from penstock.errors import TableRefusedError

MOST_SMALL = 32
"""The number of small files at which they are compacted."""


@dataclass(frozen=True)
class QueueId:
    """The identity of a queue among those of all stores, as a table records it."""

    store: str
    """The identity of the store."""
    name: str
    generation: int
    """Distinguishes the queue from earlier ones of the same name."""


class TableChangedError(Exception):
    """Another writer has changed the table: load it again, and repeat the attempt."""


class ExportTable(Protocol):
    """A table that records in each commit up to where it has the rows of a queue."""

    @property
    def shown(self) -> str:
        """The table for messages, without a password."""
        ...

    @property
    def version(self) -> int | None:
        """The loaded version (of an Iceberg table, the snapshot's id); None if there is none."""
        ...

    def prepare(self, schema: pa.Schema) -> None:
        """Create the table, or add the columns that it lacks; refuse a table that cannot take the rows."""

    def load(self) -> bool:
        """Load the newest version; return False if there is no table."""
        ...

    def generation(self) -> int | None:
        """Return the generation of the queue whose rows the loaded version has; None if it has none.

        Raises
        ------
        TableChangedError
            When the loaded version is gone, since the table was deleted or its log cleaned up.
        """
        ...

    def positions(self, partitions: int) -> dict[int, int]:
        """Return the index after the last row that the loaded version has, of each partition with rows.

        Raises
        ------
        TableChangedError
            As ``generation`` does.
        """
        ...

    def refuse_rollback(self) -> None:
        """Refuse a table that was rolled back to before the last commit of the export.

        Raises
        ------
        TableRefusedError
        TableChangedError
            As from ``generation``.
        """

    def append(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch], ends: Mapping[int, int]) -> None:
        """Append rows to the loaded version and record the positions after them, in one commit.

        Raises
        ------
        TableChangedError
            When another process has exported the same rows, or the table is gone; nothing is appended.
        """

    def tidy(self) -> None:
        """Compact small files, if there are many."""


def known_positions(table: ExportTable, queue: QueueId, partitions: int) -> dict[int, int]:
    """Return the positions that the loaded version records.

    A table with rows of an earlier queue is refused, and so is one that was rolled back.
    """
    generation = table.generation()
    if generation is None:
        return {}
    if generation != queue.generation:
        raise TableRefusedError(
            f"{table.shown} has rows of an earlier queue {queue.name!r}, which was dropped: export the new "
            "one to another table",
            condition="TABLE_REFUSED.OTHER_QUEUE",
            queue=queue.name,
        )
    table.refuse_rollback()
    return table.positions(partitions)


def rolled_back(table: ExportTable, queue: QueueId, version: str) -> TableRefusedError:
    """Return the error for a table that lost rows of the queue when it was rolled back.

    ``version`` is the one to go back to.
    """
    return TableRefusedError(
        f"{table.shown} was rolled back or replaced, and lacks rows of queue {queue.name!r} that it had. "
        f"They are not exported again: go back to {version}, or export to another table",
        condition="TABLE_REFUSED.EXPORT_ROLLED_BACK",
        queue=queue.name,
    )


def with_columns_of(stored: pa.Schema, rows: pa.Schema) -> pa.Schema:
    """Return a table's columns, in its order, with the types of the rows where they have the column, unless
    rows of another queue have a wider one.
    """
    own = {field.name.lower(): field for field in rows}
    fields = [(own.get(field.name.lower(), field), field) for field in stored]
    return pa.schema(
        [
            (there if is_wider(there.type, field.type) else field).with_name(there.name).with_nullable(True)
            for field, there in fields
        ]
    )
