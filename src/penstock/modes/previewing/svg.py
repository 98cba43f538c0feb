"""Rendering of a preview as SVG, with a lane for each mode, and micro-batches from left to right.

The SVG is written without a plotting library: it consists of rectangles and lines of monospaced text. A
library would be a dependency of every notebook, and would still need this layout of boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, islice, zip_longest
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


_Line = tuple[str, str]
"""A line of text, and its CSS class."""


@dataclass(frozen=True)
class _Cell:
    """One micro-batch of one mode."""

    boxes: tuple[str, ...]
    more: int
    notes: tuple[_Line, ...]
    """The lines below the boxes."""

    @property
    def width(self) -> float:
        lines = [*self.boxes, *(text for text, _ in self.notes)]
        return max(_MIN_WIDTH, max(map(len, lines), default=0) * _CHARACTER + 16)


def svg(modes: Sequence[ModePreview], time_zone: str) -> str:
    lanes = [[_cell(batch, time_zone) for batch in mode.batches] for mode in modes]
    widths = [max(cell.width for cell in column if cell is not None) for column in zip_longest(*lanes)]
    lefts = list(accumulate((width + _PAD for width in widths), initial=float(_LANE_TITLE)))
    width = max(lefts[-1] + _PAD, _LANE_TITLE + _REASON_CHARACTERS * _CHARACTER)
    parts, top = _header(modes, lefts), float(_PAD + 3 * _LINE)
    for mode, cells in zip(modes, lanes, strict=True):
        lane, bottom = _draw_lane(mode, cells, top + _PAD, lefts, widths)
        height = bottom + _PAD - top
        parts.append(f'<rect class="lane" x="0" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}"/>')
        parts += lane
        top += height + _GAP
    parts.append(_text(_PAD, top + _LINE, f"Times are in {time_zone}.", "dim"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top + 2 * _LINE:.0f}" '
        f'role="img" aria-label="What each output mode emits"><style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _cell(batch: MicroBatch, time_zone: str) -> _Cell:
    rows = islice(rows_as_text(batch.emitted), _MAX_BOXES)
    boxes = tuple(truncated("  ".join(row), _MAX_CHARACTERS) for row in rows)
    notes = []
    if batch.watermark is not None:
        notes.append((f"watermark {time_text(batch.watermark, time_zone)}", "dim"))
    if batch.operators:
        removed = f", {batch.removed_rows} removed" if batch.removed_rows else ""
        notes.append((f"state rows {batch.state_rows}{removed}", "dim"))
    if batch.dropped_rows:
        notes.append((f"{batch.dropped_rows} dropped: too late", "late"))
    return _Cell(boxes, batch.emitted.num_rows - len(boxes), tuple(notes))


def _header(modes: Sequence[ModePreview], lefts: list[float]) -> list[str]:
    """Draw the titles above the columns: the batch id and the number of input rows, equal in all lanes."""
    longest = max((mode.batches for mode in modes), key=len, default=())
    parts = []
    for left, batch in zip(lefts, longest, strict=False):
        rows = "no data" if batch.kind == NO_DATA else f"{batch.input_rows} in"
        parts += _draw_lines([(f"micro-batch {batch.batch}", ""), (rows, "dim")], left, _PAD)[0]
    return parts


def _draw_lane(
    mode: ModePreview, cells: list[_Cell], top: float, lefts: list[float], widths: list[float]
) -> tuple[list[str], float]:
    """Draw one mode, and return the elements and the bottom edge, like the functions below."""
    names = [(truncated(name, _NAME_CHARACTERS), "dim") for name in mode.columns]
    drawn = [_draw_lines([(mode.mode, "mode"), *names], _PAD, top)]
    if mode.refusal is not None:
        reason = [(line, "dim") for line in wrap(mode.refusal.message, _REASON_CHARACTERS)]
        drawn.append(_draw_lines([("not allowed", "late"), *reason], _LANE_TITLE, top))
    for cell, left, width in zip(cells, lefts, widths, strict=False):
        drawn.append(_draw_cell(cell, left, top, width))
    return [part for parts, _ in drawn for part in parts], max(bottom for _, bottom in drawn)


def _draw_cell(cell: _Cell, left: float, top: float, width: float) -> tuple[list[str], float]:
    boxes = [(box, "", "row") for box in cell.boxes] or [("nothing", "dim", "empty")]
    parts = []
    for text, style, kind in boxes:
        attributes = f'x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{_BOX - 3}"'
        parts += [f'<rect class="{kind}" {attributes} rx="4"/>', _text(left + 8, top + 14, text, style)]
        top += _BOX
    if cell.more:
        top += _LINE
        parts.append(_text(left + 8, top - 3, f"and {cell.more} more", "dim"))
    notes, bottom = _draw_lines(cell.notes, left, top)
    return [*parts, *notes], bottom


def _draw_lines(lines: Sequence[_Line], left: float, top: float) -> tuple[list[str], float]:
    parts = [_text(left, top + number * _LINE, text, kind) for number, (text, kind) in enumerate(lines, 1)]
    return parts, top + len(lines) * _LINE


def _text(left: float, top: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{left:.0f}" y="{top:.0f}" xml:space="preserve">{escape(text)}</text>'
