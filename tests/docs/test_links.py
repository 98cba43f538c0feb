"""Every relative link in README and docs has a target."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.pages import DOCS, ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_resolve(page: Path) -> None:
    for link in links(page):
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert target == ROOT or ROOT in target.parents, f"{link} leads out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading among {sorted(anchors(target))}"


def test_every_page_can_be_reached_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page):
            target = (page.parent / unquote(link).partition("#")[0]).resolve()
            # A folder stands for what is in it.
            there = sorted(target.glob("*.md")) if target.is_dir() else [target]
            waiting += [each for each in there if each.suffix == ".md" and DOCS in each.parents]
    missing = {page for page in pages() if DOCS in page.parents} - reached
    assert not missing, f"no way leads to {sorted(str(page.relative_to(ROOT)) for page in missing)}"
