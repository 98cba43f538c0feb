"""Pages of the docs: their blocks of code, section by section, and their links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALONE = "<!-- processes"
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#{1,6}) +(.*?)\s*$", re.MULTILINE)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()]*\)[^()\s]*)?)\)")
_CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    body: str
    alone: bool = False
    """Whether the programs of its section are for processes of their own."""


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    return [
        Block(language, body, ALONE in section)
        for section in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)
        for language, body in _FENCE.findall(section)
    ]


def pages() -> list[Path]:
    """Every page that people read."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def links(page: Path) -> Iterator[str]:
    """Where the page's relative links lead, as they are written."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    return (link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for _, title in _HEADING.findall(_FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = sum(1 for each in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each))
        found.add(f"{slug}-{number}" if number else slug)
    return found
