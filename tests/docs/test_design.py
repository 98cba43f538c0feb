"""The files that the design pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import DOCS, ROOT

PAGES = [DOCS / "design.md", *sorted((DOCS / "design").glob("*.md"))]
_FILE = re.compile(r"`([\w/]+\.(?:py|sql))\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    files = [
        str(path.relative_to(ROOT))
        for root in ("src", "tests", "scripts")
        for path in (ROOT / root).rglob("*")
    ]
    missing = {
        name
        for name in _FILE.findall(page.read_text())
        if not any(file == name or file.endswith(f"/{name}") for file in files)
    }
    assert not missing
