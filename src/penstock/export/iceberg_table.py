"""The Iceberg table of an export: a property records the positions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyiceberg.manifest import DataFile

from penstock.arrow.arrays import grouped
from penstock.errors import PenstockError, TableRefusedError
from penstock.export.table import MOST_SMALL, QueueId, TableChangedError
from penstock.lake.parquet import completed
from penstock.parallel import in_parallel
from penstock.spark.schemas import to_struct
from penstock.tables.iceberg.attempts import Attempt, delete_abandoned
from penstock.tables.iceberg.data_files import FileTarget, in_schema, written
from penstock.tables.iceberg.place import IcebergPlace
from penstock.tables.iceberg.reading import live_rows
from penstock.tables.iceberg.schema import RowLayout, add_columns, match_table, rows_layout, table_schema
from penstock.tables.iceberg.transactions import CommitConflict, OneTry
from penstock.tables.iceberg.writer import require_writable
from penstock.tables.names import digest

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import FileScanTask, Table, Transaction

_ATTEMPTS = 10
_GROUP_ROWS, _GROUP_BYTES = 1 << 20, 64 << 20
"""How much is in memory at a time: a row group."""
_MOST_MERGED = 256
"""So many files are merged at a time."""
_LONGEST_SECONDS = 3600.0
"""How long an attempt may take: after a day a clean-up takes its files for those of a dead process."""
_SIZE = "write.target-file-size-bytes"


class IcebergExportTable:
    """A property of the table has the queue's generation, and the index after the last row of each partition.
    It is committed with the snapshot, and stays when snapshots expire.
    """

    def __init__(self, place: IcebergPlace, queue: QueueId, file_bytes: int) -> None:
        self._place, self._queue, self._file_bytes = place, queue, file_bytes
        self._table: Table | None = None

    @property
    def shown(self) -> str:
        return f"the Iceberg table {self._place.shown}"

    @property
    def version(self) -> int | None:
        snapshot = None if self._table is None else self._table.current_snapshot()
        return None if snapshot is None else snapshot.snapshot_id

    def prepare(self, schema: pa.Schema) -> None:
        rows = _layout(schema)
        table = self._place.find() or self._place.create(table_schema(rows))
        require_writable(self._place, table)
        add_columns(self._place, rows)
        table = self._place.open()
        match_table(self._place, rows, table.schema(), table.metadata.default_spec_id)
        delete_abandoned(self._place, table)

    def load(self) -> bool:
        self._table = self._place.find()
        return self._table is not None

    @property
    def _loaded(self) -> Table:
        assert self._table is not None, "load comes first"
        return self._table

    @property
    def _property(self) -> str:
        return f"penstock.queue.{digest(f'{self._queue.store}:{self._queue.name}')}"

    def generation(self) -> int | None:
        recorded = self._recorded(self._loaded)
        return None if recorded is None else int(recorded["generation"])

    def positions(self, partitions: int) -> dict[int, int]:
        recorded = self._recorded(self._loaded) or {"positions": {}}
        return {int(part): int(end) for part, end in recorded["positions"].items()}

    def _recorded(self, table: Table) -> dict[str, Any] | None:
        text = table.properties.get(self._property)
        if text is None:
            return None
        try:
            recorded: dict[str, Any] = json.loads(text)
            int(recorded["generation"]), {int(part): int(end) for part, end in recorded["positions"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TableRefusedError(
                f"the property {self._property} of {self.shown} does not say which rows of queue "
                f"{self._queue.name!r} it has: restore the property, or export to another table",
                condition="TABLE_REFUSED.APP_PROPERTY",
                property=self._property,
            ) from None
        return recorded

    def append(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch], ends: Mapping[int, int]) -> None:
        attempt = Attempt.new(self._property)
        attempt.begin(self._place, self._loaded)
        try:
            files = self._written(_layout(schema), rows, attempt.token)
        except BaseException:
            # It has deleted what it wrote.
            attempt.end(self._place, self._loaded)
            raise
        self._commit(files, ends, attempt)
        attempt.end(self._place, self._loaded)

    def _written(self, rows: RowLayout, batches: Iterator[pa.RecordBatch], token: str) -> list[DataFile]:
        table = self._loaded
        layout = match_table(self._place, rows, table.schema(), table.metadata.default_spec_id)
        target = self._target(table, token)

        def converted() -> Iterator[pa.Table]:
            for group in grouped(batches, _GROUP_ROWS, _GROUP_BYTES):
                part = pa.Table.from_batches([completed(batch, rows.schema) for batch in group])
                yield in_schema(
                    target,
                    [pa.nulls(part.num_rows) if at is None else part.column(at) for at in layout.places],
                )

        return written(target, converted())

    def _target(self, table: Table, token: str) -> FileTarget:
        size = {_SIZE: str(self._file_bytes), **table.metadata.properties}
        metadata = table.metadata.model_copy(update={"properties": size})
        return FileTarget.of(self._place.shown, table.io, metadata, token)

    def _commit(self, files: list[DataFile], ends: Mapping[int, int], attempt: Attempt) -> None:
        """Commit files and positions.

        Files are never deleted after the catalog was asked to commit them, since it may have done so whatever
        it answered: the clean-up deletes them a day later, unless a snapshot has them.
        """
        before = self._recorded(self._loaded)
        positions = {
            **(before["positions"] if before else {}),
            **{str(part): end for part, end in ends.items()},
        }
        recorded = {
            "store": self._queue.store,
            "queue": self._queue.name,
            "generation": self._queue.generation,
            "attempt": attempt.token,
            "positions": positions,
        }
        for _ in range(_ATTEMPTS):
            table = self._place.find()
            if table is None:
                raise TableChangedError("it was deleted")
            now = self._recorded(table)
            if now is not None and now.get("attempt") == attempt.token:
                return
            if now != before:
                # They may be those of this attempt, if the reply was lost and another one came after it.
                raise TableChangedError("another process has exported rows of the queue")
            self._require_as_written(table, files, attempt)
            try:
                self._send(table, files, json.dumps(recorded))
                return
            except CommitConflict:
                continue
            except PenstockError:
                # The catalog may have committed it, and only the reply is lost.
                now = self._recorded(self._place.open())
                if now is None or now.get("attempt") != attempt.token:
                    raise
                return
        raise TableChangedError(f"other writers were faster {_ATTEMPTS} times")

    def _require_as_written(self, table: Table, files: Sequence[DataFile], attempt: Attempt) -> None:
        """Refuse to commit files that the table does not take any more, or that a clean-up has deleted."""
        old, new = self._loaded.metadata, table.metadata
        if (old.current_schema_id, old.default_spec_id) != (new.current_schema_id, new.default_spec_id):
            raise TableChangedError("its columns or its partitioning have changed")
        if time.time() - attempt.started > _LONGEST_SECONDS:
            raise TableChangedError("writing the files took too long")
        with self._place.translating_errors("its data files cannot be found"):
            exist = in_parallel(lambda file: table.io.new_input(file.file_path).exists(), files)
        if not all(exist):
            raise TableChangedError("its data files were deleted meanwhile")

    def _send(self, table: Table, files: list[DataFile], recorded: str) -> None:
        with self._sending(table) as transaction:
            transaction.set_properties({self._property: recorded})
            with transaction.update_snapshot().merge_append() as update:
                for file in files:
                    update.append_data_file(file)

    @contextmanager
    def _sending(self, table: Table) -> Iterator[Transaction]:
        """Yield a transaction, and commit it once."""
        table.catalog = cast("Catalog", OneTry(table.catalog))
        with self._place.translating_errors("the commit failed", beside=(CommitConflict,)):
            transaction = table.transaction()
            yield transaction
            transaction.commit_transaction()

    def tidy(self) -> None:
        if not self.load():
            return
        table = self._loaded
        snapshot = table.current_snapshot()
        summary = snapshot.summary if snapshot is not None else None
        few = summary is None or int(summary["total-data-files"] or 0) < MOST_SMALL
        # Each partition of a table has its own files, which are small because it is.
        if few or not table.spec().is_unpartitioned():
            return
        with self._place.translating_errors("its files cannot be listed"):
            files = list(table.scan().plan_files())
        small = [f for f in files if f.file.file_size_in_bytes < self._file_bytes // 4 and not f.delete_files]
        if len(small) >= MOST_SMALL:
            self._merge(table, small[:_MOST_MERGED])

    def _merge(self, table: Table, small: Sequence[FileScanTask]) -> None:
        """Replace files by fewer ones with the same rows, unless another writer is faster."""
        attempt = Attempt.new(self._property)
        attempt.begin(self._place, table)
        target = self._target(table, attempt.token)
        batches = (
            batch for file in small for batch in live_rows(table.io, table.metadata, file, table.schema())
        )
        parts = (pa.Table.from_batches(group) for group in grouped(batches, _GROUP_ROWS, _GROUP_BYTES))
        try:
            merged = written(target, (in_schema(target, part.columns) for part in parts))
        except BaseException:
            attempt.end(self._place, table)
            raise
        # As in _commit, the files stay where they are if the commit fails.
        with suppress(CommitConflict, TableChangedError):
            self._require_as_written(table, merged, attempt)
            with self._sending(table) as transaction, transaction.update_snapshot().overwrite() as update:
                for file in small:
                    update.delete_data_file(file.file)
                for new in merged:
                    update.append_data_file(new)
            attempt.end(self._place, table)


def _layout(schema: pa.Schema) -> RowLayout:
    return rows_layout(to_struct(pa.schema([field.with_nullable(True) for field in schema])), ())
