"""The reference and the tables of options agree with the code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import penstock
from penstock.errors import PenstockError
from penstock.spark.session import session_settings
from scripts import option_tables, reference
from tests.support.pages import DOCS


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    """The generated pages; several seconds of work, which only the worker that runs this file does."""
    return reference.pages()


def test_every_committed_page_equals_the_generated_one(pages: dict[Path, str]) -> None:
    outdated = [path.name for path, made in pages.items() if path.read_text() != made]
    assert not outdated, "run `make docs`"


def test_every_public_name_is_in_a_group() -> None:
    grouped = [name for names in reference.GROUPS.values() for name in names]
    modules = {"changes", "errors", "limits", "logs", "modes", "state"}
    assert sorted([*grouped, *modules, "__version__"]) == penstock.__all__


@pytest.mark.parametrize("name", reference.MODULES)
def test_every_name_of_a_public_module_has_a_heading(name: str, pages: dict[Path, str]) -> None:
    prefix = "penstock.testing." if name == "testing" else f"penstock.{name}."
    page = pages[reference.REFERENCE / f"{name}.md"]
    for each in import_module(f"penstock.{name}").__all__:
        assert f"## `{prefix}{each}`\n" in page


def test_every_condition_is_in_the_table(pages: dict[Path, str]) -> None:
    page = pages[reference.REFERENCE / "errors.md"]
    for kind in (each for each in _kinds(PenstockError) if each.__module__ == "penstock.errors"):
        shown = f"`{kind.condition}`"
        linked = f"[{shown}](../problems.md#{kind.condition.lower()})"
        assert any(f"| {each} | `{kind.__name__}` | " in page for each in (shown, linked))
        assert kind.__doc__, f"{kind.__name__} says nothing of itself"


def test_every_parameter_of_a_public_name_is_documented(pages: dict[Path, str]) -> None:
    for path, page in pages.items():
        assert not re.findall(r"^\| `[^|]+` \| \|$", page, re.MULTILINE), path.name


@pytest.mark.parametrize("table", option_tables.public_options())
def test_every_option_has_a_row(table: str) -> None:
    assert set(getattr(option_tables, table.upper())) == option_tables.public_options()[table]


def test_the_options_page_has_every_session_setting() -> None:
    page = (DOCS / "options.md").read_text()
    for name in session_settings(stateful=False, pipelined=True):
        assert f"`{name}`" in page


def _kinds(kind: type[PenstockError]) -> list[type[PenstockError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in _kinds(below))]
