"""docs/versions.md agrees with pyproject.toml."""

from __future__ import annotations

import re

from packaging.requirements import Requirement

from tests.support.building import EXTRAS, PROJECT, ROOT

PAGE = (ROOT / "docs/versions.md").read_text()


def test_the_page_lists_the_lowest_version_of_every_library() -> None:
    needed: dict[str, list[str]] = {}
    for extra, asked in {"always": PROJECT["dependencies"], **EXTRAS}.items():
        for each in map(Requirement, asked):
            if each.name != PROJECT["name"]:
                (floor,) = (bound.version for bound in each.specifier if bound.operator == ">=")
                needed.setdefault(f"| `{each.name}` | {floor} |", []).append(extra)
    lines = {f"{library} {', '.join(extras)} |" for library, extras in needed.items()}
    assert set(re.findall(r"^\| `.*", PAGE, re.MULTILINE)) == lines


def test_the_page_lists_the_python_versions_of_the_classifiers() -> None:
    pythons = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert f"| Python | {', '.join(pythons)} |" in PAGE
    assert PROJECT["requires-python"] == f">={pythons[0]}"


def test_the_page_lists_the_spark_and_server_versions_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    (spark,) = re.findall(r"^\| PySpark \| ([\d.]+)", PAGE, re.MULTILINE)
    assert f"PySpark {spark} and" in readme
    (first, last) = re.findall(r"^\| PostgreSQL \| (\d+) to (\d+) \|", PAGE, re.MULTILINE)[0]
    assert f"PostgreSQL {first}–{last}" in readme
