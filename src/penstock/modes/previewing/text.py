"""A preview as text and as tables of rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import MissingDependency
from penstock.modes.previewing.cells import moment_text, rows_as_text
from penstock.modes.previewing.result import NO_DATA, MicroBatch, ModePreview, Preview
from penstock.modes.previewing.run import MOST_WITHOUT_DATA

if TYPE_CHECKING:
    from rich.console import Group

FIXED = ("batch", "in", "watermark", "state", "removed", "dropped", "emitted")
RIGHT = frozenset(place for place, title in enumerate(FIXED) if title not in {"batch", "watermark"})
"""The columns of numbers."""


@dataclass(frozen=True)
class Grid:
    """One mode's micro-batches as cells: a line for each emitted row, the first with what is true of the micro-batch."""

    titles: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def grid(mode: ModePreview, time_zone: str) -> Grid:
    """Lay out a mode that is allowed."""
    names = tuple(mode.batches[0].emitted.column_names) if mode.batches else ()
    lines = tuple(line for batch in mode.batches for line in _lines(batch, len(names), time_zone))
    return Grid((*FIXED, *names), lines)


def _lines(batch: MicroBatch, width: int, time_zone: str) -> list[tuple[str, ...]]:
    has_state = bool(batch.operators)
    about = (
        label(batch),
        str(batch.input_rows),
        moment_text(batch.watermark, time_zone),
        str(batch.state_rows) if has_state else "",
        str(batch.removed_rows) if has_state else "",
        str(batch.dropped_rows) if has_state else "",
        str(batch.emitted.num_rows),
    )
    rows = list(rows_as_text(batch.emitted)) or [("",) * width]
    blank = ("",) * len(about)
    return [
        ((about if first else blank) + row)
        for first, row in zip([True] + [False] * len(rows), rows, strict=False)
    ]


def label(batch: MicroBatch) -> str:
    """The batch id, and whether Spark ran it without data."""
    return f"{batch.batch}, no data" if batch.kind == NO_DATA else str(batch.batch)


def heading(mode: ModePreview) -> str:
    """A mode's name, and what is to be said of it."""
    if mode.refusal is not None:
        return f"{mode.mode}: not allowed. {mode.refusal.message}"
    cut = f" (cut: Spark goes on with micro-batches without data, of which {MOST_WITHOUT_DATA} are shown)"
    return mode.mode + (cut if mode.is_cut else "")


def text(preview: Preview) -> str:
    """A block of lines for each mode, in columns of one width."""
    blocks = []
    for mode in preview.modes:
        lines = [] if mode.refusal else _aligned(grid(mode, preview.time_zone))
        blocks.append("\n".join([heading(mode), *lines]))
    if note := zone_note(preview):
        blocks.append(note)
    return "\n\n".join(blocks)


def zone_note(preview: Preview) -> str:
    """In which time zone the times are shown; empty where there are no watermarks."""
    has_times = any(batch.watermark for mode in preview.modes for batch in mode.batches)
    return f"Times are in {preview.time_zone}." if has_times else ""


def _aligned(found: Grid) -> list[str]:
    table = [found.titles, *found.lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [_padded(line, widths) for line in table]


def _padded(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if place in RIGHT else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  " + "  ".join(cells).rstrip()


def rich_tables(preview: Preview) -> Group:
    """The same for rich.

    Raises
    ------
    MissingDependency
        When rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise MissingDependency(
            "a table needs rich: pip install 'penstock[cli]'; str(preview) does without",
            package="rich",
            extra="cli",
        ) from None
    parts: list[Text | Table] = []
    for mode in preview.modes:
        parts.append(Text(heading(mode), style="bold" if mode.allowed else "yellow"))
        if mode.refusal is None:
            found = grid(mode, preview.time_zone)
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
            for place, title in enumerate(found.titles):
                table.add_column(
                    Text(title),
                    justify="right" if place in RIGHT else "left",
                    no_wrap=place < len(FIXED),
                    overflow="fold",
                )
            for line in found.lines:
                table.add_row(*map(Text, line))
            parts.append(table)
        parts.append(Text(""))
    parts.append(Text(zone_note(preview), style="dim"))
    return Group(*parts)
