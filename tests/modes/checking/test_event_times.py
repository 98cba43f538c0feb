"""Several event-time columns in the input of operators with state: the check agrees with Spark's planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from tests.modes.cells import Cell, refusal_of
from tests.modes.frames import Inputs, inputs

_Build = Callable[[Inputs], DataFrame]
_CODE = "PENSTOCK_SEVERAL_EVENT_TIMES"
_RANGE = "k = k2 and ts between ts2 and ts2 + interval 1 minute"


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return inputs(spark, tmp_path_factory.mktemp("streams"))


def _windowed(t: Inputs) -> DataFrame:
    return t.timed.withColumn("minute", F.window("ts", "1 minute"))


def _joined(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE))


def _windowed_joined(t: Inputs, kind: str = "inner") -> DataFrame:
    return _windowed(t).join(t.timed_others, F.expr(_RANGE), kind)


def _joined_again(joined: DataFrame, t: Inputs) -> DataFrame:
    third = t.others.toDF("ts3", "k3", "value3").withWatermark("ts3", "10 seconds")
    return joined.join(third, F.expr("k = k3 and ts between ts3 and ts3 + interval 1 minute"))


def _in_pandas(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    for frame in frames:
        yield frame[["k"]]


def _with_state(df: DataFrame) -> DataFrame:
    return df.groupBy("k").applyInPandasWithState(
        _in_pandas, "k long", "n long", "append", "EventTimeTimeout"
    )


def _keys(frames: Iterator[Any]) -> Iterator[Any]:
    for frame in frames:
        yield frame[["k"]]


def _batch(t: Inputs) -> DataFrame:
    now = t.batch.select(F.current_timestamp().alias("ts"))
    return now.withColumn("minute", F.window("ts", "1 minute"))


_REFUSED: dict[str, _Build] = {
    "joined": _windowed_joined,
    "left_joined": lambda t: _windowed_joined(t, "left_outer"),
    "semi_joined": lambda t: _windowed_joined(t, "left_semi"),
    "joined_by_a_filter": lambda t: _windowed(t).join(t.timed_others).where(_RANGE).select("minute"),
    "joined_with_an_alias": lambda t: t.timed.withColumn("also", F.col("ts")).join(
        t.timed_others, F.expr(_RANGE)
    ),
    "joined_again": lambda t: _joined_again(_joined(t), t),
    "deduplicated": lambda t: _windowed(t).dropDuplicates(["k", "ts"]),
    "deduplicated_unions": lambda t: _windowed(t).union(_windowed(t)).dropDuplicates(["k", "ts"]),
    "deduplicated_by_all": lambda t: _windowed(t).distinct(),
    "deduplicated_in_pandas": lambda t: _windowed(t).dropDuplicates(["k", "ts"]).mapInPandas(_keys, "k long"),
    "deduplicated_within_watermark": lambda t: _windowed(t).dropDuplicatesWithinWatermark(["k"]).select("k"),
    "joined_deduplicated": lambda t: _joined(t).dropDuplicates(["k", "ts"]),
    "grouped": lambda t: t.timed.groupBy("ts", F.window("ts", "1 minute")).count(),
    "grouped_by_overlapping_windows": lambda t: t.timed.groupBy(
        "ts", F.window("ts", "1 minute", "30 seconds")
    ).count(),
    "grouped_by_a_window_and_its_time": lambda t: (
        t.windows.withColumn("end", F.window_time("window")).groupBy("window", "end").count()
    ),
    "grouped_by_sessions": lambda t: t.timed.groupBy("ts", F.session_window("ts", "1 minute")).count(),
    "deduplicated_and_grouped": lambda t: _windowed(t).dropDuplicates(["k", "ts"]).groupBy("minute").count(),
    "joined_grouped": lambda t: _joined(t).groupBy("ts", "ts2").count(),
    "function": lambda t: _with_state(_windowed(t)),
    "joined_function": lambda t: _with_state(_joined(t)),
    "subtracted": lambda t: _windowed(t).select("ts", "minute").subtract(_batch(t)),
    "joined_and_windows_read": lambda t: _windowed_joined(t).select(F.col("minute").cast("string")),
    "joined_and_windows_grouped": lambda t: _windowed_joined(t).groupBy("ts").agg(F.max("minute")),
    "deduplicated_and_windows_read": lambda t: (
        _windowed(t).dropDuplicates(["k", "ts"]).select(F.col("minute").cast("string"))
    ),
    "deduplicated_and_windows_filtered": lambda t: (
        _windowed(t).dropDuplicates(["k", "ts"]).where(F.col("minute").cast("string") > "2").select("k")
    ),
    "deduplicated_and_ends_of_windows_grouped": lambda t: (
        _windowed(t).dropDuplicates(["k", "ts"]).groupBy("ts").agg(F.max("minute.end"))
    ),
    "deduplicated_and_windows_exploded": lambda t: (
        _windowed(t).dropDuplicates(["k", "ts"]).select("k", F.explode(F.array("minute")))
    ),
    "joined_deduplicated_and_the_other_time_read": lambda t: (
        _joined(t).dropDuplicates(["k", "ts"]).select(F.expr("ts2 - ts"), "k")
    ),
}
_RUN: dict[str, _Build] = {
    "joined_and_windows_dropped": lambda t: _windowed_joined(t).drop("minute"),
    "joined_and_windows_of_one_field": lambda t: _windowed_joined(t).select("minute.start", "ts"),
    "joined_and_windows_filtered": lambda t: (
        _windowed_joined(t).where("minute.start > timestamp'2000-01-01'").select("k", "ts")
    ),
    "semi_joined_with_windows": lambda t: t.timed_others.join(_windowed(t), F.expr(_RANGE), "left_semi"),
    "joined_and_windows_after": lambda t: _joined(t).withColumn("minute", F.window("ts", "1 minute")),
    "joined_with_another_time": lambda t: t.timed.withColumn("later", F.expr("ts + interval 1 second")).join(
        t.timed_others, F.expr(_RANGE)
    ),
    "joined_again_without_the_other_time": lambda t: _joined_again(_joined(t), t).drop("ts2"),
    "deduplicated_and_windows_dropped": lambda t: _windowed(t).dropDuplicates(["k", "ts"]).drop("minute"),
    "deduplicated_with_a_column_twice": lambda t: t.timed.select(
        "ts", "ts", "k"
    ).dropDuplicatesWithinWatermark(["k"]),
    "joined_deduplicated_without_the_other_time": lambda t: (
        _joined(t).drop("ts2").dropDuplicatesWithinWatermark(["k"])
    ),
    "grouped_with_the_largest_time": lambda t: _windowed(t).groupBy("minute").agg(F.max("ts")),
    "grouped_by_a_time_twice": lambda t: t.timed.groupBy("ts", F.col("ts").alias("also")).count(),
    "joined_grouped_by_one": lambda t: _joined(t).groupBy("ts").agg(F.max("ts2")),
    "function_of_one": lambda t: _with_state(t.timed),
    "joined_and_windows_compared": lambda t: _windowed_joined(t).select(F.col("ts") > F.col("minute.start")),
    "joined_and_times_subtracted": lambda t: _joined(t).select(F.expr("ts2 - ts")).dropDuplicates(),
    "deduplicated_and_windows_not_null": lambda t: (
        _windowed(t).dropDuplicates(["k", "ts"]).where("minute is not null").select("k")
    ),
    "exploded_and_deduplicated": lambda t: (
        _windowed(t)
        .select("k", "ts", F.explode(F.array("minute.end")).alias("end"))
        .dropDuplicates(["k", "ts"])
    ),
    "limited": lambda t: _windowed(t).limit(2),
    "joined_with_a_batch": lambda t: _windowed(t).join(t.batch, F.expr("k = k2")),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("name", [*_REFUSED, *_RUN])
def test_the_check_refuses_several_event_times_where_spark_does(
    name: str, spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    df = {**_REFUSED, **_RUN}[name](streams)
    report = penstock.modes.check(df)["append"]
    refusal = refusal_of(Cell(name, "append"), df, tmp_path)
    assert report.allowed == (refusal is None), (report.problems, refusal)
    assert (name in _REFUSED) == (refusal is not None and "event time columns" in refusal), refusal
    assert [each.severity for each in report.problems if each.code == _CODE] == ["refused"] * (
        name in _REFUSED
    )


@pytest.mark.parametrize(
    ("mode", "name", "allowed"),
    [
        ("update", "joined", False),
        ("update", "grouped", False),
        ("complete", "grouped", True),
        ("complete", "grouped_by_sessions", False),
        ("complete", "deduplicated_and_grouped", False),
    ],
)
def test_an_aggregation_takes_several_event_times_in_complete_mode_only(
    mode: str, name: str, allowed: bool, spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    df = _REFUSED[name](streams)
    report = penstock.modes.check(df)[mode]
    refusal = refusal_of(Cell(name, mode), df, tmp_path)
    assert report.allowed == allowed == (_CODE not in [each.code for each in report.problems])
    assert allowed == (refusal is None or "event time columns" not in refusal), refusal


@pytest.mark.parametrize("name", ["joined", "deduplicated", "grouped", "function"])
def test_spark_takes_the_first_event_time_if_set_to_one_operator_with_state(
    name: str, spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    setting = "spark.sql.streaming.statefulOperator.allowMultiple"
    spark.conf.set(setting, "false")
    try:
        df = _REFUSED[name](streams)
        assert penstock.modes.check(df)["append"].allowed
        assert refusal_of(Cell(name, "append"), df, tmp_path) is None
    finally:
        spark.conf.unset(setting)


def test_the_problem_names_the_columns(streams: Inputs) -> None:
    (problem,) = [
        each
        for each in penstock.modes.check(_windowed_joined(streams))["append"].problems
        if each.code == _CODE
    ]
    assert "'ts' and 'minute'" in problem.message
    assert problem.operator == "Join"
