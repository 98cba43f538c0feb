"""Lines of cells under one header, as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.output.protocol import (
    Advance,
    ChangePrinter,
    Column,
    Output,
    RowPrinter,
    Section,
    no_progress,
    one_line,
    printable,
)
from penstock.errors import PenstockError


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


# ---- text_output: Results for people: tables on standard output, progress on standard error, neither colour nor progress in a pipe.

_PIPE_WIDTH = 100_000
_CELL_WIDTH = 60


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Not rich's own way, which ends the process: the boundary does that for all of us.
        raise BrokenPipeError


class TextOutput(Output):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._terminal = sys.stdout.isatty()
        # In a pipe nothing is cut or wrapped: whoever reads it has no width.
        self._console = _Console(
            file=sys.stdout, width=None if self._terminal else _PIPE_WIDTH, highlight=False, emoji=False
        )

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._print_table(columns, rows)
        else:
            self._print(f"no {name}")

    def describe(self, data: Mapping[str, Any], sections: Sequence[Section]) -> None:
        for number, section in enumerate(sections):
            if number:
                self._console.print()
            if section.title:
                self._console.print(Text(section.title, style="bold"))
            if section.pairs:
                grid = Table.grid(padding=(0, 2))
                for name, text in section.pairs:
                    grid.add_row(Text(name, style="dim"), Text(printable(text, keep="\n")))
                self._console.print(grid)
            if section.columns:
                self._print_table(section.columns, section.rows)

    def _print_table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(column.text(row[column.key]))) for column in columns))
        self._console.print(table)

    def done(self, text: str, data: Mapping[str, Any]) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(printable(text, keep="\n")), soft_wrap=True)

    def row_printer(self, columns: Sequence[str], *, with_index: bool) -> RowPrinter:
        lines = Lines(self._console, ["partition", "index", *columns], self._cell_width())

        def show(partition: int, first_index: int, rows: Sequence[Mapping[str, Any]]) -> None:
            lines.show(
                [
                    [str(partition), str(index), *(lines.cell(row[name]) for name in columns)]
                    for index, row in enumerate(rows, first_index)
                ],
                [""] * len(rows),
            )

        return show

    def change_printer(self, columns: Sequence[str]) -> ChangePrinter:
        lines = Lines(self._console, ["", "version", "time", *columns], self._cell_width())

        def show(rows: Sequence[Mapping[str, Any]]) -> None:
            signs = [_SIGNS[row["_change_type"]] for row in rows]
            lines.show(
                [
                    [
                        sign,
                        *(
                            lines.cell(row[name])
                            for name in ("_commit_version", "_commit_timestamp", *columns)
                        ),
                    ]
                    for (sign, _), row in zip(signs, rows, strict=True)
                ],
                [style for _, style in signs],
            )

        return show

    def _cell_width(self) -> int | None:
        return _CELL_WIDTH if self._terminal else None

    def note(self, text: str) -> None:
        print(one_line(self.redact(text)), file=sys.stderr)

    def error(self, error: PenstockError) -> None:
        for line in getattr(error, "details", []):
            print(one_line(self.redact(line)), file=sys.stderr)
        print(f"error: {one_line(self.redact(str(error)))}", file=sys.stderr)

    def progress(self, text: str, total: int | None) -> AbstractContextManager[Advance]:
        return _progress_bar(text, total) if sys.stderr.isatty() else no_progress()


_SIGNS = {
    "insert": ("+", "green"),
    "delete": ("-", "red"),
    "update_preimage": ("<", "yellow"),
    "update_postimage": (">", "bright_yellow"),
}


@contextmanager
def _progress_bar(text: str, total: int | None) -> Iterator[Advance]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda units: bar.advance(task, units)
