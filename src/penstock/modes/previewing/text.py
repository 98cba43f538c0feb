"""Rendering of a preview as text and as rich tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.arrow.row_text import align_columns, rows_as_text, wall_clock
from penstock.errors import MissingDependencyError
from penstock.modes.previewing.micro_batches import MAX_WITHOUT_DATA, NO_DATA, MicroBatch, ModePreview

if TYPE_CHECKING:
    from rich.console import Group


def time_text(moment: datetime | None, time_zone: str) -> str:
    """Format an instant in a time zone, or in UTC if Python does not know the zone."""
    if moment is None:
        return "none"
    try:
        return wall_clock(moment.astimezone(ZoneInfo(time_zone)))
    except (ZoneInfoNotFoundError, ValueError):
        return f"{wall_clock(moment)}Z"


BATCH_COLUMNS = ("batch", "in", "watermark", "state", "removed", "dropped", "emitted")
RIGHT_ALIGNED = frozenset(
    index for index, title in enumerate(BATCH_COLUMNS) if title not in {"batch", "watermark"}
)
"""The indexes of the numeric columns, which are right-aligned."""


def grid(mode: ModePreview, time_zone: str) -> list[tuple[str, ...]]:
    """Return the titles, and a line of cells for each emitted row and each empty micro-batch."""
    lines = [line for batch in mode.batches for line in _lines(batch, len(mode.columns), time_zone)]
    return [(*BATCH_COLUMNS, *mode.columns), *lines]


def _lines(batch: MicroBatch, width: int, time_zone: str) -> list[tuple[str, ...]]:
    state = (batch.state_rows, batch.removed_rows, batch.dropped_rows)
    batch_cells = (
        f"{batch.batch}, no data" if batch.kind == NO_DATA else str(batch.batch),
        str(batch.input_rows),
        time_text(batch.watermark, time_zone),
        *(map(str, state) if batch.operators else ("", "", "")),
        str(batch.emitted.num_rows),
    )
    rows = list(rows_as_text(batch.emitted)) or [("",) * width]
    blank = ("",) * len(batch_cells)
    return [(batch_cells if index == 0 else blank) + row for index, row in enumerate(rows)]


def heading(mode: ModePreview) -> str:
    """Return a mode's name, with the reason why it is not allowed, or a note that its preview is cut."""
    if mode.refusal is not None:
        return f"{mode.mode}: not allowed. {mode.refusal.message}"
    cut_note = (
        f" (cut: Spark continues with micro-batches without data, of which {MAX_WITHOUT_DATA} are shown)"
    )
    return mode.mode + (cut_note if mode.is_cut else "")


def text(modes: Sequence[ModePreview], time_zone: str) -> str:
    blocks = []
    for mode in modes:
        lines = [] if mode.refusal else align_columns(grid(mode, time_zone), RIGHT_ALIGNED)
        blocks.append("\n".join([heading(mode), *lines]))
    if note := zone_note(modes, time_zone):
        blocks.append(note)
    return "\n\n".join(blocks)


def zone_note(modes: Sequence[ModePreview], time_zone: str) -> str:
    """Return a sentence with the time zone of the times; empty without watermarks."""
    has_times = any(batch.watermark for mode in modes for batch in mode.batches)
    return f"Times are in {time_zone}." if has_times else ""


def rich_tables(modes: Sequence[ModePreview], time_zone: str) -> Group:
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise MissingDependencyError(
            "a table needs rich: pip install 'penstock-spark[cli]', or use str(preview)",
            package="rich",
            extra="cli",
        ) from None
    parts: list[Text | Table] = []
    for mode in modes:
        parts.append(Text(heading(mode), style="bold" if mode.allowed else "yellow"))
        if mode.refusal is None:
            titles, *lines = grid(mode, time_zone)
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
            for index, title in enumerate(titles):
                table.add_column(
                    Text(title),
                    justify="right" if index in RIGHT_ALIGNED else "left",
                    no_wrap=index < len(BATCH_COLUMNS),
                    overflow="fold",
                )
            for line in lines:
                table.add_row(*map(Text, line))
            parts.append(table)
        parts.append(Text(""))
    parts.append(Text(zone_note(modes, time_zone), style="dim"))
    return Group(*parts)
