"""The applied-events table: a Delta table in the folder of a data table, with the events applied to it.

For SCD type 1 it has the last event of each key that ever existed, for type 2 the deletes. An app transaction
of the data table names the version of the applied-events table that belongs to it. So both change in one
step, events recorded by a writer that then died do not count, and two writers of changes conflict.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.arrow.arrays import grouped
from penstock.errors import SchemaMismatchError, TableRefusedError
from penstock.lake.new_files import supports_conditional_put
from penstock.lake.storage import DeltaPlace, import_deltalake
from penstock.tables.changes.events import PRESENT, SEQUENCE, EventLayout
from penstock.tables.changes.merge_plan import numbered
from penstock.tables.delta.log_commit import CLEANUP
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.delta.stage import FOLDER, DeltaStage
from penstock.tables.delta.statistics import indexed_columns
from penstock.tables.delta.transactions import commit_properties, merge_by_keys
from penstock.tables.delta.vectors import PROPERTY
from penstock.tables.names import quoted

if TYPE_CHECKING:
    from deltalake import DeltaTable

_WRITER = "penstock:writer"
_MOST_FILES = 64
_JOINED_ROWS, _JOINED_BYTES = 1 << 19, 1 << 28
_NUMBER = "_penstock_number"
_SMALL_ROWS = 512
_CLEANED_VERSIONS = 100


@dataclass(frozen=True)
class AppliedTable:
    """The applied-events table of a data table."""

    place: DeltaPlace
    of: str
    """The name of the data table in messages."""
    schema: pa.Schema
    keys: tuple[str, ...]
    history: bool

    @classmethod
    def of_table(cls, place: DeltaPlace, table: DeltaTable, events: EventLayout) -> AppliedTable:
        """Return the applied-events table of a data table; the path has the id of the data table, so a
        recreated data table gets a new one.
        """
        path = f"{place.path}/{FOLDER}/applied-{table.metadata().id}"
        applied = DeltaPlace(path, place.options)
        return cls(applied, place.shown, events.recorded, events.keys, events.history)

    @property
    def transaction(self) -> str:
        """The data table's app transaction whose version is the version of this table."""
        return f"penstock:{self.place.path.rpartition('/')[2]}"

    def named_by(self, table: DeltaTable) -> int:
        """Return the version that belongs to a version of the data table."""
        version = self.place.app_version(table, self.transaction)
        if version is None:
            raise TableRefusedError(
                f"the Delta table {self.of} has lost the app transaction {self.transaction}, which says "
                "which changes it has: its property delta.setTransactionRetentionDuration is too short, or "
                "its log was cut. Remove that property, and drop the table to start over",
                condition="TABLE_REFUSED.CHANGES_FORGOTTEN",
                table=self.of,
            )
        return version

    def prepare(self, table: DeltaTable) -> None:
        """Create the applied-events table if it does not exist, and name its version in the data table."""
        # Only Penstock reads it, so it may have vectors. A commit does not clean up its log, since the
        # previous version is needed until the data table names the new one.
        vectors = {PROPERTY: "true"} if supports_conditional_put(self.place) else {}
        applied = self.place.create(self.schema, {CLEANUP: "false", **vectors})
        now, before = (
            _types(import_deltalake("deltalake").Schema.from_arrow(self.schema)),
            _types(applied.schema()),
        )
        if now != before:
            raise SchemaMismatchError(
                f"earlier changes of the Delta table {self.of} were ordered by {before.pop(SEQUENCE, None)} "
                f"with the keys {_shown(before)}, and these are ordered by {now.pop(SEQUENCE, None)} with "
                f"{_shown(now)}: keep keys and sequence_by, or drop the table to start over",
                condition="SCHEMA_MISMATCH.KEYS_CHANGED",
                table=self.of,
            )
        if self.place.app_version(table, self.transaction) is None and applied.version() == 0:
            with suppress(import_deltalake("deltalake.exceptions").CommitFailedError):
                # Another process may do so at the same time.
                self.name_in(table, 0)

    def name_in(self, table: DeltaTable, version: int, others: Mapping[str, int] | None = None) -> None:
        """Name a version in the data table, in a commit without rows but with other app transactions."""
        no_rows = pa.schema(table.schema().to_arrow()).empty_table()
        properties = commit_properties({**(others or {}), self.transaction: version})
        import_deltalake("deltalake").write_deltalake(
            table, no_rows, mode="append", commit_properties=properties
        )

    def vacuum(self, version: int) -> None:
        """Delete old commits, and files of old versions, unless a newer version exists than the data table
        names.
        """
        table = self.place.open()
        if table.version() == version:
            with self.place.translating_errors():
                table.cleanup_metadata()
                table.vacuum(dry_run=False)

    def events(self, version: int, touched: pa.Table) -> pa.Table:
        """Read the events that a version has for the ``touched`` keys."""
        return rows_with_keys(self.place, self.place.open(version), touched, self.schema)

    def record(
        self, version: int, events: pa.Table, by_tasks: Callable[[DeltaTable], int | None] | None = None
    ) -> int:
        """Record events on top of a version, each later than the version's event of its key; return the new
        version.

        ``by_tasks`` may record them in the table it gets, which has that version's rows; if it returns None,
        deltalake does it.
        """
        if not events.num_rows:
            return version
        token = uuid.uuid4().int >> 66
        table = self.place.open()
        if table.version() != version:
            # A writer died between this commit and the one to the data table, or is about to make that one.
            table.restore(version, commit_properties=_written_by(token))
        elif (version + 1) % _CLEANED_VERSIONS == 0:
            table.cleanup_metadata()
        if len(table.file_uris()) > _MOST_FILES:
            table.optimize.compact(commit_properties=_written_by(token))
        replaced = None if by_tasks is None else by_tasks(table)
        return self._merged(table, events, token) if replaced is None else replaced

    def stage(self, table: DeltaTable) -> DeltaStage:
        """Return the stage for files of the applied-events table."""
        layout = DeltaLayout(self.schema, self.keys)
        indexed = indexed_columns(self.schema, table.metadata().configuration)
        return DeltaStage(self.place, layout, "applied", 0, indexed)

    def _merged(self, table: DeltaTable, events: pa.Table, token: int) -> int:
        if self.history:
            import_deltalake("deltalake").write_deltalake(
                table, events, mode="append", commit_properties=_written_by(token)
            )
        else:
            merge = merge_by_keys(table, events, self.keys, _written_by(token))
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
        if self.place.app_version(table, _WRITER) != token:
            raise import_deltalake("deltalake.exceptions").CommitFailedError(
                "another writer has recorded events"
            )
        return int(table.version())


def rows_with_keys(
    place: DeltaPlace,
    table: DeltaTable,
    touched: pa.Table,
    schema: pa.Schema,
    *,
    part_bytes: int = _JOINED_BYTES,
) -> pa.Table:
    """Read the rows of a table that have the ``touched`` keys, with the columns of ``schema``.

    About ``part_bytes`` of the table are in memory at a time.
    """
    columns = ", ".join(map(quoted, schema.names))
    with place.translating_errors():
        # Not through an Arrow dataset: its reader threads for deltalake sometimes abort an exiting process.
        batches = stored_rows(table, f"SELECT {columns} FROM stored", small=part_bytes < _JOINED_BYTES)
        parts = [
            _with_keys(pa.Table.from_batches(group).cast(schema), touched)
            for group in grouped(batches, _JOINED_ROWS, part_bytes)
        ]
    return pa.concat_tables([schema.empty_table(), *parts])


def stored_rows(table: DeltaTable, query: str, *, small: bool) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query on the relation ``stored``, in ``small`` batches if rows may be wide."""
    builder = import_deltalake("deltalake").QueryBuilder().register("stored", table)
    if small:
        list(builder.execute(f"SET datafusion.execution.batch_size = {_SMALL_ROWS}"))
    return (pa.record_batch(batch) for batch in builder.execute(query))


def _with_keys(part: pa.Table, touched: pa.Table) -> pa.Table:
    """Filter rows by joining only their keys and numbers, since Arrow cannot join nested values."""
    keys = touched.column_names
    matched = numbered(part.select(keys), _NUMBER).join(touched, keys=keys, join_type="left semi")
    return part.take(matched[_NUMBER])


def _written_by(token: int) -> Any:
    return commit_properties({_WRITER: token})


def _types(schema: Any) -> dict[str, str]:
    return {field["name"]: field["type"] for field in json.loads(schema.to_json())["fields"]}


def _shown(types: dict[str, str]) -> str:
    return ", ".join(sorted(f"{name} {kind}" for name, kind in types.items() if name != PRESENT))
