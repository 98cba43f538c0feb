"""Sinks known only to the session are asked what Spark asks at a query's start: whether they support
truncation and updates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession

import penstock
from penstock.modes.checking.report import MODES
from penstock.spark.internals.query_start import streaming_capabilities
from tests.modes.cells import LOOKED_UP, Cell, PythonSink, frame_of, refusal_of
from tests.modes.frames import Inputs, inputs
from tests.modes.java_classes import java_classes
from tests.modes.sparks_version import OF_THE_DOCS

PACKAGE = "penstock.modes.sinks"


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("sinks")
    java_classes(spark, folder, "sinks")
    spark.dataSource.register(PythonSink)
    return inputs(spark, folder / "streams")


@pytest.mark.parametrize(
    ("sink", "modes"),
    [("Adding", ["append"]), ("Emptied", ["append", "complete"]), ("Updated", ["append", "update"])],
)
def test_a_sink_accepts_the_modes_that_its_writer_supports(
    sink: str, modes: list[str], spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    for mode in MODES:
        cell = Cell("filtered" if mode == "append" else "count_by_key", mode, f"{PACKAGE}.{sink}")
        df = frame_of(spark, streams, cell.query)
        verdict = penstock.modes.check(df, sink=cell.sink)[mode]
        assert verdict.allowed == (mode in modes), verdict.problems
        assert verdict.allowed == (refusal_of(cell, df, tmp_path) is None)


def test_the_missing_capability_is_named(streams: Inputs) -> None:
    report = penstock.modes.check(streams.events.groupBy("k").count(), sink=f"{PACKAGE}.Adding")
    assert "not complete: it cannot be emptied" in report["complete"].problems[0].message
    assert "not update: it does not take updated rows as new ones" in report["update"].problems[0].message


def test_a_python_sink_supports_truncation_but_not_updates(spark: SparkSession, streams: Inputs) -> None:
    jvm: Any = spark._jvm
    sources = jvm.org.apache.spark.sql.execution.datasources.DataSource
    state = spark._jsparkSession.sessionState()
    provider = sources.lookupDataSourceV2(PythonSink.name(), state.conf()).get()
    assert streaming_capabilities(streams.events, provider) == (True, False)


@pytest.mark.parametrize("sink", [sink for sink in LOOKED_UP if "." not in sink])
def test_a_format_without_streaming_writes_is_reported_with_a_remedy(streams: Inputs, sink: str) -> None:
    (problem,) = penstock.modes.check(streams.events, sink=sink)["append"].problems
    assert problem.code == "PENSTOCK_NO_SINK"
    assert f"batch.write.format('{sink}')" in str(problem.fix)


@pytest.mark.parametrize(
    ("sink", "condition"),
    [
        ("no_such_format", "DATA_SOURCE_NOT_FOUND"),
        ("avro", "AVRO_DATA_SOURCE_NOT_ENABLED" if OF_THE_DOCS else "_LEGACY_ERROR_TEMP_1139"),
    ],
)
def test_a_format_unknown_to_the_session_is_refused(
    streams: Inputs, sink: str, condition: str, tmp_path: Path
) -> None:
    (problem,) = penstock.modes.check(streams.events, sink=sink)["append"].problems
    assert (problem.code, problem.severity, problem.condition) == ("PENSTOCK_NO_SINK", "refused", condition)
    assert problem.spark in str(refusal_of(Cell("filtered", "append", sink), streams.events, tmp_path))


def test_a_format_known_from_its_source_code_is_checked_without_its_package(
    streams: Inputs,
) -> None:
    report = penstock.modes.check(streams.events, sink="kafka")
    assert report["append"].safe
    assert "Failed to find data source: kafka" in "".join(report.not_run)


def test_a_report_without_problems_says_if_a_sink_is_known_from_its_source_code(streams: Inputs) -> None:
    report = penstock.modes.check(streams.events, sink="delta")
    assert report["append"].problems == ()
    assert "the sink delta is known from the source of Delta Lake 4.0" in str(report)
    assert penstock.modes.check(streams.events, sink="console").source is None


@pytest.mark.parametrize("sink", ["delta", "parquet", "python"])
def test_a_mode_that_the_sink_does_not_support_is_reported_with_the_supported_ones(
    streams: Inputs, sink: str
) -> None:
    called = PythonSink.name() if sink == "python" else sink
    report = penstock.modes.check(streams.events.groupBy("k").count(), sink=called)
    modes = ["append"] if sink == "parquet" else ["append", "complete"]
    verdict = {
        mode: [each.message for each in report[mode].problems if " takes " in each.message] for mode in MODES
    }
    assert [mode for mode in MODES if not verdict[mode]] == modes
    assert f"takes {' and '.join(modes)} mode, not update" in verdict["update"][0]


def test_a_sink_about_which_spark_could_not_be_asked_is_reported(
    streams: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.internals.query_start.streaming_capabilities", _fails)
    report = penstock.modes.check(streams.events, sink="rate")
    assert "what the sink rate takes" in report.not_run[0]
    assert "no table without a name" in report.not_run[0]


def _fails(*_: object) -> None:
    raise IllegalArgumentException("no table without a name")
