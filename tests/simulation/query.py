"""Query of the simulation: its columns, and the source, sink and options of a run."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from penstock.continuous.connectors.protocol import SinkDriver
from penstock.continuous.connectors.queue import QueueSinkDriver
from penstock.spark.connectors import OwnedConsumer
from penstock.spark.options import SinkOptions, SourceOptions
from penstock.tables.sink import TableSink

KEY = pa.field("key", pa.int32())
COLUMNS = StructType([StructField("id", LongType()), StructField("key", IntegerType())])


@dataclass(frozen=True)
class Query:
    """Source, sink and options of a run."""

    source: SourceOptions
    sink: SinkOptions | TableSink
    sink_url: str
    guarantee: str
    checkpoint: str
    pipeline: bool = True
    """Whether a pipeline starts the query."""

    @property
    def consumer(self) -> OwnedConsumer | None:
        source = self.source
        if source.consumer is None:
            return None
        return OwnedConsumer(source.url, source.queue, source.consumer, source.moved_by_sink)

    def sink_driver(self, query_id: str) -> SinkDriver:
        exactly_once = self.guarantee == "exactly_once"
        if isinstance(self.sink, TableSink):
            return self.sink.driver(self.sink_url, query_id, exactly_once=exactly_once)
        return QueueSinkDriver(self.sink, query_id, exactly_once)


def cast_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast the key to its type in the query, since a queue's key may have been widened."""
    index = batch.schema.get_field_index("key")
    return batch.set_column(index, KEY, batch.column(index).cast(KEY.type))
