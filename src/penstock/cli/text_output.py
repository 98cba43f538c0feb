"""``TextOutput``: tables on standard output, progress on standard error; no colours or progress in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.arguments import truncated
from penstock.cli.output import (
    MAX_CELL_CHARACTERS,
    Advance,
    Column,
    Output,
    PrintRows,
    Row,
    Section,
    one_line,
    printable,
)
from penstock.errors import PenstockError

_PIPE_WIDTH = 100_000
_CELL_WIDTH = 60


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process here; Run.guard does that for every output.
        raise BrokenPipeError


class TextOutput(Output):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._is_terminal = sys.stdout.isatty()
        # In a pipe, which has no width, nothing is truncated or wrapped.
        width = None if self._is_terminal else _PIPE_WIDTH
        self._console = _Console(file=sys.stdout, width=width, highlight=False, emoji=False)

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        if rows:
            self._print_table(columns, rows, max_characters=MAX_CELL_CHARACTERS)
        else:
            self._print(f"no {name}")

    def describe(self, data: Mapping[str, object], sections: Sequence[Section]) -> None:
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

    def _print_table(
        self, columns: Sequence[Column], rows: Sequence[Row], max_characters: int | None = None
    ) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
        for row in rows:
            texts = [column.text(row[column.key]) for column in columns]
            table.add_row(*(Text(printable(_truncate(text, max_characters))) for text in texts))
        self._console.print(table)

    def done(self, text: str, data: Mapping[str, object]) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(printable(text, keep="\n")), soft_wrap=True)

    def row_printer(
        self, columns: Sequence[Column], style: Callable[[Row], str] = lambda row: ""
    ) -> PrintRows:
        cell_width = _CELL_WIDTH if self._is_terminal else None
        return _RowPrinter(self._console, columns, style, cell_width)

    def note(self, text: str) -> None:
        print(one_line(self.redact(text)), file=sys.stderr)

    def error(self, error: PenstockError) -> None:
        for line in getattr(error, "details", []):
            self.note(line)
        self.note(f"error: {error}")
        if error.help_url is not None:
            self.note(f"help: {error.help_url}")

    def progress(self, text: str, total: int | None) -> AbstractContextManager[Advance]:
        return _progress_bar(text, total) if sys.stderr.isatty() else super().progress(text, total)


def _truncate(text: str, max_characters: int | None) -> str:
    """Truncate the text of a cell; None for any length."""
    return text if max_characters is None else truncated(text, max_characters)


class _RowPrinter:
    """Printer of rows under one header. A wide cell widens its column for all later rows."""

    def __init__(
        self,
        console: Console,
        columns: Sequence[Column],
        style: Callable[[Row], str],
        cell_width: int | None,
    ) -> None:
        self._console, self._columns, self._style = console, columns, style
        self._cell_width = cell_width
        self._widths = [0] * len(columns)
        self._has_header = False

    def __call__(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        lines = []
        if not self._has_header:
            lines.append(([printable(column.title) for column in self._columns], "bold"))
            self._has_header = True
        for row in rows:
            cells = [self._cell(column.text(row[column.key])) for column in self._columns]
            lines.append((cells, self._style(row)))
        for cells, _ in lines:
            self._widths = [
                max(width, cell_len(cell)) for width, cell in zip(self._widths, cells, strict=True)
            ]
        for cells, style in lines:
            self._print(cells, style)
        sys.stdout.flush()

    def _cell(self, text: str) -> str:
        return printable(_truncate(text, self._cell_width))

    def _print(self, cells: Sequence[str], style: str) -> None:
        padded = [
            cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, self._widths, strict=True)
        ]
        line = Text("  ".join(padded).rstrip(), style=style)
        self._console.print(line, soft_wrap=self._cell_width is None, no_wrap=True, overflow="ellipsis")


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
