"""What a report proposes works: the problem is gone, and Spark runs the query. Each problem has a page in
the docs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.modes.checking.report import ModeReport, Problem
from tests.modes.cells import CELLS, Cell, PythonSink, frame_of, refusal_of
from tests.modes.fixes import ELSEWHERE, FIXES, SHOWN, TOLD, UNTRIED
from tests.modes.frames import FRAMES, Inputs, inputs, settings_of
from tests.modes.live import LIVE
from tests.modes.proposals import codes_with_a_fix
from tests.modes.sparks_version import as_in_the_docs

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "src/penstock/modes"
PAGES = ROOT / "docs/modes/problems"
_FOLDER = re.compile(r"\[/.*?/(?=\w+\])")
_CODE = re.compile(
    r'"(PENSTOCK_[A-Z_]+|NON_TIME_WINDOW[A-Z_]+|STREAMING_OUTPUT_MODE\.UNSUPPORTED_DATASOURCE|STREAMING_REAL_TIME_MODE\.[A-Z_]+)"'
)


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    spark.dataSource.register(PythonSink)
    return inputs(spark, tmp_path_factory.mktemp("streams"))


def _told(spark: SparkSession, streams: Inputs, cell: Cell) -> ModeReport:
    with settings_of(spark, cell.query):
        df = frame_of(spark, streams, cell.query)
        return penstock.modes.check(df, sink=cell.sink, trigger=cell.arguments)[cell.mode]


_STATE_IN_REAL_TIME = "STREAMING_REAL_TIME_MODE.STATEFUL_OPERATORS_BEFORE_UNION_NOT_SUPPORTED"


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=as_in_the_docs) if code == _STATE_IN_REAL_TIME else code for code in FIXES],
)
def test_a_fix_takes_the_problem_away_and_the_query_runs(
    code: str, spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    bad, fixed = FIXES[code]
    found = [problem for problem in _told(spark, streams, bad).problems if problem.code == code]
    assert found, _told(spark, streams, bad).problems
    assert found[0].fix
    told = _told(spark, streams, fixed)
    assert code not in [problem.code for problem in told.problems]
    assert told.allowed
    if fixed in CELLS:
        # Started there.
        return
    with settings_of(spark, fixed.query):
        assert refusal_of(fixed, frame_of(spark, streams, fixed.query), tmp_path) is None


def test_each_problem_with_a_fix_has_a_test_of_the_fix() -> None:
    proposed = {code for file in sorted(RULES.rglob("*.py")) for code in codes_with_a_fix(file)}
    assert len(proposed) > 40
    assert proposed - set(FIXES) == {*ELSEWHERE, *UNTRIED}
    for name in ELSEWHERE.values():
        file, function = name.split("::")
        assert f"def {function}(" in (Path(__file__).parent / file).read_text()


@as_in_the_docs
def test_each_code_has_a_page_as_the_checks_tell_it(spark: SparkSession, streams: Inputs) -> None:
    pages = dict(_pages(spark, streams))
    assert set(pages) == _codes()
    written = {name: Problem(name, "").page.removeprefix("docs/modes/problems/") for name in pages}
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        PAGES.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (PAGES / written[name]).write_text(text)
    assert {path.name for path in PAGES.glob("*.md")} == set(written.values())
    for name, text in pages.items():
        assert (PAGES / written[name]).read_text() == text


def _codes() -> set[str]:
    return {code for file in RULES.rglob("*.py") for code in _CODE.findall(file.read_text())}


def _pages(spark: SparkSession, streams: Inputs) -> Iterator[tuple[str, str]]:
    for code, text in TOLD.items():
        yield code, f"# {code}\n\n{text}\n"
    for code, (bad, fixed) in FIXES.items():
        lines = [*_shown(spark, streams, code, bad), "With the fix:", "", *_query(fixed)]
        yield code, "\n".join(lines).rstrip() + "\n"
    for code, cell in SHOWN.items():
        yield code, "\n".join(_shown(spark, streams, code, cell)).rstrip() + "\n"


def _shown(spark: SparkSession, streams: Inputs, code: str, cell: Cell) -> list[str]:
    problem = next(each for each in _told(spark, streams, cell).problems if each.code == code)
    lines = [
        f"# {code}",
        "",
        _FOLDER.sub("[", f"{problem.message[0].upper()}{problem.message[1:]}. *({problem.severity})*"),
        "",
    ]
    lines += _query(cell)
    if problem.spark:
        lines += ["Spark says:", "", f"> {problem.spark}", ""]
    if problem.fix:
        lines += ["What to do:", "", "```text", problem.fix, "```", ""]
    return lines


def _query(cell: Cell) -> list[str]:
    known = FRAMES | LIVE
    source = known[cell.query].source if cell.query in known else _OTHERS[cell.query]
    where = f"In {cell.mode} mode, into {cell.sink}, with the trigger {cell.trigger}:"
    return [where, "", "```text", source, "```", ""]


_OTHERS = {
    "batch": "spark.range(3)",
    "rate": 'spark.readStream.format("rate").load()',
    "rate_counted": 'spark.readStream.format("rate").load().groupBy(F.col("value") % 3).count()',
    "rate_now": 'spark.readStream.format("rate").load().withColumn("now", F.current_timestamp())',
}
