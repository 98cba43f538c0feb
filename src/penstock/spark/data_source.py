"""The Spark data source ``penstock``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
)
from pyspark.sql.types import StructType

from penstock.errors import InvalidOptionError
from penstock.queue.store import open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.internals.python_workers import check_store_reach, freeze_imports
from penstock.spark.options import SinkOptions, SourceOptions, sink_options, source_options
from penstock.spark.queue_readers import FilteringQueueReader, QueueReader
from penstock.spark.queue_writers import QueueStreamWriter, QueueWriter
from penstock.spark.schemas import check_writable, projection, source_schema, to_struct
from penstock.spark.stream_reader import QueueStreamReader
from penstock.store.records.catalog import QueueRecord

# The worker module in which Spark plans reads with filters, if filter pushdown is enabled (4.2, 4.3).
_PUSHDOWN_WORKER_MODULE = "pyspark.sql.worker.data_source_pushdown_filters"


@without_tracebacks
class PenstockDataSource(DataSource):
    """Queues as tables and streams of Spark; ``penstock.register(spark)`` registers it with defaults."""

    defaults: ClassVar[Mapping[str, str]] = {}
    master: ClassVar[str | None] = None

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        # Spark does not say here whether the read is streaming; the readers check that.
        options = source_options(self.options, self.defaults, streaming=None)
        return to_struct(source_schema(self._find_queue(options).schema, options.metadata_columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = source_options(self.options, self.defaults, streaming=False)
        queue = self._find_queue(options)
        reader_class = FilteringQueueReader if _PUSHDOWN_WORKER_MODULE in sys.modules else QueueReader
        return reader_class(
            options, queue, projection(schema, source_schema(queue.schema, options.metadata_columns))
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = source_options(self.options, self.defaults, streaming=True)
        queue = self._find_queue(options)
        columns = projection(schema, source_schema(queue.schema, options.metadata_columns))
        return QueueStreamReader(options, queue, columns)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise InvalidOptionError(
                "a queue is append-only: write with mode('append'), and trim the queue to drop old rows",
                condition="INVALID_OPTION.VALUE",
            )
        options = sink_options(self.options, self.defaults, streaming=False)
        return QueueWriter(options, self._find_sink_queue(options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        if overwrite:
            raise InvalidOptionError(
                "a queue is append-only: use outputMode('append'); complete mode rewrites all rows",
                condition="INVALID_OPTION.VALUE",
            )
        options = sink_options(self.options, self.defaults, streaming=True)
        if options.guarantee != "at_least_once" and options.checkpoint is not None:
            # Fail before the first row is read, not at the commit.
            Checkpoint(options.checkpoint).require_readable(options.guarantee)
        return QueueStreamWriter(options, self._find_sink_queue(options, schema))

    def _find_queue(self, options: SourceOptions | SinkOptions) -> QueueRecord:
        freeze_imports()
        check_store_reach(options.url, self.master)
        return open_store(options.url, verify=True).queue(options.queue).record

    def _find_sink_queue(self, options: SinkOptions, schema: StructType) -> QueueRecord:
        queue = self._find_queue(options)
        check_writable(schema, queue)
        return queue
