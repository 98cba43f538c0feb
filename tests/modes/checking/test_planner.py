"""What Spark's checker allows and its planner refuses is refused by the check, and by a preview."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.modes.checking.emits import CHANGED, FINISHED, ONE_SIDE, UNTIL_WATERMARK
from penstock.modes.previewing.micro_batches import DATA
from tests.modes.frames import Inputs
from tests.modes.frames.frame import ROCKSDB

_START = datetime(2026, 1, 1, tzinfo=UTC)
_TIMES = [_START + timedelta(hours=hour) for hour in range(3)]
_BATCHES = {
    "events": [[{"ts": at, "k": 1, "value": 10}] for at in _TIMES],
    "others": [[{"ts2": at, "k2": 1, "value2": 10}] for at in _TIMES],
}
_Build = Callable[[Inputs], DataFrame]
_REDEFINED, _NO_EQUALITY = "PENSTOCK_WATERMARK_REDEFINED", "PENSTOCK_JOIN_WITHOUT_EQUALITY"
_CHAIN = "PENSTOCK_STATEFUL_AFTER_STATEFUL"
_EXCEPT, _SUBQUERY = "PENSTOCK_EXCEPT_BATCH", "PENSTOCK_CORRELATED_SUBQUERY"
_RANGE = "ts between ts2 and ts2 + interval 1 minute"


def _compared(
    spark: SparkSession, build: _Build, *modes: str
) -> tuple[penstock.modes.Report, penstock.modes.Preview]:
    reports: list[penstock.modes.Report] = []

    def transform(events: DataFrame, others: DataFrame) -> DataFrame:
        df = build(Inputs(events, others, events.sparkSession.range(3).toDF("k")))
        reports.append(penstock.modes.check(df))
        return df

    shown = penstock.modes.preview(spark, transform, _BATCHES, modes=modes)
    return reports[0], shown


def _windows_again(t: Inputs) -> DataFrame:
    return t.windows.select(F.window_time("window").alias("end"), "k").withWatermark("end", "1 minute")


def _from_where(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others).where("k = k2").where(_RANGE).select("ts", "ts2")


@pytest.mark.parametrize(
    ("build", "code", "modes"),
    [
        (lambda t: t.timed.withWatermark("ts", "1 minute"), _REDEFINED, ("append", "update")),
        (
            lambda t: t.timed.withColumn("ts", F.expr("ts + interval 1 hour")).withWatermark(
                "ts", "1 minute"
            ),
            _REDEFINED,
            ("append",),
        ),
        (_windows_again, _REDEFINED, ("update", "complete")),
        (lambda t: t.events.crossJoin(t.others), _NO_EQUALITY, ("append", "update")),
        (lambda t: t.events.crossJoin(t.others).where("k = k2"), _NO_EQUALITY, ("append",)),
        (lambda t: t.timed.join(t.timed_others, F.expr(_RANGE)), _NO_EQUALITY, ("append",)),
        (lambda t: t.timed.join(t.timed_others, F.expr(_RANGE), "left_outer"), _NO_EQUALITY, ("append",)),
        (lambda t: t.events.select("k").subtract(t.batch), _EXCEPT, ("append",)),
        (lambda t: t.events.select("k").exceptAll(t.batch), _EXCEPT, ("append",)),
    ],
)
def test_what_the_planner_refuses_is_refused(
    build: _Build, code: str, modes: tuple[str, ...], spark: SparkSession
) -> None:
    report, shown = _compared(spark, build, *modes)
    for mode in modes:
        assert [each.severity for each in report[mode].problems if each.code == code] == ["refused"]
        assert not shown[mode].allowed


def _mean(column: Column) -> Column:
    def mean(values: pd.Series) -> float:
        return float(values.mean())

    return F.pandas_udf(mean, "double")(column)


def _plus_one(column: Column) -> Column:
    return F.udf(lambda value: value + 1.0, "double")(column)


@pytest.mark.parametrize(
    ("result", "allowed"),
    [
        (lambda: _mean(F.col("value") + 1), False),
        (lambda: _mean(F.abs("value")) * 2, False),
        (lambda: _mean(F.col("k") + 1), False),
        (lambda: _mean(F.lit(1.0)), False),
        (lambda: _plus_one(F.col("k") + 1), True),
        (lambda: _plus_one(F.sum(F.col("value") + 1)), True),
        (lambda: F.sum(_plus_one(F.col("value") + 1)), True),
    ],
)
def test_a_function_that_aggregates_in_python_is_refused_whatever_its_argument(
    result: Callable[[], Column], allowed: bool, spark: SparkSession
) -> None:
    report, shown = _compared(
        spark, lambda t: t.timed.groupBy(F.window("ts", "1 minute"), "k").agg(result()), "append"
    )
    codes = [each.code for each in report["append"].problems]
    assert ("PENSTOCK_PYTHON_AGGREGATE" not in codes) == report["append"].allowed == allowed
    assert shown["append"].allowed == allowed


def test_a_watermark_above_an_aggregation_holds_back_all_rows_in_append_mode(spark: SparkSession) -> None:
    report, shown = _compared(spark, _windows_again, "append")
    (problem,) = [each for each in report["append"].problems if each.code == _REDEFINED]
    assert problem.severity == "unsafe"
    assert "nothing is ever emitted" in problem.message
    assert not any(batch.emitted.num_rows for batch in shown["append"].batches)


@contextmanager
def _turned_off(spark: SparkSession, setting: str) -> Iterator[None]:
    name = f"spark.sql.streaming.statefulOperator.{setting}"
    spark.conf.set(name, "false")
    try:
        yield
    finally:
        spark.conf.unset(name)


def _windows_of_windows(t: Inputs) -> DataFrame:
    return t.windows.groupBy(F.window("window", "5 minutes")).count()


def _windows_of_left_joined(t: Inputs) -> DataFrame:
    joined = t.timed.join(t.timed_others, F.expr(f"k = k2 + 1 and {_RANGE}"), "left").drop("ts2")
    return joined.groupBy(F.window("ts", "1 minute")).count()


@pytest.mark.parametrize("build", [_windows_of_windows, _windows_of_left_joined])
def test_rows_between_operators_that_share_a_watermark_are_lost(build: _Build, spark: SparkSession) -> None:
    """The other problem of PENSTOCK_STATEFUL_AFTER_STATEFUL, and its fix."""
    report, shown = _compared(spark, build, "append")
    assert report["append"].safe
    assert not any(batch.dropped_rows for batch in shown["append"].batches)
    with _turned_off(spark, "allowMultiple"):
        report, shown = _compared(spark, build, "append")
    assert [each.severity for each in report["append"].problems if each.code == _CHAIN] == ["unsafe"]
    assert sum(batch.dropped_rows for batch in shown["append"].batches) > 0


def test_one_operator_may_have_the_only_watermark(spark: SparkSession) -> None:
    with _turned_off(spark, "allowMultiple"):
        report, shown = _compared(spark, lambda t: t.windows, "append")
    assert report["append"].problems == ()
    assert not any(batch.dropped_rows for batch in shown["append"].batches)


def test_groups_in_rocksdb_are_limited_unless_there_is_one_partition(spark: SparkSession) -> None:
    """A preview has two partitions."""
    reports: dict[str, penstock.modes.Report] = {}
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    partitions = str(spark.conf.get("spark.sql.shuffle.partitions"))
    try:
        report, shown = _compared(spark, lambda t: t.windows.limit(1), "append")
        for number in ("1", "2"):
            spark.conf.set("spark.sql.shuffle.partitions", number)
            stream = spark.readStream.format("rate").load().withWatermark("timestamp", "1 second")
            reports[number] = penstock.modes.check(stream.groupBy("timestamp").count().limit(1))
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", partitions)
        spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    assert report["append"].problems == reports["2"]["append"].problems == ()
    assert [each.code for each in reports["1"]["append"].problems] == ["PENSTOCK_ROCKSDB_CHAIN"]
    assert sum(batch.emitted.num_rows for batch in shown["append"].batches) == 1


def test_a_chain_that_spark_does_not_check_is_unsafe(spark: SparkSession) -> None:
    with _turned_off(spark, "checkCorrectness.enabled"):
        report, shown = _compared(spark, lambda t: t.windows.groupBy("k").count(), "update")
    assert report["update"].allowed
    assert [each.severity for each in report["update"].problems if each.code == _CHAIN] == ["unsafe"]
    assert shown["update"].allowed


def test_a_filter_above_a_join_is_part_of_its_condition(spark: SparkSession) -> None:
    """The fix of PENSTOCK_JOIN_WITHOUT_EQUALITY."""
    report, shown = _compared(spark, _from_where, "append")
    assert report["append"].safe
    assert report["append"].emits is not None
    assert report["append"].emits.state == UNTIL_WATERMARK
    assert sum(batch.emitted.num_rows for batch in shown["append"].batches) == len(_TIMES)
    assert shown["append"].batches[-1].removed_rows > 0


def test_one_watermark_and_a_left_anti_join_are_the_fixes(spark: SparkSession) -> None:
    """The fixes of PENSTOCK_WATERMARK_REDEFINED and PENSTOCK_EXCEPT_BATCH."""
    report, shown = _compared(spark, lambda t: t.events.join(t.batch, ["k"], "left_anti"), "append")
    assert report["append"].problems == ()
    assert shown["append"].allowed
    report, shown = _compared(
        spark, lambda t: t.windows.groupBy(F.window(F.window_time("window"), "2 minutes")).count(), "append"
    )
    assert report["append"].problems == ()
    assert sum(batch.emitted.num_rows for batch in shown["append"].batches) > 0


def test_a_batch_subtracted_with_an_event_time_is_emitted_when_the_watermark_has_passed(
    spark: SparkSession,
) -> None:
    def subtracted(t: Inputs) -> DataFrame:
        return t.timed.select("ts", "k").subtract(t.batch.selectExpr("current_timestamp() as ts", "k"))

    report, shown = _compared(spark, subtracted, "append", "update")
    for mode, rows in (("append", FINISHED), ("update", CHANGED)):
        assert report[mode].safe
        emits = report[mode].emits
        assert emits is not None
        assert (emits.rows, emits.state) == (rows, UNTIL_WATERMARK)
        assert sum(batch.removed_rows for batch in shown[mode].batches) > 0
    assert not shown["append"].batches[0].emitted.num_rows
    assert shown["update"].batches[0].emitted.num_rows


def _largest(t: Inputs, of: str = "value") -> DataFrame:
    """The largest of a batch's numbers that equal a column of each row of the stream."""
    numbers = t.batch.selectExpr("k + 9 as n")
    return numbers.where(F.col("n") == F.col(of).outer().cast("long")).select(F.max("n").alias("largest"))


@pytest.mark.parametrize(
    ("build", "refused"),
    [
        (lambda t: t.events.lateralJoin(_largest(t)), ("append",)),
        (lambda t: t.timed.lateralJoin(_largest(t)), ("append",)),
        (lambda t: t.events.lateralJoin(_largest(t), how="left"), ("append", "update")),
        (lambda t: t.timed.lateralJoin(_largest(t, "ts")), ()),
    ],
)
def test_a_lateral_aggregate_of_a_batch_is_an_aggregation_of_the_stream(
    build: _Build, refused: tuple[str, ...], spark: SparkSession
) -> None:
    report, shown = _compared(spark, build, "append", "update")
    for mode in ("append", "update"):
        severities = [each.severity for each in report[mode].problems if each.code == _SUBQUERY]
        assert report[mode].allowed == shown[mode].allowed == (mode not in refused)
        if mode == "update":
            assert severities == ["refused" if mode in refused else "unsafe"]


def test_rows_joined_with_a_lateral_aggregate_come_out_again(spark: SparkSession) -> None:
    _, shown = _compared(spark, lambda t: t.events.lateralJoin(_largest(t)), "update")
    emitted = [row["ts"] for batch in shown["update"].batches for row in batch.emitted.to_pylist()]
    assert len(emitted) > len(set(emitted)) == len(_TIMES)


@pytest.mark.parametrize(
    "build",
    [
        lambda t: t.events.join(t.batch.groupBy("k").agg(F.max("k").alias("largest")), "k", "left"),
        lambda t: t.events.select("ts", _largest(t).scalar().alias("largest")),
    ],
)
def test_a_batch_that_is_aggregated_first_is_joined_once(build: _Build, spark: SparkSession) -> None:
    """The fix of PENSTOCK_CORRELATED_SUBQUERY."""
    report, shown = _compared(spark, build, "append")
    assert report["append"].problems == ()
    assert sum(batch.emitted.num_rows for batch in shown["append"].batches) == len(_TIMES)


@pytest.mark.parametrize(
    "bound",
    [
        "ts <= ts2 + interval 1 month",
        "ts <= ts2 + interval 1 year",
        "ts <= ts2 + 2 * interval 1 hour",
    ],
)
def test_an_interval_of_no_fixed_length_leaves_rows_in_the_state(bound: str, spark: SparkSession) -> None:
    def build(t: Inputs) -> DataFrame:
        return t.timed.join(t.timed_others, F.expr(f"k = k2 and ts >= ts2 and {bound}"))

    report, shown = _compared(spark, build, "append")
    assert report["append"].emits is not None
    assert report["append"].emits.state == ONE_SIDE
    totals = [batch.state_rows for batch in shown["append"].batches if batch.kind == DATA]
    assert totals == sorted(set(totals))
    (problem,) = [each for each in report["append"].problems if each.severity == "unsafe"]
    assert ("interval of days" in str(problem.fix)) == ("hour" not in bound)
