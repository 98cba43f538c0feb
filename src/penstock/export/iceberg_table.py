"""``IcebergExportTable``: the Iceberg table of an export, with a property that records the positions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.manifest import DataFile

from penstock.arrow.arrays import grouped
from penstock.errors import PenstockError, TableRefusedError
from penstock.export.table import MIN_SMALL_FILES, QueueId, TableChangedError, rolled_back
from penstock.lake.parquet import align_to_schema
from penstock.spark.schemas import to_struct
from penstock.tables.iceberg.attempts import Attempt, delete_abandoned, reason_not_to_commit
from penstock.tables.iceberg.compaction import merge_files, small_files
from penstock.tables.iceberg.data_files import FileTarget, cast_to_file_schema, write_data_files
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.rollback import is_rolled_back
from penstock.tables.iceberg.schema import (
    RowLayout,
    evolve,
    match_table,
    new_columns,
    rows_layout,
    table_schema,
)
from penstock.tables.iceberg.transactions import CommitConflict, disable_commit_retries
from penstock.tables.iceberg.writer import require_writable
from penstock.tables.names import digest

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

_ATTEMPTS = 10
_GROUP_ROWS, _GROUP_BYTES = 1 << 20, 64 << 20
"""The size of a row group; one row group is in memory at a time."""
_TARGET_SIZE = "write.target-file-size-bytes"


class IcebergExportTable:
    """An Iceberg table that records positions in a property.

    The property has the queue's generation, and the index after the last exported row of each partition. It
    is committed with the snapshot, and is not lost when snapshots expire. A rollback does not change it, so
    it also has the id of the export's last snapshot, which must be an ancestor of the current snapshot.
    """

    def __init__(self, location: IcebergLocation, queue: QueueId, file_bytes: int) -> None:
        self._location, self._queue, self._file_bytes = location, queue, file_bytes
        self._table: Table | None = None

    @property
    def label(self) -> str:
        return f"the Iceberg table {self._location.label}"

    @property
    def version(self) -> int | None:
        snapshot = None if self._table is None else self._table.current_snapshot()
        return None if snapshot is None else snapshot.snapshot_id

    def prepare(self, schema: pa.Schema) -> None:
        row_layout = _layout(schema)
        table = self._location.find() or self._location.create(table_schema(row_layout))
        require_writable(self._location, table)
        evolve(self._location, row_layout)
        table = self._location.open()
        match_table(self._location, row_layout, table.schema(), table.metadata.default_spec_id)
        delete_abandoned(self._location, table)

    def load(self) -> bool:
        self._table = self._location.find()
        return self._table is not None

    def lacks_columns(self, schema: pa.Schema) -> bool:
        return bool(new_columns(_layout(schema), self._loaded))

    @property
    def _loaded(self) -> Table:
        assert self._table is not None, "load comes first"
        return self._table

    @property
    def _property(self) -> str:
        return f"penstock.queue.{digest(f'{self._queue.store}:{self._queue.name}')}"

    def generation(self) -> int | None:
        record = self._read_record(self._loaded)
        return None if record is None else int(record["generation"])

    def positions(self, partitions: int) -> dict[int, int]:
        record = self._read_record(self._loaded) or {"positions": {}}
        return {int(part): int(end) for part, end in record["positions"].items()}

    def _read_record(self, table: Table) -> dict[str, Any] | None:
        text = table.properties.get(self._property)
        if text is None:
            return None
        try:
            record: dict[str, Any] = json.loads(text)
            int(record["generation"]), int(record["snapshot"]), int(record["number"])
            {int(part): int(end) for part, end in record["positions"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TableRefusedError(
                f"the property {self._property} of {self.label} is not a valid record of the exported rows "
                f"of queue {self._queue.name!r}: restore the property, or export to another table",
                condition="TABLE_REFUSED.APP_PROPERTY",
                property=self._property,
            ) from None
        return record

    def refuse_rollback(self) -> None:
        self._refuse_rollback(self._loaded)

    def _refuse_rollback(self, table: Table) -> None:
        record = self._read_record(table)
        if record is not None and is_rolled_back(table.metadata, record["snapshot"], record["number"]):
            raise rolled_back(self, self._queue, f"snapshot {record['snapshot']}")

    def append(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch], ends: Mapping[int, int]) -> None:
        attempt = Attempt.standalone()
        attempt.write_pending_file(self._location, self._loaded)
        try:
            files = self._write_files(_layout(schema), rows, attempt.token)
        except BaseException:
            # _written has deleted its files.
            attempt.delete_pending_file(self._location, self._loaded)
            raise
        self._commit(files, ends, attempt)
        attempt.delete_pending_file(self._location, self._loaded)

    def _write_files(
        self, row_layout: RowLayout, batches: Iterator[pa.RecordBatch], token: str
    ) -> list[DataFile]:
        table = self._loaded
        layout = match_table(self._location, row_layout, table.schema(), table.metadata.default_spec_id)
        target = self._file_target(table, token)

        def table_groups() -> Iterator[pa.Table]:
            for group in grouped(batches, _GROUP_ROWS, _GROUP_BYTES):
                group_rows = pa.Table.from_batches(
                    [align_to_schema(batch, row_layout.schema) for batch in group]
                )
                yield cast_to_file_schema(target, layout.values(group_rows))

        return write_data_files(target, table_groups())

    def _file_target(self, table: Table, token: str) -> FileTarget:
        properties = {_TARGET_SIZE: str(self._file_bytes), **table.metadata.properties}
        metadata = table.metadata.model_copy(update={"properties": properties})
        return FileTarget.of(self._location.label, table.io, metadata, token)

    def _commit(self, files: list[DataFile], ends: Mapping[int, int], attempt: Attempt) -> None:
        """Commit files and positions.

        After the catalog was asked to commit files, they are not deleted, because it may have committed them
        whatever it replied. A clean-up deletes them a day later, unless a snapshot refers to them.
        """
        previous = self._read_record(self._loaded)
        positions = {
            **(previous["positions"] if previous else {}),
            **{str(part): end for part, end in ends.items()},
        }
        record = {
            "store": self._queue.store,
            "queue": self._queue.name,
            "generation": self._queue.generation,
            "attempt": attempt.token,
            "positions": positions,
        }
        for _ in range(_ATTEMPTS):
            table = self._location.find()
            if table is None:
                raise TableChangedError("it was deleted")
            current = self._read_record(table)
            if current is not None and current.get("attempt") == attempt.token:
                return
            if current != previous:
                # This attempt may have been committed before, if its reply was lost.
                raise TableChangedError("another process has exported rows of the queue")
            self._refuse_rollback(table)
            if reason := reason_not_to_commit(self._location, attempt, files, self._loaded, table):
                raise TableChangedError(reason)
            try:
                self._try_commit(table, files, record)
                return
            except CommitConflict:
                continue
            except PenstockError:
                # The catalog may have committed the files, and only its reply was lost.
                current = self._read_record(self._location.open())
                if current is None or current.get("attempt") != attempt.token:
                    raise
                return
        raise TableChangedError(f"other writers committed first {_ATTEMPTS} times")

    def _try_commit(self, table: Table, files: list[DataFile], record: Mapping[str, object]) -> None:
        with self._transaction(table) as transaction:
            sequence_number = transaction.table_metadata.next_sequence_number()
            with transaction.update_snapshot().merge_append() as append_files:
                for file in files:
                    append_files.append_data_file(file)
            snapshot = {"snapshot": append_files.snapshot_id, "number": sequence_number}
            transaction.set_properties({self._property: json.dumps({**record, **snapshot})})

    @contextmanager
    def _transaction(self, table: Table) -> Iterator[Transaction]:
        """Yield a transaction, and commit it without retries."""
        disable_commit_retries(table)
        with self._location.translating_errors("the commit failed", untranslated=(CommitConflict,)):
            transaction = table.transaction()
            yield transaction
            transaction.commit_transaction()

    def compact_small_files(self) -> None:
        if not self.load():
            return
        snapshot = self._loaded.current_snapshot()
        summary = snapshot.summary if snapshot is not None else None
        if summary is None or int(summary["total-data-files"] or 0) < MIN_SMALL_FILES:
            return
        files = small_files(
            self._location, self._loaded, self._file_bytes // 4, self._file_bytes, MIN_SMALL_FILES
        )
        if files:
            with suppress(CommitConflict):
                merge_files(self._location, self._loaded, files, self._file_bytes)


def _layout(schema: pa.Schema) -> RowLayout:
    return rows_layout(to_struct(pa.schema([field.with_nullable(True) for field in schema])), ())
