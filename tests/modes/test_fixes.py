"""The fixes that a report proposes work: the problem is gone, and Spark runs the query."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.modes.checking.report import ModeReport
from tests.modes.cells import CELLS, Cell, PythonSink, frame_of, refusal_of
from tests.modes.fixes import ELSEWHERE, FIXES, UNTRIED
from tests.modes.frames import Inputs, inputs, settings_of
from tests.modes.proposals import codes_with_a_fix
from tests.modes.sparks_version import as_in_the_docs

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "src/penstock/modes"


@pytest.fixture(scope="module")
def streams(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    spark.dataSource.register(PythonSink)
    return inputs(spark, tmp_path_factory.mktemp("streams"))


def _problems_in(spark: SparkSession, streams: Inputs, cell: Cell) -> ModeReport:
    with settings_of(spark, cell.query):
        df = frame_of(spark, streams, cell.query)
        return penstock.modes.check(df, sink=cell.sink, trigger=cell.arguments)[cell.mode]


_STATE_IN_REAL_TIME = "STREAMING_REAL_TIME_MODE.STATEFUL_OPERATORS_BEFORE_UNION_NOT_SUPPORTED"


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=as_in_the_docs) if code == _STATE_IN_REAL_TIME else code for code in FIXES],
)
def test_a_fix_removes_the_problem_and_the_query_runs(
    code: str, spark: SparkSession, streams: Inputs, tmp_path: Path
) -> None:
    bad, fixed = FIXES[code]
    found = [problem for problem in _problems_in(spark, streams, bad).problems if problem.code == code]
    assert found, _problems_in(spark, streams, bad).problems
    assert found[0].fix
    checked = _problems_in(spark, streams, fixed)
    assert code not in [problem.code for problem in checked.problems]
    assert checked.allowed
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
