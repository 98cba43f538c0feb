"""Queries over a source that can be read in real time: an in-memory stream from Spark's own tests,
with a bigint column called value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.modes.frames import Frame

_ROWS = [2**40, 2**40 + 1, 2**40 + 2]
"""Too large for Java's int, which py4j would make of small ones."""


@dataclass(frozen=True)
class Live:
    spark: SparkSession

    @property
    def events(self) -> DataFrame:
        """A stream of its own each time."""
        jvm = self.spark._jvm
        sql = jvm.org.apache.spark.sql  # type: ignore[union-attr]
        streams = sql.execution.streaming.sources.LowLatencyMemoryStream
        stream = streams.singlePartition(self.spark._jsparkSession, sql.Encoders.LONG())
        stream.addData(jvm.PythonUtils.toSeq(_ROWS))  # type: ignore[union-attr]
        return DataFrame(stream.toDF(), self.spark)

    @property
    def timed(self) -> DataFrame:
        return self.events.withColumn("ts", F.timestamp_millis("value")).withWatermark("ts", "1 second")

    @property
    def batch(self) -> DataFrame:
        return self.spark.range(3)


LIVE: dict[str, Frame] = {}


def _live(build: Callable[[Live], DataFrame]) -> Callable[[Live], DataFrame]:
    LIVE[build.__name__] = Frame(build.__name__, build)
    return build


@_live
def live(t: Live) -> DataFrame:
    return t.events.where("value > 1").selectExpr("explode(array(value, value)) as value")


@_live
def live_counted(t: Live) -> DataFrame:
    return t.events.groupBy("value").count()


@_live
def live_windows(t: Live) -> DataFrame:
    return t.timed.groupBy(F.window("ts", "10 seconds", "5 seconds")).count()


@_live
def live_deduplicated(t: Live) -> DataFrame:
    return t.events.dropDuplicates(["value"])


@_live
def live_deduplicated_within_watermark(t: Live) -> DataFrame:
    return t.timed.dropDuplicatesWithinWatermark(["value"])


@_live
def live_in_python(t: Live) -> DataFrame:
    return t.events.select(F.udf(lambda value, other: value, "long")("value", F.lit(1)).alias("value"))


@_live
def live_counts_by_a_name_with_brackets(t: Live) -> DataFrame:
    return t.events.select(F.abs("value")).groupBy("abs(value)").count()


@_live
def live_mapped_in_arrow(t: Live) -> DataFrame:
    return t.events.mapInArrow(lambda batches: batches, "value long")


@_live
def live_repartitioned(t: Live) -> DataFrame:
    return t.events.repartition(1)


@_live
def live_coalesced(t: Live) -> DataFrame:
    return t.events.coalesce(1)


@_live
def live_joined(t: Live) -> DataFrame:
    return t.events.join(t.events.toDF("other"), F.expr("value = other"))


@_live
def live_joined_with_a_batch(t: Live) -> DataFrame:
    return t.events.join(t.batch, F.expr("value = id"))


@_live
def live_joined_with_a_batch_that_is_sent_around(t: Live) -> DataFrame:
    return t.events.join(F.broadcast(t.batch), F.expr("value = id"))


@_live
def live_cross_joined(t: Live) -> DataFrame:
    return t.events.crossJoin(t.batch)


@_live
def live_united(t: Live) -> DataFrame:
    return t.events.union(t.events)


@_live
def live_united_with_itself(t: Live) -> DataFrame:
    return (lambda events: events.union(events))(t.events)


@_live
def live_counts_united(t: Live) -> DataFrame:
    return t.events.groupBy("value").count().select("value").union(t.events)
