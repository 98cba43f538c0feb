"""``penstock modes``: functions in the user's modules, checked and previewed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from penstock.cli.load.micro_batches import micro_batches
from penstock.errors import InvalidInputError
from tests.support.commands import run_penstock

FUNCTION_NOT_FOUND = "INVALID_INPUT.FUNCTION_NOT_FOUND"

JOB = """
from pyspark.sql import functions as F

def totals(frame):
    return frame.groupBy(F.window("ts", "10 minutes"), "key").count().select("window.start", "key", "count")

def counts(frame):
    return frame.groupBy("key").count()

def keys(frame):
    return frame.select("key")

def unknown(frame):
    return frame.select("kye")

def failing(frame):
    def fail(key):
        raise ValueError("boom at " + key)
    return frame.select(F.udf(fail, useArrow=False)("key"))

def of_session(spark):
    return spark.readStream.format("rate").load()

NUMBER = 1
"""
EVENTS = """\
{"ts": "2026-01-01T12:01:00Z", "key": "a"}
{"ts": "2026-01-01T12:07:00Z", "key": "b"}

{"ts": "2026-01-01T12:24:00Z", "key": "b"}


{"ts": "2026-01-01T12:25:00Z", "key": "a"}
{"ts": "2026-01-01T12:36:00Z", "key": "b"}
"""
TIMES = ("--event-time", "ts", "--delay", "10 minutes")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module and a file of rows."""
    name = f"job_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(JOB)
    (tmp_path / "events.jsonl").write_text(EVENTS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop(name, None)


def job(here: Path, function: str) -> str:
    return f"job_{here.name}:{function}"


def test_a_check_shows_the_output_and_the_problems_of_each_mode(spark: SparkSession, here: Path) -> None:
    words = ("modes", "check", job(here, "totals"), "--schema", "ts timestamp, key string")
    shown = run_penstock(*words, *TIMES).out.splitlines()
    assert [line for line in shown if not line.startswith(" ")] == [
        "append: allowed",
        "update: allowed",
        "complete: allowed, not safe",
    ]
    report = run_penstock(*words, *TIMES, "--json").json
    assert [(mode["mode"], mode["allowed"], mode["safe"]) for mode in report["modes"]] == [
        ("append", True, True),
        ("update", True, True),
        ("complete", True, False),
    ]
    assert report["modes"][0]["emits"].startswith("Each group is emitted once")
    problem = report["modes"][2]["problems"][0]
    assert {"code", "message", "severity", "operator", "line", "fix", "page"} <= problem.keys()
    assert report["trigger"] == "processing time"


def test_a_check_fails_when_no_mode_is_allowed_and_safe(spark: SparkSession, here: Path) -> None:
    words = ("modes", "check", job(here, "totals"), "--schema", "ts timestamp, key string")
    report = run_penstock(*words, "--json", code=1).json
    assert [mode["safe"] for mode in report["modes"]] == [False] * 3
    assert not report["modes"][0]["allowed"]


def test_a_check_considers_sink_and_trigger(spark: SparkSession, here: Path) -> None:
    words = ("modes", "check", job(here, "keys"), "--schema", "key string", "--json")
    report = run_penstock(*words, "--sink", "parquet", "--trigger", "availableNow").json
    assert (report["sink"], report["trigger"]) == ("parquet", "available now")
    assert [mode["allowed"] for mode in report["modes"]] == [True, False, False]
    assert run_penstock(*words, "--trigger", "continuous=1 second").json["trigger"] == "continuous"
    assert "a trigger is" in run_penstock(*words, "--trigger", "sometimes", code=1).error["message"]


def test_a_check_passes_a_session_to_a_function_that_takes_one(spark: SparkSession, here: Path) -> None:
    words = ("modes", "check", job(here, "of_session"), "--json")
    assert [mode["safe"] for mode in run_penstock(*words).json["modes"]] == [True, True, False]
    report = run_penstock(*words, "--schema", "id int", code=1).error
    assert "leave out --schema and --event-time" in report["message"]
    assert report["error"] == "INVALID_INPUT.FUNCTION_PARAMETERS"
    report = run_penstock("modes", "check", job(here, "keys"), "--json", code=1).error
    assert "give its columns with --schema" in report["message"]
    assert report["error"] == "INVALID_INPUT.FUNCTION_PARAMETERS"


def test_a_preview_shows_each_mode_as_a_table(spark: SparkSession, here: Path) -> None:
    shown = run_penstock(
        "modes", "preview", job(here, "totals"), "events.jsonl", *TIMES, "--mode", "append"
    ).out
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["append"]
    assert lines[1] == [
        "batch",
        "in",
        "watermark",
        "state",
        "removed",
        "dropped",
        "emitted",
        "start",
        "key",
        "count",
    ]
    assert lines[2] == ["0", "2", "none", "2", "0", "0", "0"]
    assert lines[3] == ["1", "1", "2026-01-01", "11:57:00", "3", "0", "0", "0"]
    assert lines[4][:8] == ["2", "2", "2026-01-01", "12:14:00", "3", "2", "0", "2"]
    assert sorted(line[-4:] for line in lines[4:6]) == [
        ["2026-01-01", "12:00:00", key, "1"] for key in ("a", "b")
    ]
    assert lines[6][:5] == ["3,", "no", "data", "0", "2026-01-01"]
    assert shown.endswith("\nTimes are in UTC.\n")


def test_a_json_preview_has_every_mode(spark: SparkSession, here: Path) -> None:
    found = run_penstock(
        "modes", "preview", job(here, "counts"), "events.jsonl", "--batch-rows", 4, "--json"
    ).json
    append, update, complete = found["modes"]
    assert (append["mode"], append["allowed"], append["batches"]) == ("append", False, [])
    assert append["condition"] == "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"
    assert "Invalid streaming output mode: append." in append["reason"]
    assert update["allowed"]
    assert [batch["input_rows"] for batch in update["batches"]] == [4, 1]
    assert update["batches"][1] == {
        "batch": 1,
        "kind": "data",
        "input_rows": 1,
        "watermark": None,
        "state_rows": 2,
        "removed_rows": 0,
        "dropped_rows": 0,
        "emitted": [{"key": "b", "count": 3}],
    }
    assert sorted(row["key"] for row in complete["batches"][1]["emitted"]) == ["a", "b"]
    assert found["time_zone"] == "UTC"


def test_a_preview_writes_a_picture(spark: SparkSession, here: Path) -> None:
    words = (job(here, "keys"), "events.jsonl", "--mode", "append", "--picture")
    run_penstock("modes", "preview", *words, "modes.svg")
    assert ElementTree.parse(here / "modes.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    report = run_penstock("modes", "preview", *words, "no/such/folder.svg", "--json", code=1)
    assert report.error["error"] == "FILE_UNWRITABLE"


def test_rows_can_be_piped_in_with_a_schema(spark: SparkSession, here: Path) -> None:
    words = ("modes", "preview", job(here, "keys"), "-", "--mode", "append", "--json")
    shown = run_penstock(*words, "--schema", "ts timestamp, key string", stdin=EVENTS).json
    assert [len(batch["emitted"]) for batch in shown["modes"][0]["batches"]] == [2, 1, 2]
    assert "add --schema" in run_penstock(*words, stdin=EVENTS, code=1).err


@pytest.mark.parametrize(
    ("target", "message", "condition"),
    [
        ("totals", "written as MODULE:FUNCTION", "INVALID_INPUT"),
        ("{job}.py:totals", "written as MODULE:FUNCTION", "INVALID_INPUT"),
        ("{job}s:totals", "in the working directory or on Python's path", FUNCTION_NOT_FOUND),
        ("{job}:total", "Did you mean 'totals'?", FUNCTION_NOT_FOUND),
        ("{job}:NUMBER", "is a int, not a function", FUNCTION_NOT_FOUND),
        ("{job}:of_session", "takes a Spark session", "INVALID_INPUT.FUNCTION_PARAMETERS"),
    ],
)
def test_a_target_that_is_not_a_function_of_a_dataframe_is_refused(
    here: Path, target: str, message: str, condition: str
) -> None:
    report = run_penstock(
        "modes", "preview", target.format(job=f"job_{here.name}"), "events.jsonl", "--json", code=1
    ).error
    assert message in report["message"]
    assert report["error"] == condition


def test_errors_of_the_function_are_one_line(spark: SparkSession, here: Path) -> None:
    report = run_penstock("modes", "preview", job(here, "unknown"), "events.jsonl", code=1).err
    assert report.startswith("error: [UNRESOLVED_COLUMN.WITH_SUGGESTION] A column")
    assert len(report.splitlines()) == 1
    report = run_penstock("modes", "preview", job(here, "failing"), "events.jsonl", code=1).err
    assert report == (
        "error: [PYTHON_EXCEPTION] ValueError: boom at a (in the preview of append mode, in micro-batch 0)\n"
    )


def test_a_command_does_not_change_sparks_loggers(spark: SparkSession, here: Path) -> None:
    run_penstock("modes", "check", job(here, "unknown"), "--schema", "key string", code=1)
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        log = logging.getLogger(name)
        assert isinstance(log, PySparkLogger), "Spark's errors could not be raised with another one"
        assert log.isEnabledFor(logging.ERROR)


def test_conflicting_options_are_refused(here: Path) -> None:
    def report(*words: object) -> Any:
        return run_penstock("modes", "preview", job(here, "keys"), *words, "--json", code=1).error

    assert "--event-time" in report("events.jsonl", "--delay", "1 minute")["message"]
    assert "leave one out" in report("events.jsonl", "--batch-rows", 1, "--batch-column", "key")["message"]
    assert "Did you mean 'key'?" in report("events.jsonl", "--batch-column", "kye")["message"]
    assert "Did you mean 'ts'?" in report("events.jsonl", "--event-time", "tss")["message"]
    assert report("nowhere.jsonl")["error"] == "FILE_UNREADABLE"
    rejected = report("events.jsonl", "--schema", "ts timestamp, key bigint")
    assert (rejected["error"], rejected["parameters"]["rows"][0]["line"]) == ("ROWS_REJECTED", 1)
    assert rejected["message"] == "5 rows of 'events.jsonl' do not fit the schema; nothing was run"


def test_micro_batches_are_split_by_empty_lines_row_count_or_a_column(here: Path) -> None:
    def sizes(**options: Any) -> list[int]:
        return [table.num_rows for table in micro_batches("events.jsonl", None, None, **options)]

    assert sizes() == [2, 1, 2]
    assert sizes(batch_rows=2) == [2, 2, 1]
    assert sizes(batch_rows=9) == [5]
    assert sizes(batch_column="key") == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("2026-01-01T12:00:00Z", "timestamp[us, tz=UTC]"),
        ("2026-01-01T12:00:00.5+02:00", "timestamp[us, tz=UTC]"),
        ("2026-01-01 12:00:00", "timestamp[us]"),
    ],
)
def test_the_time_zone_of_a_value_decides_its_timestamp_type(here: Path, text: str, kind: str) -> None:
    (here / "times.jsonl").write_text(f'{{"ts": "{text}"}}\n')
    (table,) = micro_batches("times.jsonl", None, "ts")
    assert str(table.schema.field("ts").type) == kind


def test_a_file_without_rows_is_refused(here: Path) -> None:
    (here / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InvalidInputError, match="has no rows"):
        micro_batches("empty.jsonl", "id int", None)


@pytest.mark.soak
def test_a_command_starts_a_local_spark_without_extra_output(here: Path) -> None:
    words = ["modes", "preview", job(here, "failing"), "events.jsonl", "--mode", "append"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        cwd=here,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == ""
    assert done.stderr == (
        "error: [PYTHON_EXCEPTION] ValueError: boom at a (in the preview of append mode, in micro-batch 0)\n"
    )
    assert done.returncode == 1
