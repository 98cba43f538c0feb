"""Lines of cells under one header, as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from penstock.cli.output import printable


class Lines:
    """Prints lines of cells; a cell that is wider than those before it widens its column from there on.

    Parameters
    ----------
    titles
        The header, printed with the first lines.
    cell_width
        The most characters of a cell; None for all of them.
    """

    def __init__(self, console: Console, titles: Sequence[str], cell_width: int | None) -> None:
        self._console = console
        self._titles = [printable(title) for title in titles]
        self._limit = cell_width
        self._widths: list[int] = []

    def show(self, lines: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
        """Print some lines, each in a style of its own."""
        if not lines:
            return
        first = not self._widths
        shown = [(self._titles, "bold")] if first else []
        shown += [(list(line), style) for line, style in zip(lines, styles, strict=True)]
        found = [max(map(cell_len, cells)) for cells in zip(*(line for line, _ in shown), strict=True)]
        self._widths = found if first else [max(pair) for pair in zip(self._widths, found, strict=True)]
        for line, style in shown:
            self._print(line, style)
        sys.stdout.flush()

    def cell(self, value: Any) -> str:
        """A value as it is shown."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self._limit is not None and len(text) > self._limit:
            text = f"{text[: self._limit - 1]}…"
        return printable(text)

    def _print(self, cells: Sequence[str], style: str) -> None:
        padded = [
            cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, self._widths, strict=True)
        ]
        line = Text("  ".join(padded).rstrip(), style=style)
        self._console.print(line, soft_wrap=self._limit is None, no_wrap=True, overflow="ellipsis")
