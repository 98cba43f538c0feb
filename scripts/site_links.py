"""Hooks of the documentation site for links out of ``docs/``, and for anchors like those on GitHub."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^()\s]+)(?=\))")
_CODE_CELL = re.compile(r"^\| `(?P<code>[A-Z][A-Z_0-9.]+)` \|", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link files outside the site, such as examples, to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path, mark, anchor = match[0].partition("#")
        if not path:
            return match[0]
        target_path = posixpath.normpath(posixpath.join("docs", folder, path))
        if target_path.startswith("docs/") and "." in posixpath.basename(target_path):
            return match[0]
        return f"{config.repo_url}/blob/main/{target_path}{mark}{anchor}"

    # The second heading with the same anchor gets the suffix "_1" here, and "-1" on GitHub.
    markdown = re.sub(r"(?<=\(#penstock)([a-z]+)-(\d+)(?=\))", r"\1_\2", _LINK.sub(target, markdown))
    return with_code_anchors(markdown) if page.file.src_uri == "problems.md" else markdown


def with_code_anchors(markdown: str) -> str:
    """Add an anchor to each row of the tables of error codes, for ``PenstockError.help_url``.

    A row whose code is also a heading needs no anchor.
    """

    def add_anchor(match: re.Match[str]) -> str:
        code = match["code"]
        anchor = code.lower().replace(".", "-")
        return match[0] if f"## {code}\n" in markdown else f'| <span id="{anchor}"></span>`{code}` |'

    return _CODE_CELL.sub(add_anchor, markdown)


def heading_id(text: str, separator: str) -> str:
    """Return a heading's anchor as on GitHub: lower case, without punctuation."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)
