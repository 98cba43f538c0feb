"""``DeltaExportTable``: the Delta table of an export, whose app transactions record the positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.errors import PenstockError, TableRefusedError
from penstock.export.table import MIN_SMALL_FILES, QueueId, TableChangedError, exported_schema, rolled_back
from penstock.lake.parquet import align_to_schema
from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.parallel import ahead
from penstock.tables.delta.restores import RequiredCommits
from penstock.tables.delta.schema import DeltaLayout, add_columns, match_table, new_columns
from penstock.tables.delta.transactions import commit_properties

if TYPE_CHECKING:
    from deltalake import DeltaTable

_RETENTION_PROPERTY = "delta.setTransactionRetentionDuration"


class DeltaExportTable:
    """A Delta table that records positions in app transactions.

    The version of the queue's app transaction is the queue's generation. The version of each partition's app
    transaction is the index after its last exported row. ``RESTORE`` keeps app transactions, so the log is
    searched for commits of the export that were undone.
    """

    def __init__(self, location: DeltaLocation, queue: QueueId, file_bytes: int) -> None:
        self._location, self._queue, self._file_bytes = location, queue, file_bytes
        self._kept_commits = RequiredCommits(location)
        self._table: DeltaTable | None = None

    @property
    def label(self) -> str:
        return f"the Delta table {self._location.label}"

    @property
    def version(self) -> int | None:
        return None if self._table is None else self._table.version()

    def prepare(self, schema: pa.Schema) -> None:
        layout = _layout(schema)
        table = self._location.find() or self._location.create(layout.schema)
        if _RETENTION_PROPERTY in table.metadata().configuration:
            raise TableRefusedError(
                f"{self.label} has the property {_RETENTION_PROPERTY}, so Delta would drop the record of the "
                "exported rows: remove the property, or export to another table",
                condition="TABLE_REFUSED.FORGETS_POSITIONS",
                table=self._location.label,
            )
        add_columns(self._location, layout)
        match_table(self._location, layout, self._location.open())

    def load(self) -> bool:
        self._table = self._location.find()
        return self._table is not None

    def lacks_columns(self, schema: pa.Schema) -> bool:
        return bool(new_columns(_layout(schema), self._loaded))

    @property
    def _loaded(self) -> DeltaTable:
        assert self._table is not None, "load comes first"
        return self._table

    @property
    def _queue_app(self) -> str:
        return f"penstock-queue:{self._queue.store}:{self._queue.name}"

    def _partition_app(self, partition: int) -> str:
        return f"{self._queue_app}:{self._queue.generation}:{partition}"

    def generation(self) -> int | None:
        return self._app_version(self._queue_app)

    def positions(self, partitions: int) -> dict[int, int]:
        versions = ((part, self._app_version(self._partition_app(part))) for part in range(partitions))
        return {part: position for part, position in versions if position is not None}

    def _app_version(self, app: str) -> int | None:
        with self._reading_log():
            return self._location.app_version(self._loaded, app)

    @contextmanager
    def _reading_log(self) -> Iterator[None]:
        try:
            with self._location.translating_errors():
                yield
        except PenstockError as error:
            newest = self._location.find()
            if newest is not None and newest.version() == self._loaded.version():
                raise
            raise TableChangedError(str(error)) from None

    def refuse_rollback(self) -> None:
        with self._reading_log():
            lost_version = self._kept_commits.last_lost_commit(self._loaded, [self._queue_app])
        if lost_version is not None:
            raise rolled_back(self, self._queue, f"version {lost_version}")

    def append(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch], ends: Mapping[int, int]) -> None:
        versions = {self._queue_app: self._queue.generation}
        versions |= {self._partition_app(part): end for part, end in ends.items()}
        deltalake, conflict = (
            import_deltalake("deltalake"),
            import_deltalake("deltalake.exceptions").CommitFailedError,
        )
        table_schema = exported_schema(pa.schema(self._loaded.schema().to_arrow()), schema)
        source = _CompletedRows(rows, table_schema)
        try:
            with self._location.translating_errors(untranslated=(conflict,)):
                deltalake.write_deltalake(
                    self._loaded,
                    # Read ahead in another thread, because reading from an object store in the thread in
                    # which deltalake consumes the batches hangs.
                    pa.RecordBatchReader.from_batches(table_schema, ahead(iter(source))),
                    mode="append",
                    target_file_size=self._file_bytes,
                    commit_properties=commit_properties(versions),
                )
        except conflict as error:
            if self._location.open().version() == self._loaded.version():
                # No other writer has committed, so the table itself rejected the commit.
                raise TableRefusedError(
                    f"{self.label} refused the commit: {self._location.message(error)}",
                    condition="TABLE_REFUSED.DELTA",
                    table=self._location.label,
                ) from None
            raise TableChangedError(self._location.message(error)) from None
        except PenstockError:
            if source.error is None:
                raise
            # deltalake keeps only the text of an error that is raised while rows are read.
            raise source.error from None

    def compact_small_files(self) -> None:
        conflict = import_deltalake("deltalake.exceptions").CommitFailedError
        with suppress(conflict), self._location.translating_errors(untranslated=(conflict,)):
            if sum(size < self._file_bytes // 4 for size in self._file_sizes()) >= MIN_SMALL_FILES:
                self._loaded.optimize.compact(target_size=self._file_bytes)

    def _file_sizes(self) -> list[int]:
        actions = pa.table(self._loaded.get_add_actions())
        return [int(size) for size in actions["size_bytes"].to_pylist()]


def _layout(schema: pa.Schema) -> DeltaLayout:
    return DeltaLayout(pa.schema([field.with_nullable(True) for field in schema]), ())


class _CompletedRows:
    """Iterable of row batches with all columns of a table (missing ones are null); stores a raised error."""

    def __init__(self, rows: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._rows, self._schema = rows, schema
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._rows:
                yield align_to_schema(batch, self._schema)
        except Exception as error:
            self.error = error
            raise
