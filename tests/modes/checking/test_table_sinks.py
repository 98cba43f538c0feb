"""What a ``penstock.TableSink`` refuses when a pipeline starts is reported by the check, in the same
words.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.errors import PenstockError

SQL, DELTA = "sqlite:///{}/penstock.db", "delta://{}"


@pytest.fixture(scope="module")
def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


@pytest.fixture(scope="module")
def windows(rate: DataFrame) -> DataFrame:
    return rate.withWatermark("timestamp", "1 minute").groupBy(F.window("timestamp", "5 minutes")).count()


@pytest.mark.parametrize(
    ("settings", "url", "mode", "condition"),
    [
        ({}, SQL, "update", "INVALID_OPTION.MISSING"),
        ({"keys": ["value"]}, DELTA, "append", "INVALID_OPTION.CONFLICT"),
        ({"keys": ["value"], "apply_changes": True}, SQL, "update", "INVALID_OPTION.CONFLICT"),
        ({"keys": ["value"], "apply_changes": True}, DELTA, "complete", "INVALID_OPTION.CONFLICT"),
        ({"keys": ["value"], "apply_changes": True}, SQL, "append", "INVALID_INPUT.CHANGE_COLUMN_MISSING"),
        ({"keys": ["other"]}, SQL, "append", "INVALID_INPUT.UNKNOWN_COLUMN"),
        ({"keys": ["other"]}, DELTA, "update", "INVALID_INPUT.UNKNOWN_COLUMN"),
    ],
)
def test_the_check_refuses_in_the_same_words_as_the_start(
    rate: DataFrame, settings: dict[str, object], url: str, mode: str, condition: str, tmp_path: Path
) -> None:
    sink = penstock.TableSink("t", url=url.format(tmp_path), **settings)  # type: ignore[arg-type]
    report = penstock.modes.check(rate, sink=sink)[mode]
    problem = next(each for each in report.problems if each.code == "PENSTOCK_TABLE_REFUSES")
    assert not report.allowed
    assert problem.condition == condition
    with pytest.raises(PenstockError) as caught:
        penstock.stream(rate.sparkSession, rate).write(sink, output_mode=mode).start(
            checkpoint=tmp_path / "checkpoint", check=False
        )
    assert (caught.value.condition, caught.value.message) == (condition, problem.message)


@pytest.mark.parametrize("url", [SQL, DELTA])
def test_a_window_is_refused_as_key_but_not_its_start(windows: DataFrame, url: str, tmp_path: Path) -> None:
    refused = penstock.modes.check(windows, sink=penstock.TableSink("t", ["window"], url.format(tmp_path)))[
        "update"
    ]
    assert [problem.code for problem in refused.problems] == ["PENSTOCK_TABLE_REFUSES"]
    assert "select('window.start', ...)" in str(refused.problems[0].fix)
    plain = windows.select("window.start", "count")
    assert penstock.modes.check(plain, sink=penstock.TableSink("t", ["start"], url.format(tmp_path)))[
        "update"
    ].safe


def test_a_pipeline_raises_the_refusal_of_its_table_itself(windows: DataFrame, tmp_path: Path) -> None:
    sink = penstock.TableSink("t", ["window"], SQL.format(tmp_path))
    pipeline = penstock.stream(windows.sparkSession, windows).write(sink, output_mode="update")
    with pytest.raises(penstock.errors.InvalidInputError, match=r"INPUT.COLUMN_TYPE\].*is nested"):
        pipeline.start(checkpoint=tmp_path / "checkpoint")


def test_a_continuous_query_only_adds_to_a_sql_table(rate: DataFrame, tmp_path: Path) -> None:
    trigger = penstock.Trigger.continuous("1 second")
    keyed = penstock.TableSink("t", ["value"], SQL.format(tmp_path))
    (problem,) = penstock.modes.check(rate, sink=keyed, trigger=trigger)["update"].problems
    assert problem.condition == "CONTINUOUS_REFUSED.SINK"
    assert penstock.modes.check(rate, sink=keyed, trigger=trigger)["append"].safe
    delta = penstock.TableSink("t", url=DELTA.format(tmp_path))
    (problem,) = penstock.modes.check(rate, sink=delta, trigger=trigger)["append"].problems
    assert problem.condition == "CONTINUOUS_REFUSED.SINK"
