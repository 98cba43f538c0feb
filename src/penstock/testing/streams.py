"""Streams to which tests add rows, and queries over them: the output of each micro-batch, crashes at chosen
points, and replays of micro-batches as after a crash.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from penstock.arguments import refusal, require
from penstock.arrow.python_rows import to_table
from penstock.errors import InvalidInputError
from penstock.queue.store import connect
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.python_workers import arrow_schema
from penstock.spark.session import register


def replay_last_batch(checkpoint: str | Path) -> int:
    """Remove Spark's commit of the last micro-batch from a checkpoint, so that the query's next start repeats
    the micro-batch.

    A checkpoint is in this state if the process died between the sink's commit and Spark's own, which is the
    entry in ``commits`` (Spark 4.2, 4.3).

    Parameters
    ----------
    checkpoint
        The directory or URL of a checkpoint whose query is not running.

    Returns
    -------
    int
        The number of the micro-batch.

    Raises
    ------
    InvalidInputError
        When no micro-batch is committed, or a later one has started, which the query would repeat instead.
    """
    opened = Checkpoint(str(checkpoint))
    last, planned = opened.last_commit(), opened.last_planned()
    if last is None:
        raise InvalidInputError(
            f"the checkpoint {opened.label!r} has no committed micro-batch: run the query over it first",
            condition="INVALID_INPUT.CHECKPOINT_UNFINISHED",
        )
    if planned != last:
        raise InvalidInputError(
            f"micro-batch {planned} of the checkpoint {opened.label!r} has started but is not committed, so "
            f"the query's next start would repeat it and not {last}: first start the query once",
            condition="INVALID_INPUT.CHECKPOINT_UNFINISHED",
        )
    for name in (str(last), f".{last}.crc"):
        path = f"{opened.root}/commits/{name}"
        if opened.files.get_file_info(path).is_file:
            opened.files.delete_file(path)
    return last


BEFORE_SINK, AFTER_SINK = "before_sink", "after_sink"
POINTS = (BEFORE_SINK, AFTER_SINK)
"""The two points of a micro-batch at which a sink and Spark can disagree."""

_armed: dict[str, int | None] = {}


class Crash(Exception):
    """The error with which a query fails at the point that `crash_at` requested."""


@contextmanager
def crash_at(point: str, *, batch: int | None = None) -> Iterator[None]:
    """Make queries that `run` started fail in a micro-batch, as if their process died there.

    The query's next ``process_all_available()`` raises `Crash`. If you start it again over the same
    checkpoint, Spark repeats the micro-batch, which is in the offset log but not in the commit log.

    Parameters
    ----------
    point
        ``before_sink``: the sink does not have the micro-batch yet. ``after_sink``: the sink has the
        micro-batch, but Spark has not committed it.
    batch
        The number of the micro-batch, from 0; by default, the next one.

    Raises
    ------
    InvalidInputError
        When there is no such point.
    """
    if point not in POINTS:
        raise InvalidInputError(f"there is no point {point!r} to crash at: pass one of {', '.join(POINTS)}")
    require("batch", batch, int | None, "the number of a micro-batch")
    _armed[point] = batch
    try:
        yield
    finally:
        _armed.pop(point, None)


def crash_if_armed(point: str, batch: int) -> None:
    """Raise `Crash` if `crash_at` has requested it at this point."""
    if point in _armed and _armed[point] in (None, batch):
        raise Crash(f"as requested, {point.replace('_', ' the ')} in micro-batch {batch}")


Sink = Callable[[DataFrame, int], object]

_QUEUE = "memory"


class MemoryStream:
    """A streaming DataFrame to which a test adds rows, like Spark's ``MemoryStream`` in Scala, which
    PySpark lacks.

    The rows are in a queue of a temporary SQLite store. So any trigger can read them, you can restart a query
    over its checkpoint, and several queries can read the same stream. `close`, or a ``with`` block, removes
    the rows.

    Parameters
    ----------
    spark
        A classic session, in which Penstock's data source gets registered.
    schema
        The columns: a DDL string of Spark, a StructType or an Arrow schema.

    Raises
    ------
    InvalidInputError
        When the schema is of any other type.
    """

    def __init__(self, spark: SparkSession, schema: str | StructType | pa.Schema) -> None:
        register(spark)
        self._spark = spark
        with ExitStack() as resources:
            folder = tempfile.mkdtemp(prefix="penstock-memory-")
            resources.callback(shutil.rmtree, folder, ignore_errors=True)
            self._url = f"sqlite:///{folder}/memory.db?synchronous=normal"
            self._store = resources.enter_context(connect(self._url))
            self._queue = self._store.create_queue(_QUEUE, _arrow(spark, schema))
            self._resources = resources.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def to_df(self) -> DataFrame:
        """Return a streaming DataFrame that starts at the first row. Each query needs its own."""
        consumer = f"test-{uuid.uuid4()}"
        self._store.create_consumer(consumer).register(_QUEUE)
        return (
            self._spark.readStream.format("penstock").options(url=self._url, consumer=consumer).load(_QUEUE)
        )

    def add_data(self, rows: pa.Table | pa.RecordBatch | Iterable[Mapping[str, object]]) -> Self:
        """Add rows, which the query reads in a single micro-batch.

        Parameters
        ----------
        rows
            An Arrow table, a pandas DataFrame, or a mapping for each row. Missing columns are NULL.

        Raises
        ------
        SchemaMismatchError
            When the rows do not fit the schema. No rows are added.
        """
        self._queue.append(to_table(rows, self._queue.schema))
        return self

    def start(
        self,
        transform: Callable[[DataFrame], DataFrame] | None = None,
        *,
        output_mode: str = "append",
        checkpoint: str | Path | None = None,
        sink: Sink | None = None,
    ) -> StreamTest:
        """Start a query over this stream. For the parameters, and for several streams, see `run`."""
        frame = self.to_df()
        return run(
            frame if transform is None else transform(frame),
            output_mode=output_mode,
            checkpoint=checkpoint,
            sink=sink,
        )

    def close(self) -> None:
        """Remove the rows. Stop queries over them first."""
        self._resources.close()


def _arrow(spark: SparkSession, schema: object) -> pa.Schema:
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        schema = StructType.fromDDL(schema)
    if isinstance(schema, StructType):
        return arrow_schema(schema, spark.conf.get("spark.sql.session.timeZone"))
    raise refusal("schema", schema, "a DDL string such as 'id long', a StructType or an Arrow schema")


def run(
    frame: DataFrame,
    *,
    output_mode: str = "append",
    checkpoint: str | Path | None = None,
    sink: Sink | None = None,
) -> StreamTest:
    """Start a query over a test's streams, and collect its output.

    Parameters
    ----------
    frame
        A streaming DataFrame: the result of the function under test for `MemoryStream.to_df` of one or
        several streams.
    output_mode
        ``append``, ``update`` or ``complete``.
    checkpoint
        A directory that is kept, so that you can restart the query; by default, a temporary one.
    sink
        A function to test together with the query. It takes a micro-batch's rows and its number, as for
        ``foreachBatch``.

    Raises
    ------
    AnalysisException
        Spark's own error, when the query cannot be started in this mode.
    """
    return StreamTest(frame, output_mode, checkpoint, sink)


class StreamTest:
    """A running query, from `run` or `MemoryStream.start`. A ``with`` block stops it."""

    __test__ = False

    def __init__(
        self, frame: DataFrame, output_mode: str, checkpoint: str | Path | None, sink: Sink | None
    ) -> None:
        self._temporary = None if checkpoint is not None else Path(tempfile.mkdtemp(prefix="penstock-test-"))
        self._sink = sink
        self._tables: dict[int, pa.Table] = {}
        self._error: BaseException | None = None
        writer = frame.writeStream.outputMode(output_mode).foreachBatch(self._write)
        try:
            self.query: StreamingQuery = writer.option(
                "checkpointLocation", str(self._temporary or checkpoint)
            ).start()
        except BaseException:
            self._remove_checkpoint()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def process_all_available(self) -> Self:
        """Wait until all added rows are processed, including the micro-batches without data that follow.

        Raises
        ------
        Exception
            The sink's own error, or `Crash`; Spark's ``StreamingQueryException`` for any other failure.
        """
        try:
            self.query.processAllAvailable()
            failure = self.query.exception()
        except StreamingQueryException as error:
            failure = error
        if failure is not None:
            raise (self._error or failure) from None
        return self

    def emitted(self) -> list[list[dict[str, Any]]]:
        """Return one list of rows, as dicts, for each micro-batch that emitted rows or had data.

        A repeated micro-batch appears only once, as if the sink had replaced its rows.
        """
        with_data = {progress.batchId for progress in self.query.recentProgress if progress.numInputRows}
        return [
            table.to_pylist()
            for number, table in sorted(self._tables.items())
            if table.num_rows or number in with_data
        ]

    def stop(self) -> None:
        """Stop the query. `emitted` still returns its output."""
        self.query.stop()
        self._remove_checkpoint()

    def _write(self, batch: DataFrame, number: int) -> None:
        self._error = None
        try:
            crash_if_armed(BEFORE_SINK, number)
            self._tables[number] = batch.toArrow()
            if self._sink is not None:
                self._sink(batch, number)
            crash_if_armed(AFTER_SINK, number)
        except BaseException as error:
            self._error = error
            raise

    def _remove_checkpoint(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
