"""Each problem of output modes has a section in the docs, whose program reproduces it and runs after
the fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.modes.checking.report import DOCS as SITE
from penstock.modes.checking.report import MODES, Problem
from tests.modes.sparks_version import as_in_the_docs
from tests.support.pages import DOCS, ROOT, anchors

PAGES = DOCS / "modes/problems"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_CODE = re.compile(
    r'"(PENSTOCK_[A-Z_]+|NON_TIME_WINDOW[A-Z_]+|STREAMING_OUTPUT_MODE\.UNSUPPORTED_DATASOURCE|STREAMING_REAL_TIME_MODE\.[A-Z_]+)"'
)
_WITHOUT_PROGRAM = {
    "PENSTOCK_FUNCTION_NEEDS_PROTOBUF",
    "PENSTOCK_MAP_GROUPS_MODE",
    "PENSTOCK_NOT_PLANNED",
    "PENSTOCK_REFUSED_BY_SPARK",
    "PENSTOCK_SINK_ONLY_ADDS",
    "PENSTOCK_TAIL",
}
"""Problems that no program of a classic Python session has."""


def _sections() -> Iterator[tuple[str, str, str]]:
    """Each code with its page's name and the text of its section."""
    for page in sorted(PAGES.glob("*.md")):
        for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
            code, _, text = section.partition("\n")
            yield code, page.stem, text


SECTIONS = {code: text for code, _, text in _sections()}
PROGRAMS = {
    code: program[1]
    for code, text in SECTIONS.items()
    if (program := re.search(r"```python\n(.*?)```", text, re.DOTALL))
}


def test_each_code_has_one_section_and_links_to_it() -> None:
    rules = ROOT / "src/penstock/modes/checking"
    code_files = (file.read_text() for file in rules.rglob("*.py") if file.name != "report.py")
    codes = {code for text in code_files for code in _CODE.findall(text)}
    found = [(code, page) for code, page, _ in _sections()]
    assert sorted(code for code, _ in found) == sorted(codes)
    for code, page in found:
        link = Problem(code, "").page
        assert link == f"{SITE}/{page}/#{code.lower().replace('.', '')}"
        assert link.partition("#")[2] in anchors(PAGES / f"{page}.md")


def test_a_code_of_spark_without_a_section_links_to_that_of_its_checker() -> None:
    link = Problem("_LEGACY_ERROR_TEMP_3102", "").page
    assert link == f"{SITE}/unchecked/#penstock_refused_by_spark"


def test_each_section_has_a_verdict_a_reason_and_advice() -> None:
    for code, text in SECTIONS.items():
        assert _verdict(text), code
        assert "**Why.** " in text, code
        assert "**What to do.** " in text, code
    assert set(SECTIONS) - set(PROGRAMS) == _WITHOUT_PROGRAM


@pytest.mark.few(30)
@as_in_the_docs
@pytest.mark.parametrize("code", PROGRAMS)
def test_a_program_reproduces_the_problem_and_runs_after_the_fix(
    code: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[penstock.modes.Report] = []
    check = penstock.modes.check

    def checked(*words: Any, **options: Any) -> penstock.modes.Report:
        reports.append(check(*words, **options))
        return reports[-1]

    def session(*_: Any, conf: dict[str, str] | None = None, **__: Any) -> SparkSession:
        for name, value in (conf or {}).items():
            spark.conf.set(name, value)
        penstock.register(spark)
        return spark

    monkeypatch.setattr(penstock.modes, "check", checked)
    monkeypatch.setattr(penstock, "session", session)
    # Spark's workers have a folder of their own.
    program = PROGRAMS[code].replace("sqlite:///", f"sqlite:///{tmp_path}/")
    program = program.replace('"checkpoints/', f'"{tmp_path}/checkpoints/')
    names: dict[str, Any] = {}
    spark.conf.unset(_PROVIDER)
    try:
        exec(compile(program, code, "exec"), names)
    finally:
        spark.conf.unset(_PROVIDER)
        spark.conf.unset("spark.sql.streaming.multipleWatermarkPolicy")
    if "query" in names:
        assert names["query"].exception() is None
    severity, modes = _verdict(SECTIONS[code])
    for mode in modes:
        found = [problem for problem in reports[0][mode].problems if problem.code == code]
        assert [problem.severity for problem in found][:1] == [severity]
        said = next((problem.spark for problem in found if problem.spark), None)
        if said is not None:
            assert f"\n> {' '.join(said.split())}\n" in SECTIONS[code] or mode != modes[0]


def _verdict(text: str) -> tuple[str, list[str]]:
    """The severity of a section's problem, and the modes that have it."""
    found = re.match(r"\n\*(Refused|Unsafe|Warning) in ([a-z, ]+?) mode\b.*\*\n", text)
    assert found is not None, text[:80]
    modes = list(MODES) if found[2] == "every" else re.findall(r"append|update|complete", found[2])
    return found[1].lower(), modes
