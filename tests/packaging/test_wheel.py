"""The contents of a release."""

from __future__ import annotations

import json
import re
import tomllib
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock
from tests.packaging.conftest import Distributions
from tests.support.building import EXTRAS, PROJECT, ROOT, build, read_wheel, requirements, unpack

_DATA = {".sql", ".typed"}
# The monitor's page.
_PAGE = {".css", ".html", ".ico", ".js", ".md", ".svg", ".woff2"}
_DIST_INFO = f"penstock_spark-{penstock.__version__}.dist-info"


@pytest.fixture(scope="module")
def files(distributions: Distributions) -> dict[str, bytes]:
    return read_wheel(distributions.wheel)


@pytest.fixture(scope="module")
def metadata(files: dict[str, bytes]) -> Message:
    return BytesParser().parsebytes(files[f"{_DIST_INFO}/METADATA"])


def test_the_wheel_contains_only_the_packages_in_src(files: dict[str, bytes]) -> None:
    source = {
        str(path.relative_to(ROOT / "src")): path.read_bytes()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name: body for name, body in files.items() if not name.startswith(_DIST_INFO)} == source
    assert {name.split("/")[0] for name in source} == {
        "penstock",
        "pyspark_penstock.py",
        "pyspark_penstock_changes.py",
    }
    for name in source:
        page = _PAGE if name.startswith("penstock/ui/") else set()
        assert Path(name).suffix in {".py"} | _DATA | page, f"{name} is a stray file"
        assert not re.search(r"(^|/)(tests?|test_[^/]*|conftest\.py)(/|$)", name), name


def test_the_wheel_is_typed_and_has_its_licence_and_command(files: dict[str, bytes]) -> None:
    assert files["penstock/py.typed"] == b""
    assert files[f"{_DIST_INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"penstock = penstock.cli:main" in files[f"{_DIST_INFO}/entry_points.txt"]
    assert any(name.endswith(".sql") for name in files)


def test_the_metadata_agrees_with_pyproject(metadata: Message) -> None:
    assert metadata["Name"] == "penstock-spark"
    assert metadata["Version"] == penstock.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(PROJECT["urls"]) == {line.partition(",")[0] for line in metadata.get_all("Project-URL") or []}
    assert set(metadata.get_all("Provides-Extra") or []) == {*EXTRAS, "dev"}


def test_the_readme_has_only_absolute_links(metadata: Message) -> None:
    text = metadata.get_payload(decode=True).decode()
    assert text.startswith("# Penstock")
    places = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', text)
    assert len(places) > 20
    for link, picture in places:
        assert (link or picture).startswith("https://"), link or picture


def test_without_extras_only_pyarrow_is_required(metadata: Message) -> None:
    asked = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    assert [each.name for each in asked if each.marker is None] == ["pyarrow"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_requirement_of_users_has_a_lowest_version(extra: str) -> None:
    for each in requirements(extra):
        bounds = [bound.operator for bound in each.specifier]
        assert bounds.count(">=") == 1, f"{each} has no lowest version that could be tested"


def test_the_dev_extra_has_what_the_demo_needs() -> None:
    lines = (ROOT / "examples/flights/requirements.txt").read_text().splitlines()
    needed = {line for line in lines if line and not line.startswith("#")}
    assert needed <= {str(requirement) for requirement in requirements("dev")}


def test_the_source_distribution_builds_the_same_wheel(
    distributions: Distributions, files: dict[str, bytes], tmp_path: Path
) -> None:
    tree = unpack(distributions.sdist, tmp_path)
    build(tree, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert again.name == distributions.wheel.name
    assert read_wheel(again) == files
    # To the byte, so that anybody can look whether a release was built from its source.
    assert again.read_bytes() == distributions.wheel.read_bytes()


def test_build_requirements_are_pinned() -> None:
    for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]:
        assert [bound.operator for bound in Requirement(each).specifier] == ["=="]


def test_packages_that_build_the_page_have_hashes_and_run_no_install_scripts() -> None:
    page = ROOT / "frontend"
    packages = json.loads((page / "package-lock.json").read_text())["packages"]
    unknown = [
        name
        for name, each in packages.items()
        if name and not each.get("integrity", "").startswith("sha512-")
    ]
    assert len(packages) > 10
    assert unknown == []
    assert "ignore-scripts=true" in (page / ".npmrc").read_text().splitlines()
    assert "npm ci" in (ROOT / "scripts/ensure_page_modules.sh").read_text()
