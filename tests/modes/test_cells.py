"""The check allows what Spark starts, for each query, mode, sink and trigger; the docs show the table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.modes.checking.report import MODES
from tests.modes.cells import CELLS, LOOKED_UP, OFTEN, Cell, PythonSink, frame_of, refusal_of
from tests.modes.frames import FRAMES, Inputs, inputs, settings_of
from tests.modes.live import LIVE
from tests.modes.sparks_version import as_in_the_docs

_INTRODUCTION = (
    "The tests start each of these queries. *yes*: Spark starts it, and no known problem loses or repeats "
    "rows or keeps state forever. *unsafe*: Spark starts it despite such a problem. *no*: Spark refuses it. "
    "[Each problem](../reference/problems.md) has a section of its own."
)
TABLE = Path(__file__).resolve().parents[2] / "docs/modes/table.md"


def _marks(cell: Cell) -> tuple[pytest.MarkDecorator, ...]:
    """Queries that are much like others are left to `make test-soak`."""
    often = cell.query in OFTEN or cell.sink not in ("noop", "console")
    told_already = cell.sink in LOOKED_UP or (cell.trigger == "realTime" and cell.sink != "console")
    return () if often and not told_already else (pytest.mark.soak,)


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    spark.dataSource.register(PythonSink)
    penstock.register(spark)
    return inputs(spark, tmp_path_factory.mktemp("streams"))


@pytest.mark.few(66)
@pytest.mark.parametrize("cell", [pytest.param(cell, marks=_marks(cell), id=str(cell)) for cell in CELLS])
def test_the_check_allows_what_spark_starts(
    cell: Cell, spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    with settings_of(spark, cell.query):
        df = frame_of(spark, streams, cell.query)
        found = penstock.modes.check(df, sink=cell.sink, trigger=cell.arguments)[cell.mode]
        refusal = refusal_of(cell, df, tmp_path)
    assert found.allowed == (refusal is None), (found.problems, refusal)


def test_there_are_enough_cells() -> None:
    assert len(set(CELLS)) >= 80


@as_in_the_docs
def test_the_docs_show_the_table(spark: SparkSession, streams: Inputs) -> None:
    text = _table(spark, streams)
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(text)
    assert TABLE.read_text() == text


def _table(spark: SparkSession, streams: Inputs) -> str:
    lines = [
        "# What each mode does with a query",
        "",
        _INTRODUCTION,
        "",
        "| query | sink | trigger | append | update | complete |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    reports: dict[tuple[str, str, str], penstock.modes.Report] = {}
    for cell in CELLS:
        row = (cell.query, cell.sink, cell.trigger)
        if row not in reports:
            with settings_of(spark, cell.query):
                df = frame_of(spark, streams, cell.query)
                reports[row] = penstock.modes.check(df, sink=cell.sink, trigger=cell.arguments)
        found = reports[row][cell.mode]
        verdict = "yes" if found.safe else "unsafe" if found.allowed else "no"
        rows.setdefault(row, {})[cell.mode] = verdict
    for (query, sink, trigger), verdicts in rows.items():
        shown = " | ".join(verdicts.get(mode, "") for mode in MODES)
        lines.append(f"| {query.replace('_', ' ')} | {sink} | {trigger} | {shown} |")
    lines += ["", "## The queries", ""]
    for name, frame in (FRAMES | LIVE).items():
        lines += [f"**{name.replace('_', ' ')}**", "", "```text", frame.source, "```", ""]
    return "\n".join(lines).rstrip() + "\n"
