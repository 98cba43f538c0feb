"""Files that tasks write for a micro-batch of a Delta table, until the driver commits them.

If the files can be committed as they are, they are data files in the table's folder. Otherwise they are
staged in another folder, and the driver passes their rows to deltalake.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow.fs import FileType
from pyspark import TaskContext

from penstock.arrow.coerce import conform
from penstock.errors import CommitRefusedError, PenstockError, condition_of
from penstock.lake.deletion_vectors import DeletionVector
from penstock.lake.storage import DeltaLocation
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.delta.data_files import DataFile, file_report, read_file, write_file
from penstock.tables.delta.schema import DeltaLayout, require_partition_values
from penstock.tables.names import digest
from penstock.tables.row_checks import require_key_value
from penstock.tables.row_encoding import in_chunks

log = logging.getLogger("penstock.tables")

# Delta's tools ignore folders whose name begins with an underscore.
STAGING_FOLDER = "_penstock"
_DAY_SECONDS = 86_400.0
_OLD_SECONDS = 1800.0


@dataclass(frozen=True)
class DeltaStage:
    """One attempt at a micro-batch; created on the driver and sent to the tasks."""

    location: DeltaLocation
    layout: DeltaLayout
    app_id: str
    batch_id: int
    indexed: tuple[str, ...] | None = None
    """The columns with statistics, for data files in the table's folder; None for staged files."""
    started_at: float = field(default_factory=time.time)
    partitions: tuple[str, ...] = ()
    """The columns that the table is partitioned by."""

    @property
    def is_old(self) -> bool:
        """Whether the attempt started so long ago that the driver may have been suspended."""
        return time.time() - self.started_at > _OLD_SECONDS

    def new_path(self) -> str:
        """Return the path of a new file, unique to a task attempt.

        A data file that is never committed is left to ``VACUUM``, since only ``VACUUM`` knows what readers
        and other writers may still need.
        """
        if self.indexed is not None:
            return f"part-{self._app_digest}-{self.batch_id}-{uuid.uuid4().hex}.zstd.parquet"
        name = f"{self._app_digest}-{self.batch_id}-{int(time.time())}-{uuid.uuid4().hex}.parquet"
        return f"{STAGING_FOLDER}/{name}"

    def write(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema | None = None) -> DataFile | None:
        """Write a file of rows, by default with the columns of the query; return None without rows."""
        return write_file(
            self.location, self.new_path(), schema or self.layout.schema, batches, self.indexed or ()
        )

    @property
    def _app_digest(self) -> str:
        return digest(self.app_id)

    def reader(self, files: Sequence[DataFile]) -> pa.RecordBatchReader:
        return record_batch_reader(self.layout.schema, self.batches(files, self.layout.schema))

    def batches(self, files: Sequence[DataFile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the columns of ``schema``, always in the same order."""
        for file in files:
            yield from read_file(self.location, file.path, schema)

    def chunks(self, files: Sequence[DataFile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the same rows in fewer batches."""
        return in_chunks(self.batches(files, schema))

    def columns(self, files: Sequence[DataFile], names: Sequence[str]) -> pa.Table:
        schema = pa.schema([self.layout.schema.field(name) for name in names])
        with self.location.translating_errors():
            return pa.Table.from_batches(self.batches(files, schema), schema)

    def require_files(self, files: Sequence[DataFile]) -> None:
        """Refuse to commit when files are missing or have another size than the tasks reported."""
        self._require_sizes({file.path: file.size for file in files})

    def require_vectors(self, vectors: Sequence[DeletionVector]) -> None:
        """Refuse to commit when files of deletion vectors are missing."""
        self._require_sizes({vector.path: None for vector in vectors if vector.path is not None})

    def _require_sizes(self, sizes: Mapping[str, int | None]) -> None:
        """Refuse to commit when files are missing or do not have the size in ``sizes``."""
        with self.location.translating_errors():
            infos = self.location.files().get_file_info(list(sizes))
        infos_and_sizes = zip(infos, sizes.values(), strict=True)
        if any(info.type != FileType.File or size not in (None, info.size) for info, size in infos_and_sizes):
            raise CommitRefusedError(
                f"some files that the tasks wrote for batch {self.batch_id} are missing in "
                f"{self.location.label} on the driver: use a folder that all machines share. Nothing of the "
                "batch is visible: restart the query, it repeats the micro-batch",
                condition="COMMIT_REFUSED.STAGED_FILES_MISSING",
                batch_id=self.batch_id,
            )

    def delete_uncommitted(self, files: Sequence[DataFile]) -> None:
        """Delete data files that no attempt has tried to commit."""
        if self.indexed is not None:
            with self._logging_errors():
                _delete(self.location, [file.path for file in files])

    def delete_staged(self) -> None:
        """Delete the files staged up to the micro-batch; after errors, a later clean-up deletes them.

        Data files in the table's folder are kept even if the commit seems to have failed, since that is never
        certain.
        """
        if self.indexed is not None:
            return
        with self._logging_errors():
            staged = _list_staged_files(self.location).items()
            _delete(
                self.location,
                [
                    name
                    for name, (app, batch_id, _) in staged
                    if app == self._app_digest and batch_id <= self.batch_id
                ],
            )

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except PenstockError as error:
            # Do not hide an earlier error of the commit.
            _log_undeleted_files(self.location, error, str(error))


def record_batch_reader(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    """Return batches as a RecordBatchReader for deltalake."""
    return pa.RecordBatchReader.from_batches(schema, _read_ahead(batches))


def _read_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read ahead in another thread, since deltalake's storage hangs in the thread that consumes batches."""
    with ThreadPoolExecutor(1) as pool:
        next_batch = pool.submit(next, batches, None)
        while (batch := next_batch.result()) is not None:
            next_batch = pool.submit(next, batches, None)
            yield batch


def delete_abandoned(location: DeltaLocation) -> None:
    """Delete the staged files of dead queries, which have staged nothing for a day."""
    cutoff = time.time() - _DAY_SECONDS
    staged = _list_staged_files(location)
    live_apps = {app for app, _, staged_at in staged.values() if staged_at >= cutoff}
    _delete(location, [name for name, (app, _, _) in staged.items() if app not in live_apps])


def _delete(location: DeltaLocation, names: Iterable[str]) -> None:
    files = location.files()
    for name in names:
        try:
            files.delete_file(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log_undeleted_files(location, error, location.message(error))


def _log_undeleted_files(location: DeltaLocation, error: Exception, text: str) -> None:
    log.warning(
        "staged rows stay in %s: %s",
        location.label,
        text,
        extra={"action": "staged_stay", "table": location.label, "error": condition_of(error)},
    )


def _list_staged_files(location: DeltaLocation) -> Mapping[str, tuple[str, int, int]]:
    """List staged files with their app, micro-batch and time in seconds since 1970."""
    from pyarrow.fs import FileSelector

    with location.translating_errors():
        infos = location.files().get_file_info(FileSelector(STAGING_FOLDER, allow_not_found=True))
    name_parts = {f"{STAGING_FOLDER}/{info.base_name}": info.base_name.split("-") for info in infos}
    return {
        name: (parts[0], int(parts[1]), int(parts[2]))
        for name, parts in name_parts.items()
        if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit()
    }


@dataclass
class DeltaStageTask:
    """Function for ``mapInArrow``, which writes rows to a file and returns a report of it."""

    stage: DeltaStage = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        file = self.write_rows(batches)
        yield file_report(file, context.getLocalProperty("sql.streaming.queryId"))

    def write_rows(self, batches: Iterator[pa.RecordBatch]) -> DataFile | None:
        """Write the rows to a file; return None without rows."""
        return self.stage.write(self._check_rows(in_chunks(batches)))

    def _check_rows(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        layout = self.stage.layout
        for chunk in chunks:
            # Rows arrive with the columns c0, c1 and so on.
            batch = conform(chunk.rename_columns(layout.schema.names), layout.schema)
            for key in layout.keys:
                require_key_value(batch.column(key), key, self.stage.location.label)
            require_partition_values(batch, self.stage.partitions, self.stage.location.label)
            yield batch
