"""Rendering of a preview as SVG: a lane for each mode, micro-batches from left to right.

The SVG is written by hand: it is rectangles and lines of monospaced text, which a notebook shows as they are.
A plotting library would be a dependency of every notebook, and would still need this layout of boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, islice
from textwrap import wrap

from penstock.arguments import truncated
from penstock.arrow.row_text import rows_as_text
from penstock.modes.previewing.micro_batches import NO_DATA, MicroBatch, ModePreview
from penstock.modes.previewing.text import time_text

_MAX_BOXES = 8
_MAX_CHARACTERS, _NAME_CHARACTERS, _REASON_CHARACTERS = 44, 17, 72
_CHARACTER, _LINE, _BOX, _GAP, _PAD = 7.3, 16, 22, 6, 12
_LANE_TITLE = 150
_MIN_WIDTH = 22 * _CHARACTER
_STYLE = (
    "text{font:12px "
    "ui-monospace,Menlo,Consolas,monospace;fill:#1f2933}"
    ".mode{font-weight:bold;font-size:14px}.dim{fill:#7b8794}.late{fill:#b42318;font-weight:bold}"
    ".lane{fill:#f5f7fa}.empty{fill:#fff;stroke:#cbd2d9;stroke-dasharray:3 "
    "3}.row{fill:#dbeafe;stroke:#3b82f6}"
)


@dataclass(frozen=True)
class _Cell:
    """One micro-batch in one lane."""

    boxes: tuple[str, ...]
    more: int
    notes: tuple[tuple[str, str], ...]
    """CSS class and text of each line below the boxes."""

    @property
    def width(self) -> float:
        lines = [*self.boxes, *(text for _, text in self.notes)]
        return max(_MIN_WIDTH, max(map(len, lines), default=0) * _CHARACTER + 16)

    @property
    def height(self) -> float:
        boxes = max(len(self.boxes), 1) * _BOX + (_LINE if self.more else 0)
        return boxes + len(self.notes) * _LINE + 2 * _PAD


@dataclass(frozen=True)
class _Lane:
    mode: ModePreview
    cells: tuple[_Cell, ...]

    @property
    def height(self) -> float:
        beside = (1 + len(self.mode.columns)) * _LINE
        reason = (1 + len(self.reason)) * _LINE if self.mode.refusal else 0
        return max(beside + 2 * _PAD, reason + 2 * _PAD, *(cell.height for cell in self.cells))

    @property
    def reason(self) -> tuple[str, ...]:
        """The lines with why a mode is not allowed."""
        return tuple(wrap(self.mode.refusal.message, _REASON_CHARACTERS)) if self.mode.refusal else ()


def svg(modes: Sequence[ModePreview], time_zone: str) -> str:
    lanes = [_Lane(mode, tuple(_cell(batch, time_zone) for batch in mode.batches)) for mode in modes]
    columns = max((len(lane.cells) for lane in lanes), default=0)
    widths = [
        max(lane.cells[place].width for lane in lanes if place < len(lane.cells)) for place in range(columns)
    ]
    lefts = list(accumulate((width + _PAD for width in widths), initial=float(_LANE_TITLE)))
    width = max(lefts[-1] + _PAD, _LANE_TITLE + _REASON_CHARACTERS * _CHARACTER)
    top, parts = float(_PAD), _header(lanes, lefts)
    top += 3 * _LINE
    for lane in lanes:
        parts += _draw_lane(lane, top, lefts, widths, width)
        top += lane.height + _GAP
    parts.append(_text(_PAD, top + _LINE, f"Times are in {time_zone}.", "dim"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top + 2 * _LINE:.0f}" '
        f'role="img" aria-label="What each output mode emits"><style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _cell(batch: MicroBatch, time_zone: str) -> _Cell:
    boxes = tuple(
        truncated("  ".join(row), _MAX_CHARACTERS) for row in islice(rows_as_text(batch.emitted), _MAX_BOXES)
    )
    notes = []
    if batch.watermark is not None:
        notes.append(("dim", f"watermark {time_text(batch.watermark, time_zone)}"))
    if batch.operators:
        removed = f", {batch.removed_rows} removed" if batch.removed_rows else ""
        notes.append(("dim", f"state rows {batch.state_rows}{removed}"))
    if batch.dropped_rows:
        notes.append(("late", f"{batch.dropped_rows} dropped: too late"))
    return _Cell(boxes, batch.emitted.num_rows - len(boxes), tuple(notes))


def _header(lanes: list[_Lane], lefts: list[float]) -> list[str]:
    """Write above each column what all lanes share: the batch id and the number of input rows."""
    longest = max((lane.mode.batches for lane in lanes), key=len, default=())
    parts = []
    for left, batch in zip(lefts, longest, strict=False):
        rows = "no data" if batch.kind == NO_DATA else f"{batch.input_rows} in"
        parts.append(_text(left, _PAD + _LINE, f"micro-batch {batch.batch}"))
        parts.append(_text(left, _PAD + 2 * _LINE, rows, "dim"))
    return parts


def _draw_lane(lane: _Lane, top: float, lefts: list[float], widths: list[float], width: float) -> list[str]:
    parts = [
        f'<rect class="lane" x="0" y="{top:.0f}" width="{width:.0f}" height="{lane.height:.0f}"/>',
        _text(_PAD, top + _PAD + _LINE, lane.mode.mode, "mode"),
    ]
    if lane.mode.refusal is not None:
        parts.append(_text(_LANE_TITLE, top + _PAD + _LINE, "not allowed", "late"))
    for place, line in enumerate(lane.reason, 2):
        parts.append(_text(_LANE_TITLE, top + _PAD + place * _LINE, line, "dim"))
    for place, name in enumerate(lane.mode.columns, 2):
        parts.append(_text(_PAD, top + _PAD + place * _LINE, truncated(name, _NAME_CHARACTERS), "dim"))
    for cell, left, cell_width in zip(lane.cells, lefts, widths, strict=False):
        parts += _draw_cell(cell, left, top + _PAD, cell_width)
    return parts


def _draw_cell(cell: _Cell, left: float, top: float, width: float) -> list[str]:
    parts = []
    for box in cell.boxes:
        parts.append(_rect("row", left, top, width))
        parts.append(_text(left + 8, top + 14, box))
        top += _BOX
    if not cell.boxes:
        parts.append(_rect("empty", left, top, width))
        parts.append(_text(left + 8, top + 14, "nothing", "dim"))
        top += _BOX
    if cell.more:
        top += _LINE
        parts.append(_text(left + 8, top - 3, f"and {cell.more} more", "dim"))
    for kind, note in cell.notes:
        top += _LINE
        parts.append(_text(left, top, note, kind))
    return parts


def _rect(kind: str, left: float, top: float, width: float) -> str:
    return (
        f'<rect class="{kind}" x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{_BOX - 3}" rx="4"/>'
    )


def _text(left: float, top: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{left:.0f}" y="{top:.0f}" xml:space="preserve">{escape(text)}</text>'
