"""``modes.check``: its report on each query in each mode is correct, complete, and agrees with Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import InvalidInputError, OutputModeRefusedError
from penstock.modes.checking.check import _RULES
from penstock.modes.checking.plan import Plan
from penstock.modes.checking.report import MODES, REFUSED
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.query_start import check_output_mode
from tests.modes.cells import Cell, refusal_of
from tests.modes.frames import FRAMES, Frame, Inputs, inputs, settings_of


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return inputs(spark, tmp_path_factory.mktemp("streams"))


@pytest.fixture
def query(
    request: pytest.FixtureRequest, spark: SparkSession, streams: Inputs
) -> Iterator[tuple[Frame, DataFrame]]:
    frame = FRAMES[request.param]
    with settings_of(spark, frame.name):
        yield frame, frame.build(streams)


every_query = pytest.mark.parametrize("query", FRAMES, indirect=True)


@every_query
def test_all_problems_of_a_query_are_reported(query: tuple[Frame, DataFrame]) -> None:
    frame, df = query
    report = penstock.modes.check(df)
    for mode in MODES:
        assert sorted(problem.code for problem in report[mode].problems) == sorted(frame.codes(mode)), mode


@every_query
def test_the_rules_alone_agree_with_sparks_verdict(query: tuple[Frame, DataFrame]) -> None:
    """Where Spark cannot be asked, for example on Spark Connect, only the rules are available."""
    _, df = query
    plan = Plan(plan_tree(df))
    for mode in MODES:
        ours = {each.code for rule in _RULES for each in rule(plan, mode) if each.severity == REFUSED}
        theirs = check_output_mode(df, mode)
        assert bool(ours) == (theirs is not None), (mode, ours, theirs)


@every_query
def test_sparks_message_is_attached_to_the_problem_that_it_describes(query: tuple[Frame, DataFrame]) -> None:
    _, df = query
    report = penstock.modes.check(df)
    for mode in MODES:
        theirs = check_output_mode(df, mode)
        messages = [problem.spark for problem in report[mode].problems if problem.spark]
        assert messages == ([] if theirs is None else [theirs.message])
        assert (report[mode].emits is None) == (not report[mode].allowed)


def test_a_problem_names_its_operator_and_its_line_without_column_numbers(streams: Inputs) -> None:
    (problem,) = penstock.modes.check(streams.events.groupBy("k").count())["append"].problems
    assert (problem.operator, problem.line) == ("Aggregate", "Aggregate [k], [k, count(1) AS count]")
    assert problem.condition == "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"


def test_the_operation_that_loses_the_event_time_is_named(streams: Inputs) -> None:
    problem = penstock.modes.check(FRAMES["event_time_recreated"].build(streams))["append"].problems[0]
    assert problem.line == "Project [cast(cast(ts as string) as timestamp) AS t]"


def _no_rows(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    yield from ()


@pytest.mark.parametrize(("time_out", "warned"), [("NoTimeout", True), ("ProcessingTimeTimeout", False)])
def test_a_function_without_a_timeout_gives_a_warning_and_stays_safe(
    streams: Inputs, time_out: str, warned: bool
) -> None:
    df = streams.events.groupBy("k").applyInPandasWithState(_no_rows, "k long", "n long", "append", time_out)
    report = penstock.modes.check(df)["append"]
    assert report.safe
    assert [problem.code for problem in report.problems] == ["PENSTOCK_STATE_FOR_EVER"] * warned


def test_a_stalled_watermark_is_named_with_its_stream(streams: Inputs) -> None:
    problem = penstock.modes.check(FRAMES["joined_in_a_range"].build(streams))["append"].problems[0]
    assert "'ts' (10 seconds" in problem.message
    assert "'ts2' (10 seconds" in problem.message


def test_a_check_that_is_turned_off_in_spark_gives_a_warning_only(
    spark: SparkSession, streams: Inputs
) -> None:
    spark.conf.set("spark.sql.streaming.unsupportedOperationCheck", "false")
    try:
        report = penstock.modes.check(streams.events.orderBy("k"))
    finally:
        spark.conf.unset("spark.sql.streaming.unsupportedOperationCheck")
    assert report["append"].allowed
    assert not report["append"].safe


def test_append_mode_needs_a_watermark_even_if_the_check_is_turned_off(
    spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    """Spark's planner refuses the first micro-batch."""
    spark.conf.set("spark.sql.streaming.unsupportedOperationCheck", "false")
    try:
        df = streams.events.groupBy("k").count()
        report = penstock.modes.check(df)
        refusals = {mode: refusal_of(Cell("count_by_key", mode), df, tmp_path) for mode in MODES}
    finally:
        spark.conf.unset("spark.sql.streaming.unsupportedOperationCheck")
    assert [problem.code for problem in report["append"].problems] == [
        "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK"
    ]
    assert {mode: report[mode].allowed for mode in MODES} == {mode: refusals[mode] is None for mode in MODES}


@pytest.mark.parametrize("trigger", [{"once": True}, None])
def test_groups_that_a_final_run_would_leave_in_the_state_are_reported(
    streams: Inputs, trigger: object
) -> None:
    codes = [
        problem.code for problem in penstock.modes.check(streams.windows, trigger=trigger)["append"].problems
    ]
    assert codes == (["PENSTOCK_LAST_GROUP_STAYS"] if trigger else [])


def test_groups_that_stay_without_no_data_batches_are_reported(spark: SparkSession, streams: Inputs) -> None:
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    try:
        report = penstock.modes.check(streams.windows)
    finally:
        spark.conf.unset("spark.sql.streaming.noDataMicroBatches.enabled")
    assert [problem.code for problem in report["append"].problems] == ["PENSTOCK_LAST_GROUP_STAYS"]
    assert report["update"].problems == ()


def test_a_batch_dataframe_is_reported_as_not_streaming(spark: SparkSession) -> None:
    report = penstock.modes.check(spark.range(3))
    assert {problem.code for problem in report["append"].problems} == {"PENSTOCK_NOT_STREAMING"}


def test_a_refused_mode_raises_an_error_with_the_report_and_the_usable_modes(streams: Inputs) -> None:
    report = penstock.modes.check(streams.events.groupBy("k").count())
    report.require("update")
    with pytest.raises(
        OutputModeRefusedError, match=r"not allowed for this query.*update or complete"
    ) as caught:
        report.require("append")
    assert caught.value.parameters["problems"] == ["PENSTOCK_AGGREGATION_WITHOUT_WATERMARK"]


def test_the_error_offers_to_start_the_query_anyway_only_where_spark_would(streams: Inputs) -> None:
    with pytest.raises(
        OutputModeRefusedError, match=r"not safe for this query.*check=False starts it anyway"
    ):
        penstock.modes.check(streams.windows).require("complete")
    with pytest.raises(OutputModeRefusedError, match="not allowed for this query") as refused:
        penstock.modes.check(streams.events.groupBy("k").count()).require("append")
    assert "check=False" not in str(refused.value)


def test_the_report_is_readable_text(streams: Inputs) -> None:
    text = str(penstock.modes.check(streams.windows))
    assert "append: allowed\n  Each group is emitted once" in text
    assert "complete: allowed, not safe" in text
    assert "fix  outputMode('update')" in text
    assert "see  https://" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"trigger": "soon"}, "a trigger is"),
        ({"trigger": {"sometimes": True}}, "a trigger is"),
        ({"sink": 3}, "a sink is"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(
    streams: Inputs, arguments: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        penstock.modes.check(streams.events, **arguments)


def test_an_unknown_mode_is_refused_with_the_closest_match(streams: Inputs) -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'update'"):
        penstock.modes.check(streams.events)["updated"]


def test_objects_that_are_not_dataframes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="a streaming DataFrame"):
        penstock.modes.check("select 1")  # type: ignore[arg-type]  # on purpose


def test_a_problem_has_a_link_to_its_page(tmp_path: Path, streams: Inputs) -> None:
    (problem,) = penstock.modes.check(streams.events.groupBy("k").count())["append"].problems
    site = "https://penstock-spark.github.io/penstock/"
    assert problem.page == site + "modes/problems/aggregations/#penstock_aggregation_without_watermark"
