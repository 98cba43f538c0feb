"""A stream that a test feeds."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.arguments import refusal
from penstock.arrow.python_rows import to_table
from penstock.queue.store import connect
from penstock.spark.internals.arrow_types import arrow_schema
from penstock.spark.registration import register
from penstock.testing.running import Sink, StreamTest, run

_QUEUE = "memory"


class MemoryStream:
    """A streaming DataFrame whose rows a test adds, as Scala's ``MemoryStream`` of Spark; PySpark has none.

    The rows lie in a queue of a temporary SQLite store, so that either trigger reads them, a query may be started again over its
    checkpoint, and several queries read the same stream. `close`, or a ``with`` block, removes them.

    Parameters
    ----------
    spark
        A classic session, in which Penstock's data source is registered here if it is not yet.
    schema
        The columns: Spark's DDL, a StructType or an Arrow schema.

    Raises
    ------
    InvalidInput
        For another kind of schema.
    """

    def __init__(self, spark: SparkSession, schema: str | StructType | pa.Schema) -> None:
        self._spark = spark
        self._schema = _arrow(spark, schema)
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-memory-"))
        self._url = f"sqlite:///{self._folder}/memory.db?synchronous=normal"
        try:
            self._store = connect(self._url)
            self._queue = self._store.create_queue(_QUEUE, self._schema)
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        self._schema = self._queue.schema
        register(spark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def to_df(self) -> DataFrame:
        """The streaming DataFrame, from the first row on; each query over it needs one of its own."""
        consumer = f"test-{uuid.uuid4()}"
        self._store.create_consumer(consumer).register(_QUEUE)
        return (
            self._spark.readStream.format("penstock").options(url=self._url, consumer=consumer).load(_QUEUE)
        )

    def add_data(self, rows: pa.Table | pa.RecordBatch | Iterable[Mapping[str, Any]]) -> Self:
        """Add rows, which come in one micro-batch all together.

        Parameters
        ----------
        rows
            An Arrow table, a pandas data frame, or a mapping for each row; a column that is missing is NULL.

        Raises
        ------
        SchemaMismatch
            When they do not fit the schema; then none is added.
        """
        self._queue.append(to_table(rows, self._schema))
        return self

    def start(
        self,
        transform: Callable[[DataFrame], DataFrame] | None = None,
        *,
        output_mode: str = "append",
        checkpoint: str | Path | None = None,
        sink: Sink | None = None,
    ) -> StreamTest:
        """Start a query over this stream alone; see `run` for the parameters, and for several streams."""
        frame = self.to_df()
        return run(
            frame if transform is None else transform(frame),
            output_mode=output_mode,
            checkpoint=checkpoint,
            sink=sink,
        )

    def close(self) -> None:
        """Remove the rows; queries over them are to be stopped before."""
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _arrow(spark: SparkSession, schema: object) -> pa.Schema:
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        schema = StructType.fromDDL(schema)
    if isinstance(schema, StructType):
        zone = spark.conf.get("spark.sql.session.timeZone")
        return arrow_schema(schema, zone)
    raise refusal("schema", schema, "a DDL string such as 'id long', a StructType or an Arrow schema")
