"""Reading an analysed plan, on the installed Spark."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from penstock.spark.internals.plan_nodes import output_columns
from penstock.spark.internals.plan_text import (
    first_gathering_operator,
    may_retain_rows,
    optimized_tree,
    plan_tree,
)
from penstock.spark.internals.plans import (
    PANDAS,
    PYTHON,
    StreamingRead,
    analysed,
    analysed_plan,
    executed_plan,
    fingerprint,
    python_aggregates,
    replace_reads,
    streaming_reads,
    watermarks_above,
)


@pytest.fixture(scope="module")
def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").option("rowsPerSecond", 5).load()


def test_streaming_reads_are_found_with_their_options(
    spark: SparkSession, rate: DataFrame, tmp_path: Path
) -> None:
    files = spark.readStream.schema("timestamp timestamp, value long").json(str(tmp_path))
    found = streaming_reads(rate.union(files).union(spark.range(1).selectExpr("now() as t", "id")))
    assert found is not None
    assert [(read.format, dict(read.options)) for read in found] == [
        ("rate", {"rowspersecond": "5"}),
        ("", {}),
    ]
    assert found[0].schema.names == ["timestamp", "value"]


def test_the_first_operator_that_gathers_rows_is_named(rate: DataFrame) -> None:
    assert first_gathering_operator(rate.where("value > 1")) is None
    assert first_gathering_operator(rate.dropDuplicates(["value"])) == "Deduplicate"


def test_rows_may_be_retained_if_state_has_a_watermark(rate: DataFrame) -> None:
    timed = rate.withWatermark("timestamp", "1 minute")
    assert not may_retain_rows(timed)
    assert not may_retain_rows(rate.groupBy("value").count())
    assert may_retain_rows(timed.groupBy("timestamp").count())


def test_watermarks_above_another_one_are_found(rate: DataFrame) -> None:
    first = rate.withColumn("other", rate.timestamp).withWatermark("timestamp", "1 minute")
    plan = analysed(first.withWatermark("other", "1 minute"))
    assert watermarks_above(plan, "timestamp") == ["other"]
    assert watermarks_above(plan, "other") == []


def test_equal_queries_have_one_fingerprint(rate: DataFrame) -> None:
    def made() -> DataFrame:
        return rate.where("value > 3").selectExpr("value + 1 as more")

    assert fingerprint(made()) == fingerprint(made())
    assert fingerprint(made()) != fingerprint(made(), "something else")
    assert fingerprint(made()) != fingerprint(rate)


def test_reads_are_replaced_below_the_same_transformations(spark: SparkSession, rate: DataFrame) -> None:
    doubled = rate.where("value > 1").selectExpr("value * 2 as double")

    def stand_in(read: StreamingRead) -> DataFrame:
        assert read.format == "rate"
        return spark.createDataFrame([(None, 1), (None, 2), (None, 3)], read.schema)

    batch = replace_reads(doubled, stand_in)
    assert not batch.isStreaming
    assert [row.double for row in batch.collect()] == [4, 6]
    assert replace_reads(doubled, lambda read: None) is doubled


def test_a_plan_is_printed_as_a_tree(rate: DataFrame) -> None:
    tree = plan_tree(rate.withWatermark("timestamp", "1 minute").groupBy("timestamp").count())
    assert [node.name for node in tree.walk()] == ["Aggregate", "EventTimeWatermark", "StreamingRelationV2"]
    assert all(node.streaming for node in tree.walk())
    assert tree.arguments[0].startswith("[timestamp#")
    assert "-T60000ms" in tree.arguments[0]


def test_the_optimizer_removes_what_nothing_above_reads(rate: DataFrame) -> None:
    """Also from a streaming plan, which Spark does not optimize by itself before the query starts."""
    twice = (
        rate.selectExpr("timestamp", "value", "value * 2 as twice").dropDuplicates(["value"]).select("value")
    )
    tree = optimized_tree(twice)
    assert tree is not None
    (deduplicate,) = [node for node in tree.walk() if node.name == "Deduplicate"]
    assert deduplicate.streaming
    assert [column.split("#")[0] for column in output_columns(deduplicate)] == ["value"]


def test_functions_that_aggregate_in_python_are_told_from_others(spark: SparkSession) -> None:
    def largest(numbers: pd.Series) -> int:
        return int(numbers.max())

    numbers = spark.range(3).groupBy("id")
    aggregated = numbers.agg(F.pandas_udf(largest, "long")(F.col("id") + 1) * 2)
    assert [call.split("(")[0] for call in python_aggregates(aggregated)] == ["largest"]
    assert not python_aggregates(numbers.agg(F.udf(abs, "long")(F.col("id") + 1), F.sum("id")))


def test_a_line_break_in_a_literal_is_not_a_line_of_the_plan(rate: DataFrame) -> None:
    tree = plan_tree(rate.where("'a\\n+- Filter true' != 'b'"))
    assert [node.name for node in tree.walk()] == ["Filter", "StreamingRelationV2"]


def test_operators_and_their_expressions_are_recognised(spark: SparkSession, rate: DataFrame) -> None:
    top = analysed_plan(rate.selectExpr("cast('now' as timestamp) as at", "explode(array(value)) as one"))
    generate = next(each for each in _walk(top) if each.name == "Generate")
    assert generate.generator() == "Explode"
    casts = [part.cast_text() for part in top.expressions() if part.name == "Cast"]
    assert casts in ([("now", "timestamp")], [])
    assert not top.has_time_or_subquery()
    assert analysed_plan(rate.selectExpr("current_timestamp() as at")).has_time_or_subquery()
    assert analysed_plan(rate.where("exists (select 1)")).has_time_or_subquery()


def test_kinds_of_python_stages_are_distinguished(spark: SparkSession) -> None:
    from pyspark.sql.functions import pandas_udf, udf

    frame = spark.range(1)
    for made, kind in (
        (udf(lambda v: v, "long", useArrow=True), PYTHON),
        (pandas_udf(lambda v: v, "long"), PANDAS),
    ):
        plan = executed_plan(frame.select(made("id")))
        assert [each.udf_kind() for each in _walk(plan) if each.name == "ArrowEvalPython"] == [kind]


def _walk(operator):  # type: ignore[no-untyped-def]
    yield operator
    for child in operator.children():
        yield from _walk(child)
