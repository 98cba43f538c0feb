"""With ``Trigger.continuous`` and one of Penstock's sinks the verdict is that of Penstock's own
engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock

TRIGGER = penstock.Trigger.continuous("1 second")
SINKS = (penstock.TableSink("t", url="sqlite:///penstock.db"), penstock.QueueSink("q"))


@pytest.fixture(scope="module")
def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


@pytest.mark.parametrize("sink", SINKS, ids=["table", "queue"])
def test_append_only_queries_are_safe(rate: DataFrame, sink: object) -> None:
    report = penstock.modes.check(rate.where("value > 3").select("value"), sink=sink, trigger=TRIGGER)
    assert report["append"].problems == ()
    assert [report[mode].allowed for mode in ("append", "update", "complete")] == [True, False, False]
    assert report.trigger == "continuous (Penstock's)"


def test_sparks_own_continuous_trigger_is_reported_to_lose_rows(rate: DataFrame) -> None:
    for sink, trigger in ((SINKS[0], TRIGGER.arguments()), ("penstock", TRIGGER)):
        (problem,) = penstock.modes.check(rate, sink=sink, trigger=trigger)["append"].problems
        assert problem.code == "PENSTOCK_ROWS_LOST_CONTINUOUS"


def test_queries_supported_by_penstocks_engine_but_not_by_sparks_are_allowed(rate: DataFrame) -> None:
    exploded = rate.select(F.explode(F.array("value"))).mapInArrow(lambda batches: batches, "col bigint")
    assert penstock.modes.check(exploded, sink=SINKS[0], trigger=TRIGGER)["append"].safe


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda df: df.groupBy("value").count(), "PENSTOCK_NOT_CONTINUOUS"),
        (lambda df: df.select(F.stack(F.lit(1), "value")), "PENSTOCK_NOT_CONTINUOUS"),
        (lambda df: df.where("exists (select 1)"), "PENSTOCK_NOT_CONTINUOUS"),
        (lambda df: df.withColumn("now", F.current_timestamp()), "PENSTOCK_CONTINUOUS_NOW"),
        (lambda df: df.selectExpr("cast('now' as timestamp)"), "PENSTOCK_CONTINUOUS_NOW"),
    ],
    ids=["aggregate", "stack", "subquery", "time", "text for the time"],
)
def test_queries_refused_by_the_engine_are_refused_with_the_same_message(
    rate: DataFrame, change: object, code: str, tmp_path: Path
) -> None:
    report = penstock.modes.check(change(rate), sink=SINKS[0], trigger=TRIGGER)  # type: ignore[operator]
    assert [problem.code for problem in report["append"].problems] == [code]
    sink = penstock.TableSink("t", url=f"sqlite:///{tmp_path}/penstock.db")
    pipeline = penstock.stream(rate.sparkSession, penstock.RateSource(1)).transform(change).write(sink)  # type: ignore[arg-type]
    with pytest.raises(penstock.errors.ContinuousRefusedError):
        pipeline.start(trigger=TRIGGER)


def test_a_source_not_supported_by_the_engine_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    files = spark.readStream.schema("a int").json(str(tmp_path))
    (problem,) = penstock.modes.check(files, sink=SINKS[1], trigger=TRIGGER)["append"].problems
    assert problem.code == "PENSTOCK_SOURCE_NOT_CONTINUOUS"
