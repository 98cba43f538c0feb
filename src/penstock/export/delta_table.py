"""An export's Delta table, whose app transactions record the positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.errors import PenstockError, TableRefusedError
from penstock.export.table import MOST_SMALL, QueueId, TableChangedError, rolled_back, with_columns_of
from penstock.lake.parquet import completed
from penstock.lake.storage import DeltaPlace, library
from penstock.parallel import ahead
from penstock.tables.delta.restores import KeptCommits
from penstock.tables.delta.schema import DeltaLayout, add_columns, match_table
from penstock.tables.delta.transactions import commit_properties

if TYPE_CHECKING:
    from deltalake import DeltaTable

_RETENTION = "delta.setTransactionRetentionDuration"


class DeltaExportTable:
    """A Delta table that records positions in app transactions.

    The queue's transaction has the queue's generation as its version. Each partition's transaction has the
    index after the partition's last exported row. ``RESTORE`` keeps app transactions, so the log is searched
    for commits of the export that it took back.
    """

    def __init__(self, place: DeltaPlace, queue: QueueId, file_bytes: int) -> None:
        self._place, self._queue, self._file_bytes = place, queue, file_bytes
        self._kept = KeptCommits(place)
        self._table: DeltaTable | None = None

    @property
    def shown(self) -> str:
        return f"the Delta table {self._place.shown}"

    @property
    def version(self) -> int | None:
        return None if self._table is None else self._table.version()

    def prepare(self, schema: pa.Schema) -> None:
        layout = DeltaLayout(pa.schema([field.with_nullable(True) for field in schema]), ())
        table = self._place.find() or self._place.create(layout.schema)
        if _RETENTION in table.metadata().configuration:
            raise TableRefusedError(
                f"{self.shown} has the property {_RETENTION}, after which Delta forgets which rows of a "
                "queue the table has: remove the property, or export to another table",
                condition="TABLE_REFUSED.FORGETS_POSITIONS",
                table=self._place.shown,
            )
        add_columns(self._place, layout)
        match_table(self._place, layout, self._place.open())

    def load(self) -> bool:
        self._table = self._place.find()
        return self._table is not None

    @property
    def _loaded(self) -> DeltaTable:
        assert self._table is not None, "load comes first"
        return self._table

    @property
    def _name(self) -> str:
        return f"penstock-queue:{self._queue.store}:{self._queue.name}"

    def _part(self, partition: int) -> str:
        return f"{self._name}:{self._queue.generation}:{partition}"

    def generation(self) -> int | None:
        return self._app_version(self._name)

    def positions(self, partitions: int) -> dict[int, int]:
        found = ((part, self._app_version(self._part(part))) for part in range(partitions))
        return {part: position for part, position in found if position is not None}

    def _app_version(self, app: str) -> int | None:
        with self._reading_log():
            return self._place.app_version(self._loaded, app)

    @contextmanager
    def _reading_log(self) -> Iterator[None]:
        try:
            with self._place.translating_errors():
                yield
        except PenstockError as error:
            newest = self._place.find()
            if newest is not None and newest.version() == self._loaded.version():
                raise
            raise TableChangedError(str(error)) from None

    def refuse_rollback(self) -> None:
        with self._reading_log():
            lost = self._kept.lost(self._loaded, [self._name])
        if lost is not None:
            raise rolled_back(self, self._queue, f"version {lost}")

    def append(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch], ends: Mapping[int, int]) -> None:
        versions = {self._name: self._queue.generation}
        versions |= {self._part(part): end for part, end in ends.items()}
        deltalake, conflict = library("deltalake"), library("deltalake.exceptions").CommitFailedError
        complete = with_columns_of(pa.schema(self._loaded.schema().to_arrow()), schema)
        source = _Source(rows, complete)
        try:
            with self._place.translating_errors(beside=(conflict,)):
                deltalake.write_deltalake(
                    self._loaded,
                    # Read ahead in another thread: in the one that deltalake takes the batches in, an object
                    # store hangs.
                    pa.RecordBatchReader.from_batches(complete, ahead(iter(source))),
                    mode="append",
                    target_file_size=self._file_bytes,
                    commit_properties=commit_properties(versions),
                )
        except conflict as error:
            if self._place.open().version() == self._loaded.version():
                # No other writer has committed, so the table itself rejects the commit.
                raise TableRefusedError(
                    f"{self.shown} refused the commit: {self._place.message(error)}",
                    condition="TABLE_REFUSED.DELTA",
                    table=self._place.shown,
                ) from None
            raise TableChangedError(self._place.message(error)) from None
        except PenstockError:
            if source.error is None:
                raise
            # deltalake keeps only the text of an error that occurs while rows are read.
            raise source.error from None

    def tidy(self) -> None:
        conflict = library("deltalake.exceptions").CommitFailedError
        with suppress(conflict), self._place.translating_errors(beside=(conflict,)):
            if sum(size < self._file_bytes // 4 for size in self._sizes()) >= MOST_SMALL:
                self._loaded.optimize.compact(target_size=self._file_bytes)

    def _sizes(self) -> list[int]:
        actions = pa.table(self._loaded.get_add_actions())
        return [int(size) for size in actions["size_bytes"].to_pylist()]


class _Source:
    """Rows with all columns of a table, null where a row lacks one. It keeps an error that reading raises."""

    def __init__(self, rows: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._rows, self._schema = rows, schema
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._rows:
                yield completed(batch, self._schema)
        except Exception as error:
            self.error = error
            raise
