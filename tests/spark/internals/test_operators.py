"""The table of operators names Spark's classes, and agrees with Spark's checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from penstock.spark.internals.operators import _TRAITS, Trait, traits_of
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.query_start import check_output_mode
from penstock.spark.internals.sessions import JvmError, parse_version

_PACKAGES = (
    "org.apache.spark.sql.catalyst.plans.logical",
    "org.apache.spark.sql.catalyst.streaming",
    "org.apache.spark.sql.execution.streaming",
    "org.apache.spark.sql.execution.streaming.runtime",
    "org.apache.spark.sql.execution.streaming.sources",
)


@pytest.mark.parametrize("name", sorted(_TRAITS))
def test_every_operator_is_a_class_in_spark(spark: SparkSession, name: str) -> None:
    assert any(_is_there(spark, f"{package}.{name}") for package in _PACKAGES)


def _is_there(spark: SparkSession, name: str) -> bool:
    assert spark._jvm is not None
    try:
        spark._jvm.java.lang.Class.forName(name)
    except (JvmError, PySparkException):
        return False
    return True


def test_an_unknown_operator_has_no_traits() -> None:
    assert traits_of("NoSuchOperator") == Trait(0)


def _plans(spark: SparkSession) -> dict[str, DataFrame]:
    rows = spark.range(3).withColumn("k", F.col("id") % 2)
    return {
        "Aggregate": rows.groupBy("k").count(),
        "Deduplicate": rows.dropDuplicates(["k"]),
        "Distinct": spark.sql("select distinct id from range(3)"),
        "EventTimeWatermark": spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute"),
        "Except": rows.exceptAll(rows),
        "Expand": rows.rollup("k").count(),
        "Filter": rows.where("k = 1"),
        "Generate": rows.select(F.explode(F.array("k"))),
        "GlobalLimit": rows.limit(1),
        "Intersect": rows.intersect(rows),
        "Join": rows.join(rows, "k"),
        "MapInArrow": rows.mapInArrow(lambda batches: batches, rows.schema),
        "MapInPandas": rows.mapInPandas(lambda batches: batches, rows.schema),
        "Offset": rows.offset(1),
        "Project": rows.select("k"),
        "Repartition": rows.repartition(2),
        "RepartitionByExpression": rows.repartition(2, "k"),
        "Sample": rows.sample(0.5),
        "Sort": rows.orderBy("k"),
        "SubqueryAlias": rows.alias("a"),
        "Union": rows.union(rows),
    }


def test_plans_are_printed_with_the_names_of_the_table(spark: SparkSession) -> None:
    missing = {
        name
        for name, frame in _plans(spark).items()
        if name not in {node.name for node in plan_tree(frame).walk()}
    }
    assert missing == set()


def _below_a_union(rate: DataFrame) -> dict[str, DataFrame]:
    timed = rate.withWatermark("timestamp", "1 minute")
    grouped = timed.groupBy("value")
    return {
        "Aggregate": grouped.count().select("value"),
        "Deduplicate": timed.dropDuplicates(["value"]).select("value"),
        "DeduplicateWithinWatermark": timed.dropDuplicatesWithinWatermark(["value"]).select("value"),
        "Filter": timed.where("value > 1").select("value"),
        "FlatMapGroupsInPandasWithState": grouped.applyInPandasWithState(
            lambda key, rows, state: iter([]), "value long", "value long", "update", "NoTimeout"
        ),
        "TransformWithStateInPySpark": grouped.transformWithState(Nothing(), "value long", "Update", "None"),
    }


class Nothing(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        """It keeps nothing."""

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: object,
        rows: object,
        timerValues: object,  # noqa: N803 - Spark's name
    ) -> Iterator[object]:
        yield from ()

    def close(self) -> None:
        """There is nothing to close."""


def test_operators_required_above_a_union_in_real_time_agree_with_spark(spark: SparkSession) -> None:
    rate = spark.readStream.format("rate").load()
    refused_by_spark = {}
    for name, frame in _below_a_union(rate).items():
        assert name in {node.name for node in plan_tree(frame).walk()}
        refused = check_output_mode(frame.union(rate.select("value")), "update", "real time")
        refused_by_spark[name] = refused is not None and "STATEFUL_OPERATORS_BEFORE_UNION" in str(
            refused.condition
        )
    takes_state = parse_version(spark.version) >= (4, 3)
    assert refused_by_spark == {
        name: takes_state and Trait.ABOVE_UNION in traits_of(name) for name in refused_by_spark
    }
