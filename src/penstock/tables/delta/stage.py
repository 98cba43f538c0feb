"""Staging of a micro-batch for a Delta table: tasks write Parquet files beside its data, which the driver
then commits.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext

from penstock.arrow.coerce import conform
from penstock.errors import CommitRefusedError, PenstockError, condition_of
from penstock.lake.storage import DeltaPlace
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.names import digest
from penstock.tables.row_checks import require_key_value
from penstock.tables.row_encoding import chunked

log = logging.getLogger("penstock.tables")

# Delta's own tools ignore folders whose name begins with an underscore.
FOLDER = "_penstock"
REPORT = "file string, rows bigint, query string"
_REPORT = pa.schema([("file", pa.string()), ("rows", pa.int64()), ("query", pa.string())])
_BATCH_ROWS = 65_536
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class DeltaStage:
    """One try of one micro-batch; built on the driver, sent to the tasks."""

    place: DeltaPlace
    layout: DeltaLayout
    app_id: str
    batch_id: int

    def file(self) -> str:
        """Return a file name that no other attempt of a task has."""
        return f"{FOLDER}/{self._app}-{self.batch_id}-{int(time.time())}-{uuid.uuid4().hex}.parquet"

    @property
    def _app(self) -> str:
        return digest(self.app_id)

    def reader(self, files: Sequence[str]) -> pa.RecordBatchReader:
        return to_reader(self.layout.schema, self.batches(files, self.layout.schema))

    def batches(self, files: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield some columns of the staged rows, always in the same order."""
        source = self.place.files()
        for name in files:
            with source.open_input_file(name) as file:
                for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=schema.names):
                    yield batch.select(schema.names).cast(schema)

    def columns(self, files: Sequence[str], names: Sequence[str]) -> pa.Table:
        schema = pa.schema([self.layout.schema.field(name) for name in names])
        with self.place.translating_errors():
            return pa.Table.from_batches(self.batches(files, schema), schema)

    def require_files(self, files: Sequence[str]) -> None:
        """Refuse to commit when staged files are missing."""
        from pyarrow.fs import FileType

        with self.place.translating_errors():
            infos = self.place.files().get_file_info(list(files))
        if any(info.type != FileType.File for info in infos):
            raise CommitRefusedError(
                f"some rows that the tasks staged for batch {self.batch_id} are missing in "
                f"{self.place.shown}/{FOLDER} on the driver: use a folder that all machines share. Nothing "
                "of the batch is visible: restart the query, it repeats the micro-batch",
                condition="COMMIT_REFUSED.STAGED_FILES_MISSING",
                batch_id=self.batch_id,
            )

    def drop(self) -> None:
        """Delete what was staged up to the micro-batch; errors leave it to a later clean-up."""
        try:
            staged = _staged(self.place).items()
            _delete(
                self.place,
                [name for name, (app, batch, _) in staged if app == self._app and batch <= self.batch_id],
            )
        except PenstockError as error:
            # An error of the commit before it matters more.
            _log_not_deleted(self.place, error, str(error))


def to_reader(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    """Return batches as a reader that deltalake can take."""
    return pa.RecordBatchReader.from_batches(schema, _ahead(batches))


def _ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read ahead in another thread: in the one that deltalake takes the batches in, its storage hangs."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def delete_abandoned(place: DeltaPlace) -> None:
    """Delete files staged more than a day ago, by queries that died: those that have staged nothing since."""
    before = time.time() - _DAY_SECONDS
    staged = _staged(place)
    running = {app for app, _, at in staged.values() if at >= before}
    _delete(place, [name for name, (app, _, _) in staged.items() if app not in running])


def _delete(place: DeltaPlace, names: Iterable[str]) -> None:
    files = place.files()
    for name in names:
        try:
            files.delete_file(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log_not_deleted(place, error, place.message(error))


def _log_not_deleted(place: DeltaPlace, error: Exception, text: str) -> None:
    log.warning(
        "staged rows stay in %s: %s",
        place.shown,
        text,
        extra={"action": "staged_stay", "table": place.shown, "error": condition_of(error)},
    )


def _staged(place: DeltaPlace) -> Mapping[str, tuple[str, int, int]]:
    """List staged files with their app, micro-batch and time in seconds since 1970."""
    from pyarrow.fs import FileSelector

    with place.translating_errors():
        infos = place.files().get_file_info(FileSelector(FOLDER, allow_not_found=True))
    parts = {f"{FOLDER}/{info.base_name}": info.base_name.split("-") for info in infos}
    return {
        name: (part[0], int(part[1]), int(part[2]))
        for name, part in parts.items()
        if len(part) == 4 and part[1].isdigit() and part[2].isdigit()
    }


@dataclass
class DeltaStageTask:
    """The function of ``mapInArrow``: takes rows and returns a report of what the task staged."""

    stage: DeltaStage = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        name, rows = self.put(batches)
        query = context.getLocalProperty("sql.streaming.queryId")
        yield pa.RecordBatch.from_pydict({"file": [name], "rows": [rows], "query": [query]}, schema=_REPORT)

    def put(self, batches: Iterator[pa.RecordBatch]) -> tuple[str | None, int]:
        """Stage the rows, and return the file, None where there are none, and the number of rows."""
        chunks = self._checked(chunked(batches))
        first = next(chunks, None)
        if first is None:
            return None, 0
        stage, rows = self.stage, first.num_rows
        name = stage.file()
        with (
            stage.place.translating_errors(),
            stage.place.files().open_output_stream(name, buffer_size=1 << 20) as out,
            pq.ParquetWriter(out, stage.layout.schema, compression="zstd") as writer,
        ):
            writer.write_batch(first)
            for chunk in chunks:
                rows += chunk.num_rows
                writer.write_batch(chunk)
        return name, rows

    def _checked(self, chunks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        layout = self.stage.layout
        for chunk in chunks:
            # Rows arrive with the columns c0, c1 and so on.
            batch = conform(chunk.rename_columns(layout.schema.names), layout.schema)
            for key in layout.keys:
                require_key_value(batch.column(key), key, self.stage.place.shown)
            yield batch
