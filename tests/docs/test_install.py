"""Pages and notebooks install Penstock from a clone: on the index another project has its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.run_notebooks import NOTEBOOKS
from tests.docs.pages import ROOT, blocks, pages

# Where Penstock is there already, this brings what an extra needs; README has a word for any extra in it.
_BY_NAME = re.compile(r"""pip install [^`\n]*(?<![./\w])penstock\b(?!\[EXTRA\])""")


@pytest.mark.parametrize("path", [*pages(), *NOTEBOOKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_is_told_to_install_by_the_name_alone(path: Path) -> None:
    assert not _BY_NAME.findall(path.read_text())


def test_the_pattern_knows_a_name_from_a_folder() -> None:
    assert _BY_NAME.search("pip install 'penstock[ui]'")
    assert _BY_NAME.search("pip install -U penstock")
    assert not _BY_NAME.search("pip install '../penstock[ui]'")
    assert not _BY_NAME.search("pip install ./penstock")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_says_what_opens_it(path: Path) -> None:
    assert re.search(r"pip install '\./penstock\[[\w,]+\]'( \w+)* jupyterlab", path.read_text())


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_no_comments(page: Path) -> None:
    """An interactive zsh takes `#` for a word."""
    for block in blocks(page):
        if block.language == "sh":
            assert not re.findall(r"(?:^|\s)#.*", block.body)
