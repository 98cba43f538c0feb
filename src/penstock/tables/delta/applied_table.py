"""The applied-events table: a Delta table in the folder of a data table, with the events applied to it.

For SCD type 1 it has the last event of every key so far, for type 2 the deletes. An app transaction of the
data table names the matching version of the applied-events table. So both change atomically, events recorded
by a writer that then died do not count, and two concurrent writers of changes conflict.
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
from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.tables.changes.events import PRESENT, SEQUENCE, EventLayout
from penstock.tables.changes.merge_plan import with_row_numbers
from penstock.tables.delta.log_commit import LOG_CLEANUP
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.delta.stage import STAGING_FOLDER, DeltaStage
from penstock.tables.delta.statistics import indexed_columns
from penstock.tables.delta.transactions import commit_properties, merge_by_keys
from penstock.tables.delta.vectors import VECTORS_PROPERTY
from penstock.tables.names import quoted

if TYPE_CHECKING:
    from deltalake import DeltaTable

_WRITER = "penstock:writer"
_MAX_FILES = 64
_JOIN_ROWS, _JOIN_BYTES = 1 << 19, 1 << 28
_NUMBER = "_penstock_number"
_SMALL_ROWS = 512
_CLEANUP_INTERVAL = 100


@dataclass(frozen=True)
class AppliedTable:
    """The applied-events table of a data table."""

    location: DeltaLocation
    data_table: str
    """The name of the data table in messages."""
    schema: pa.Schema
    keys: tuple[str, ...]
    keeps_history: bool

    @classmethod
    def for_table(cls, location: DeltaLocation, table: DeltaTable, events: EventLayout) -> AppliedTable:
        """Return the applied-events table of a data table.

        The path has the id of the data table, so a recreated data table gets a new applied-events table.
        """
        applied = DeltaLocation(f"{location.path}/{STAGING_FOLDER}/{_folder_name(table)}", location.options)
        return cls(applied, location.label, events.recorded_schema, events.keys, events.keeps_history)

    @property
    def transaction(self) -> str:
        """The data table's app transaction whose version is the version of this table."""
        return f"penstock:{self.location.path.rpartition('/')[2]}"

    def belongs_to(self, table: DeltaTable) -> bool:
        """Return whether it is the applied-events table of a loaded table, which may have been recreated."""
        return self.location.path.endswith(f"/{_folder_name(table)}")

    def version_for(self, table: DeltaTable) -> int:
        """Return the version that matches a loaded version of the data table."""
        version = self.location.app_version(table, self.transaction)
        if version is None:
            raise TableRefusedError(
                f"the Delta table {self.data_table} has lost the app transaction {self.transaction}, which "
                "says which changes it has: its property delta.setTransactionRetentionDuration is too short, "
                "or its log was cut. Remove that property, and drop the table to start over",
                condition="TABLE_REFUSED.CHANGES_FORGOTTEN",
                table=self.data_table,
            )
        return version

    def prepare(self, table: DeltaTable) -> None:
        """Create the applied-events table if it does not exist, and name its version in the data table."""
        # Only Penstock reads it, so it may use deletion vectors. Its commits do not clean up the log, since
        # the previous version is needed until the data table names the new one.
        vectors = {VECTORS_PROPERTY: "true"} if supports_conditional_put(self.location) else {}
        applied = self.location.create(self.schema, {LOG_CLEANUP: "false", **vectors})
        new_types, recorded_types = (
            _types(import_deltalake("deltalake").Schema.from_arrow(self.schema)),
            _types(applied.schema()),
        )
        if new_types != recorded_types:
            raise SchemaMismatchError(
                f"earlier changes of the Delta table {self.data_table} were ordered by "
                f"{recorded_types.pop(SEQUENCE, None)} with the keys {_types_for_messages(recorded_types)}, "
                f"and these are ordered by {new_types.pop(SEQUENCE, None)} with "
                f"{_types_for_messages(new_types)}: keep keys and sequence_by, or drop the table to start "
                "over",
                condition="SCHEMA_MISMATCH.KEYS_CHANGED",
                table=self.data_table,
            )
        if self.location.app_version(table, self.transaction) is None and applied.version() == 0:
            with suppress(import_deltalake("deltalake.exceptions").CommitFailedError):
                # Another process may set the version at the same time.
                self.set_version_in(table, 0)

    def set_version_in(
        self, table: DeltaTable, version: int, other_transactions: Mapping[str, int] | None = None
    ) -> None:
        """Name a version in the data table, in a commit with no rows and with other app transactions."""
        no_rows = pa.schema(table.schema().to_arrow()).empty_table()
        properties = commit_properties({**(other_transactions or {}), self.transaction: version})
        import_deltalake("deltalake").write_deltalake(
            table, no_rows, mode="append", commit_properties=properties
        )

    def vacuum(self, version: int) -> None:
        """Delete old commits, and the files of old versions, if the data table names the newest version."""
        table = self.location.open()
        if table.version() == version:
            with self.location.translating_errors():
                table.cleanup_metadata()
                table.vacuum(dry_run=False)

    def events(self, version: int, lookup_keys: pa.Table) -> pa.Table:
        """Read the events of the given keys in a version."""
        return rows_with_keys(self.location, self.location.open(version), lookup_keys, self.schema)

    def record(
        self,
        version: int,
        events: pa.Table,
        record_in_tasks: Callable[[DeltaTable], int | None] | None = None,
    ) -> int:
        """Record events on top of a version with only earlier events of their keys; return the new version.

        ``record_in_tasks`` gets the table with that version's rows, and may have Spark tasks record the
        events; if it returns None, deltalake records them.
        """
        if not events.num_rows:
            return version
        token = uuid.uuid4().int >> 66
        table = self.location.open()
        if table.version() != version:
            # A writer died between its commits to this table and the data table, or is still between them.
            table.restore(version, commit_properties=_writer_properties(token))
        elif (version + 1) % _CLEANUP_INTERVAL == 0:
            table.cleanup_metadata()
        if len(table.file_uris()) > _MAX_FILES:
            table.optimize.compact(commit_properties=_writer_properties(token))
        recorded_version = None if record_in_tasks is None else record_in_tasks(table)
        return self._merge(table, events, token) if recorded_version is None else recorded_version

    def stage(self, table: DeltaTable) -> DeltaStage:
        """Return the stage for files of the applied-events table."""
        layout = DeltaLayout(self.schema, self.keys)
        indexed = indexed_columns(self.schema, table.metadata().configuration)
        return DeltaStage(self.location, layout, "applied", 0, indexed)

    def _merge(self, table: DeltaTable, events: pa.Table, token: int) -> int:
        if self.keeps_history:
            import_deltalake("deltalake").write_deltalake(
                table, events, mode="append", commit_properties=_writer_properties(token)
            )
        else:
            merge = merge_by_keys(table, events, self.keys, _writer_properties(token))
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
        if self.location.app_version(table, _WRITER) != token:
            raise import_deltalake("deltalake.exceptions").CommitFailedError(
                "another writer has recorded events"
            )
        return int(table.version())


def _folder_name(table: DeltaTable) -> str:
    return f"applied-{table.metadata().id}"


def rows_with_keys(
    location: DeltaLocation,
    table: DeltaTable,
    lookup_keys: pa.Table,
    schema: pa.Schema,
    *,
    part_bytes: int = _JOIN_BYTES,
) -> pa.Table:
    """Read the rows of a table that have one of the ``lookup_keys``, with the columns of ``schema``.

    About ``part_bytes`` of the table are in memory at the same time.
    """
    columns = ", ".join(map(quoted, schema.names))
    with location.translating_errors():
        # Do not use an Arrow dataset: its reader threads for deltalake sometimes abort an exiting process.
        batches = stored_rows(table, f"SELECT {columns} FROM stored", small_batches=part_bytes < _JOIN_BYTES)
        tables = [
            _join_keys(pa.Table.from_batches(group).cast(schema), lookup_keys)
            for group in grouped(batches, _JOIN_ROWS, part_bytes)
        ]
    return pa.concat_tables([schema.empty_table(), *tables])


def stored_rows(table: DeltaTable, query: str, *, small_batches: bool) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a SQL query on the table ``stored``; use ``small_batches`` if rows may be wide."""
    builder = import_deltalake("deltalake").QueryBuilder().register("stored", table)
    if small_batches:
        list(builder.execute(f"SET datafusion.execution.batch_size = {_SMALL_ROWS}"))
    return (pa.record_batch(batch) for batch in builder.execute(query))


def _join_keys(rows: pa.Table, lookup_keys: pa.Table) -> pa.Table:
    """Filter rows by joining only their keys and row numbers, since Arrow cannot join nested values."""
    keys = lookup_keys.column_names
    matched = with_row_numbers(rows.select(keys), _NUMBER).join(lookup_keys, keys=keys, join_type="left semi")
    return rows.take(matched[_NUMBER])


def _writer_properties(token: int) -> Any:
    return commit_properties({_WRITER: token})


def _types(schema: Any) -> dict[str, str]:
    return {field["name"]: field["type"] for field in json.loads(schema.to_json())["fields"]}


def _types_for_messages(types: dict[str, str]) -> str:
    return ", ".join(sorted(f"{name} {kind}" for name, kind in types.items() if name != PRESENT))
