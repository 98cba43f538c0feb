"""Stateful functions of Scala and Java programs, whose plans can be passed to a Python session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.modes.checking.check import _RULES
from penstock.modes.checking.plan import Plan
from penstock.modes.checking.report import MODES, REFUSED
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.query_start import check_output_mode
from tests.modes.frames import Inputs, inputs
from tests.modes.java_classes import java_classes

FOR_EVER = "PENSTOCK_STATE_FOR_EVER"
_FUNCTIONS = "org.apache.spark.api.java.function"


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    ensure_callback_server_started(spark.sparkContext._gateway)
    return inputs(spark, tmp_path_factory.mktemp("streams"))


def _implementing(name: str) -> Any:
    """An object that the JVM takes for one of its interface; it is only planned with, and never called."""
    java = type("Java", (), {"implements": [f"{_FUNCTIONS}.{name}"]})
    return type(name, (), {"call": lambda self, *_: None, "Java": java})()


def _grouped(spark: SparkSession, frame: DataFrame) -> Any:
    long = spark._jvm.org.apache.spark.sql.Encoders.LONG()  # type: ignore[union-attr]
    return frame._jdf.groupByKey(_implementing("MapFunction"), long), long


def mapped(spark: SparkSession, frame: DataFrame) -> DataFrame:
    groups, long = _grouped(spark, frame)
    java = groups.mapGroupsWithState(_implementing("MapGroupsWithStateFunction"), long, long)
    return DataFrame(java.toDF(), spark)


def flat(spark: SparkSession, frame: DataFrame, mode: str) -> DataFrame:
    groups, long = _grouped(spark, frame)
    streaming = spark._jvm.org.apache.spark.sql.streaming  # type: ignore[union-attr]
    own = getattr(streaming.OutputMode, mode)()
    function = _implementing("FlatMapGroupsWithStateFunction")
    java = groups.flatMapGroupsWithState(function, own, long, long, streaming.GroupStateTimeout.NoTimeout())
    return DataFrame(java.toDF(), spark)


def codes_by_mode(df: DataFrame) -> dict[str, list[str]]:
    """The codes of each mode, once they are known to come to Spark's verdict."""
    plan = Plan(plan_tree(df))
    for mode in MODES:
        ours = [each.code for rule in _RULES for each in rule(plan, mode) if each.severity == REFUSED]
        assert bool(ours) == (check_output_mode(df, mode) is not None), (
            mode,
            ours,
            check_output_mode(df, mode),
        )
    report = penstock.modes.check(df)
    return {mode: sorted(problem.code for problem in report[mode].problems) for mode in MODES}


def test_map_groups_with_state_is_allowed_in_update_mode_only(spark: SparkSession, streams: Inputs) -> None:
    codes = codes_by_mode(mapped(spark, streams.events))
    assert codes["append"] == ["PENSTOCK_MAP_GROUPS_MODE", FOR_EVER]
    assert codes["update"] == [FOR_EVER]
    assert "PENSTOCK_MAP_GROUPS_MODE" in codes["complete"]


def test_map_groups_with_state_in_update_mode_emits_changed_groups(
    spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    """The fix of PENSTOCK_MAP_GROUPS_MODE."""
    functions = java_classes(spark, tmp_path, "functions")
    long = spark._jvm.org.apache.spark.sql.Encoders.LONG()  # type: ignore[union-attr]
    groups = streams.events._jdf.groupByKey(functions.Key(), long)
    df = DataFrame(groups.mapGroupsWithState(functions.Count(), long, long).toDF(), spark)
    report = penstock.modes.check(df, sink="memory")
    problem = report["append"].problems[0]
    assert problem.code == "PENSTOCK_MAP_GROUPS_MODE"
    assert "outputMode('update')" in str(problem.fix)
    assert report["update"].safe
    assert "rows that the stateful function returns are emitted" in str(report["update"].emits)
    writer = df.writeStream.format("memory").queryName("mapped").outputMode("update")
    query = writer.option("checkpointLocation", str(tmp_path / "mapped")).trigger(availableNow=True).start()
    query.awaitTermination(60)
    assert sorted(row["value"] for row in spark.table("mapped").collect()) == [1, 2]


@pytest.mark.parametrize(("own", "other"), [("Append", "update"), ("Update", "append")])
def test_the_mode_of_a_function_must_be_that_of_the_query(
    spark: SparkSession, streams: Inputs, own: str, other: str
) -> None:
    codes = codes_by_mode(flat(spark, streams.events, own))
    assert codes[own.lower()] == [FOR_EVER]
    assert codes[other] == ["PENSTOCK_FUNCTION_MODE", FOR_EVER]


def test_several_functions_must_be_in_append_mode(spark: SparkSession, streams: Inputs) -> None:
    both = flat(spark, flat(spark, streams.events, "Append"), "Append")
    assert codes_by_mode(both)["append"] == [FOR_EVER, FOR_EVER]
    mixed = flat(spark, flat(spark, streams.events, "Append"), "Update")
    assert "PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS" in codes_by_mode(mixed)["update"]


def test_a_function_in_update_mode_is_not_counted(spark: SparkSession, streams: Inputs) -> None:
    counted = flat(spark, streams.events, "Update").groupBy("value").count()
    assert "PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION" in codes_by_mode(counted)["update"]


def test_a_function_in_append_mode_is_counted_in_update_mode(
    spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    counted = flat(spark, streams.events, "Append").groupBy("value").count()
    assert codes_by_mode(counted)["update"] == ["PENSTOCK_STATE_FOR_EACH_KEY", FOR_EVER]
