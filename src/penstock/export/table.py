"""``ExportTable``: the interface of tables to which a queue is exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from penstock.arrow.schema import is_wider
from penstock.errors import TableRefusedError

MIN_SMALL_FILES = 32
"""The number of small files from which they are compacted."""


@dataclass(frozen=True)
class QueueId:
    """The identity of a queue, as a table records it."""

    store: str
    """The id of the store."""
    name: str
    generation: int
    """Distinguishes the queue from earlier queues with the same name."""


class TableChangedError(Exception):
    """Another writer has changed the table, so it must be loaded again and the attempt repeated."""


class ExportTable(Protocol):
    """A table that records in each commit which rows of a queue it has."""

    @property
    def label(self) -> str:
        """The name of the table for messages, without a password."""
        ...

    @property
    def version(self) -> int | None:
        """The loaded version (for an Iceberg table, the snapshot's id); None if there is none."""
        ...

    def prepare(self, schema: pa.Schema) -> None:
        """Create the table, or add missing columns; refuse a table that does not accept the rows."""

    def load(self) -> bool:
        """Load the newest version; return False if there is no table."""
        ...

    def lacks_columns(self, schema: pa.Schema) -> bool:
        """Return whether the loaded version lacks columns of the rows: another program may drop them."""
        ...

    def generation(self) -> int | None:
        """Return the generation of the queue that is recorded in the loaded version; None if there is none.

        Raises
        ------
        TableChangedError
            When the loaded version is gone, because the table was deleted or its log was cleaned up.
        """
        ...

    def positions(self, partitions: int) -> dict[int, int]:
        """Return the index after the last row in the loaded version, for each partition with rows.

        Raises
        ------
        TableChangedError
            As for ``generation``.
        """
        ...

    def refuse_rollback(self) -> None:
        """Refuse a table that was rolled back to a version before the last commit of the export.

        Raises
        ------
        TableRefusedError
        TableChangedError
            As for ``generation``.
        """

    def append(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch], ends: Mapping[int, int]) -> None:
        """Append rows to the loaded version and record the new positions, in one commit.

        Raises
        ------
        TableChangedError
            When another process has exported the same rows, or the table is gone. Nothing is appended.
        """

    def compact_small_files(self) -> None:
        """Compact small files if there are many."""


def known_positions(table: ExportTable, queue: QueueId, partitions: int) -> dict[int, int]:
    """Return the positions that are recorded in the loaded version.

    Refuse a table with rows of an earlier queue, and a table that was rolled back.
    """
    generation = table.generation()
    if generation is None:
        return {}
    if generation != queue.generation:
        raise TableRefusedError(
            f"{table.label} has rows of an earlier queue {queue.name!r}, which was dropped: export the new "
            "one to another table",
            condition="TABLE_REFUSED.OTHER_QUEUE",
            queue=queue.name,
        )
    table.refuse_rollback()
    return table.positions(partitions)


def rolled_back(table: ExportTable, queue: QueueId, version: str) -> TableRefusedError:
    """Return the error for a table that lost rows of the queue when it was rolled back.

    ``version`` is the version to restore.
    """
    return TableRefusedError(
        f"{table.label} was rolled back or replaced, and lacks rows of queue {queue.name!r} that it had. "
        f"They are not exported again: restore {version}, or export to another table",
        condition="TABLE_REFUSED.EXPORT_ROLLED_BACK",
        queue=queue.name,
    )


def exported_schema(stored: pa.Schema, rows: pa.Schema) -> pa.Schema:
    """Return the columns of a table, with the types of the rows unless the table's type is wider.

    The table's type may be wider because of rows of another queue.
    """
    row_fields = {field.name.lower(): field for field in rows}
    fields = [(row_fields.get(field.name.lower(), field), field) for field in stored]
    return pa.schema(
        [
            (table_field if is_wider(table_field.type, field.type) else field)
            .with_name(table_field.name)
            .with_nullable(True)
            for field, table_field in fields
        ]
    )
