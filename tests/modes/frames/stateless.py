"""Queries without state, and operators that streams do not support."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.modes.frames.frame import (
    NO_AGGREGATION,
    Inputs,
    says,
)


@says()
def filtered(t: Inputs) -> DataFrame:
    return t.events.where("value > 10").select("k", "value")


@says()
def repartitioned(t: Inputs) -> DataFrame:
    return t.events.repartition(2)


@says()
def mapped_in_arrow(t: Inputs) -> DataFrame:
    return t.events.mapInArrow(lambda batches: batches, t.events.schema)


@says()
def applied_in_pandas(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").applyInPandas(lambda frame: frame, t.events.schema)


@says()
def united(t: Inputs) -> DataFrame:
    return t.events.union(t.others)


@says()
def joined_with_a_batch(t: Inputs) -> DataFrame:
    return t.events.join(t.batch, F.expr("k = k2"))


@says()
def left_joined_with_a_batch(t: Inputs) -> DataFrame:
    return t.events.join(t.batch, F.expr("k = k2"), "left_outer")


@says()
def text_that_looks_like_a_plan(t: Inputs) -> DataFrame:
    return t.events.where("'a\n+- ~Aggregate [k]' != ''")


@says(append=("PENSTOCK_SAMPLE",), update=("PENSTOCK_SAMPLE",), complete=("PENSTOCK_SAMPLE", *NO_AGGREGATION))
def sampled(t: Inputs) -> DataFrame:
    return t.events.sample(0.5)


@says(
    append=("PENSTOCK_INTERSECT",),
    update=("PENSTOCK_INTERSECT",),
    complete=("PENSTOCK_INTERSECT", *NO_AGGREGATION),
)
def intersected(t: Inputs) -> DataFrame:
    return t.events.select("k").intersect(t.others.select("k2"))


@says(
    append=("PENSTOCK_EXCEPT_STREAM",),
    update=("PENSTOCK_EXCEPT_STREAM",),
    complete=("PENSTOCK_EXCEPT_STREAM", *NO_AGGREGATION),
)
def stream_taken_away(t: Inputs) -> DataFrame:
    return t.events.select("k").subtract(t.others.select("k2"))


@says(
    append=("PENSTOCK_UNION_WITH_BATCH",),
    update=("PENSTOCK_UNION_WITH_BATCH",),
    complete=("PENSTOCK_UNION_WITH_BATCH", *NO_AGGREGATION),
)
def united_with_a_batch(t: Inputs) -> DataFrame:
    return t.events.select("k").union(t.batch.select("k2"))


@says(
    append=("PENSTOCK_EXPRESSION",),
    update=("PENSTOCK_EXPRESSION",),
    complete=("PENSTOCK_EXPRESSION", *NO_AGGREGATION),
)
def rows_numbered(t: Inputs) -> DataFrame:
    return t.events.withColumn("number", F.monotonically_increasing_id())


@says(
    append=("NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING",),
    update=("NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING",),
    complete=("NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING", *NO_AGGREGATION),
)
def ranked(t: Inputs) -> DataFrame:
    return t.events.withColumn("rank", F.row_number().over(Window.partitionBy("k").orderBy("ts")))


@says()
def sampled_by_hash(t: Inputs) -> DataFrame:
    return t.events.where("pmod(xxhash64(k), 2) = 0")


@says()
def rows_with_a_uuid(t: Inputs) -> DataFrame:
    return t.events.withColumn("id", F.expr("uuid()"))
