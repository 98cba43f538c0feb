"""Pages and notebooks install the distribution by its name: the index has another project's ``penstock``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.run_notebooks import NOTEBOOKS
from tests.support.pages import ROOT, blocks, pages

_OTHER_PROJECT = re.compile(r"""pip install [^`\n]*(?<![./\w])penstock\b(?!-spark)""")


@pytest.mark.parametrize("path", [*pages(), *NOTEBOOKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_instructions_do_not_install_another_project(path: Path) -> None:
    assert not _OTHER_PROJECT.findall(path.read_text())


def test_the_pattern_recognizes_the_other_project() -> None:
    assert _OTHER_PROJECT.search("pip install 'penstock[ui]'")
    assert _OTHER_PROJECT.search("pip install -U penstock")
    assert not _OTHER_PROJECT.search("pip install 'penstock-spark[ui]'")
    assert not _OTHER_PROJECT.search("pip install ./penstock")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_says_how_to_open_it(path: Path) -> None:
    assert re.search(r"pip install 'penstock-spark\[[\w,]+\]'( \w+)* jupyterlab", path.read_text())


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_contain_no_comments(page: Path) -> None:
    """An interactive zsh does not treat `#` as a comment."""
    for block in blocks(page):
        if block.language == "sh":
            assert not re.findall(r"(?:^|\s)#.*", block.body)
