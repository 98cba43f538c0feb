"""Reads pages of the documentation: their code blocks by section, their links and anchors."""

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
    """Code block."""

    language: str
    body: str
    alone: bool = False
    """Whether each program of its section runs in a separate process."""


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    return [
        Block(language, body, ALONE in section)
        for section in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)
        for language, body in _FENCE.findall(section)
    ]


def pages() -> list[Path]:
    """Return all pages of the documentation, and the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def links(page: Path) -> Iterator[str]:
    """Return the relative links of a page, as they are written."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    return (link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings."""
    slugs: set[str] = set()
    for _, title in _HEADING.findall(_FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = sum(1 for other in slugs if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        slugs.add(f"{slug}-{number}" if number else slug)
    return slugs
