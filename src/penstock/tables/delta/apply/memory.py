"""What is remembered of events that were applied to a Delta table: a second Delta table in its folder.

Type 1 remembers the last event of each key that there ever was, type 2 the deletes. The table's own version says which version of
this one goes with it, as an app transaction: so both change in one step, what a writer that died has written here is in no version
that counts, and two writers of changes conflict.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import SchemaMismatch, TableRefused
from penstock.lake.delta_location import DeltaPlace, library
from penstock.tables.delta.apply.events import PRESENT, SEQUENCE, Events
from penstock.tables.delta.apply.outcome import numbered
from penstock.tables.delta.stage import FOLDER
from penstock.tables.delta.transactions import merging, properties
from penstock.tables.names import quoted

_WRITER = "penstock:writer"
_MOST_FILES = 64
_JOINED_ROWS, _JOINED_BYTES = 1 << 19, 1 << 28
_NUMBER = "_penstock_number"


@dataclass(frozen=True)
class Applied:
    """The relation beside a table."""

    place: DeltaPlace
    of: str
    """The table, as messages name it."""
    schema: pa.Schema
    keys: tuple[str, ...]
    history: bool

    @classmethod
    def beside(cls, place: DeltaPlace, table: Any, events: Events) -> Applied:
        """That of a table, which is its until it is dropped and made again."""
        path = f"{place.path}/{FOLDER}/applied-{table.metadata().id}"
        names = [*events.keys, SEQUENCE, PRESENT]
        schema = pa.schema([events.staged.schema.field(name) for name in names])
        return cls(DeltaPlace(path, place.options), place.shown, schema, events.rows.keys, events.history)

    @property
    def transaction(self) -> str:
        """The app transaction of the table, whose version is that of this relation which goes with it."""
        return f"penstock:{self.place.path.rpartition('/')[2]}"

    def in_force(self, table: Any) -> int:
        """The version that goes with a version of the table.

        Raises
        ------
        TableRefused
            When the table does not say any more.
        """
        version = table.transaction_version(self.transaction)
        if version is None:
            raise TableRefused(
                f"the Delta table {self.of} does not say any more which changes it has, in its app transaction {self.transaction}: its "
                "property delta.setTransactionRetentionDuration is shorter than it rested, or its log was cut. Remove that property, "
                "and drop the table to begin anew",
                condition="TABLE_REFUSED.CHANGES_FORGOTTEN",
                table=self.of,
            )
        return int(version)

    def prepare(self, table: Any) -> None:
        """Make it where there is none, and have the table name it.

        Raises
        ------
        SchemaMismatch
            When the table's changes had other keys before, or another order.
        """
        deltalake = library("deltalake")
        with self.place.plainly():
            wanted = deltalake.Schema.from_arrow(self.schema)
            # Somebody else may make it at the same moment.
            deltalake.DeltaTable.create(
                self.place.path, wanted, mode="ignore", storage_options=self.place.options or None
            )
        now, before = _types(wanted), _types(self.place.open().schema())
        if now != before:
            raise SchemaMismatch(
                f"the changes of the Delta table {self.of} were ordered by {before.pop(SEQUENCE, None)} before, with the keys "
                f"{_shown(before)}, and are by {now.pop(SEQUENCE, None)} now, with {_shown(now)}: keep keys and sequence_by, or "
                "drop the table to begin anew",
                table=self.of,
            )
        if table.transaction_version(self.transaction) is None and self.place.open().version() == 0:
            with suppress(library("deltalake.exceptions").CommitFailedError):
                # Somebody else may do so at the same moment.
                self.name(table, 0)

    def name(self, table: Any, version: int, versions: Mapping[str, int] | None = None) -> None:
        """Have the table name a version, in a commit without rows.

        Parameters
        ----------
        versions
            Of other app transactions that the commit carries.
        """
        nothing = pa.schema(table.schema().to_arrow()).empty_table()
        carried = properties({**(versions or {}), self.transaction: version})
        library("deltalake").write_deltalake(table, nothing, mode="append", commit_properties=carried)

    def tidy(self, version: int) -> None:
        """Delete files that are in no version which somebody may read; never those of a version that goes with the table."""
        table = self.place.open()
        if table.version() == version:
            with self.place.plainly():
                table.vacuum(dry_run=False)

    def events(self, version: int, touched: pa.Table) -> pa.Table:
        """What a version remembers of some keys."""
        with self.place.plainly():
            table = library("deltalake").DeltaTable(
                self.place.path, version=version, storage_options=self.place.options or None
            )
        return rows_of(self.place, table, touched, self.schema)

    def remember(self, version: int, events: pa.Table) -> int:
        """Add events to a version, each later than what that has of its key; the version that has them.

        Raises
        ------
        CommitFailedError
            Of deltalake, when others have written in the meantime.
        """
        if not events.num_rows:
            return version
        token = uuid.uuid4().int >> 66
        table = self.place.open()
        if table.version() != version:
            # Somebody died between this commit and the table's, or is about to make that.
            table.restore(version, commit_properties=_written(token))
        if len(table.file_uris()) > _MOST_FILES:
            table.optimize.compact(commit_properties=_written(token))
        if self.history:
            library("deltalake").write_deltalake(
                table, events, mode="append", commit_properties=_written(token)
            )
        else:
            merge = merging(table, events, self.keys, _written(token))
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
        if table.transaction_version(_WRITER) != token:
            raise library("deltalake.exceptions").CommitFailedError("others have written what is remembered")
        return int(table.version())


def rows_of(place: DeltaPlace, table: Any, touched: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows of a table that have some keys.

    Parameters
    ----------
    touched
        The keys.
    schema
        The columns to read, under the table's names.
    """
    columns = ", ".join(map(quoted, schema.names))
    with place.plainly():
        # Not by an Arrow dataset: the threads that read it for deltalake now and then abort a process that comes to its end.
        query = (
            library("deltalake")
            .QueryBuilder()
            .register("stored", table)
            .execute(f"SELECT {columns} FROM stored")
        )
        batches = (pa.record_batch(batch) for batch in query)
        parts = [_with_keys(part, touched) for part in _gathered(batches, schema)]
    return pa.concat_tables([schema.empty_table(), *parts])


def _with_keys(part: pa.Table, touched: pa.Table) -> pa.Table:
    """Some rows by their keys alone, since a join carries no nested values."""
    keys = touched.column_names
    found = numbered(part.select(keys), _NUMBER).join(touched, keys=keys, join_type="left semi")
    return part.take(found[_NUMBER])


def _gathered(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """The same rows in parts that are worth a join."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _JOINED_ROWS or size >= _JOINED_BYTES:
            yield pa.Table.from_batches(held).cast(schema)
            held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held).cast(schema)


def _written(token: int) -> Any:
    return properties({_WRITER: token})


def _types(schema: Any) -> dict[str, str]:
    return {field["name"]: field["type"] for field in json.loads(schema.to_json())["fields"]}


def _shown(types: dict[str, str]) -> str:
    named: Sequence[str] = sorted(f"{name} {kind}" for name, kind in types.items() if name != PRESENT)
    return ", ".join(named)
