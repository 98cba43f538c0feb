"""Taken rows as a table: in text, and in HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import pyarrow as pa
import pyarrow.types as pat

from penstock.modes.preview_cells import rows_as_text

SHOWN_ROWS = 50
SHOWN_CHARACTERS = 60
_GAP = "  "


@dataclass(frozen=True)
class Sheet:
    """The first rows as cells."""

    heads: tuple[str, ...]
    kinds: tuple[str, ...]
    """The columns' types."""
    are_numbers: tuple[bool, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    """What stands below."""

    @classmethod
    def of(cls, table: pa.Table, note: str, time_zone: str) -> Sheet:
        """Lay out a table, with its instants in a time zone."""
        more = table.num_rows - SHOWN_ROWS
        shown = _in_zone(table.slice(0, SHOWN_ROWS), time_zone)
        return cls(
            tuple(_brief(name if name.isprintable() else repr(name)[1:-1]) for name in shown.column_names),
            tuple(str(field.type) for field in shown.schema),
            tuple(_is_number(field.type) for field in shown.schema),
            tuple(tuple(map(_brief, line)) for line in rows_as_text(shown)),
            (f"… {more:,} more", note) if more > 0 else (note,),
        )

    def text(self) -> str:
        """The cells in columns of one width."""
        lines = [self.heads, *self.lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [self._padded(line, widths) for line in lines]
        shown.insert(1, _GAP.join("-" * width for width in widths))
        return "\n".join([*shown, *(f"({note})" for note in self.notes)])

    def _padded(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(cells, widths, self.are_numbers, strict=True)
        ]
        return _GAP.join(padded).rstrip()

    def html(self) -> str:
        """The cells as a table of HTML; a column's type stands where the mouse rests on its name."""
        styles = [f'style="text-align: {"right" if is_number else "left"}"' for is_number in self.are_numbers]
        heads = [
            f'<th title="{escape(kind)}" {style}>{escape(head)}</th>'
            for head, kind, style in zip(self.heads, self.kinds, styles, strict=True)
        ]
        lines = [
            "".join(f"<td {style}>{escape(cell)}</td>" for cell, style in zip(line, styles, strict=True))
            for line in self.lines
        ]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        below = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return (
            f"<div><table><thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
        )


def _in_zone(table: pa.Table, time_zone: str) -> pa.Table:
    """The same instants in a time zone; in their own where Arrow does not know it."""
    fields = [field.with_type(_zoned(field.type, time_zone)) for field in table.schema]
    try:
        local = table.cast(pa.schema(fields))
        # Zones are looked up when a value is made.
        list(rows_as_text(local))
    except (pa.ArrowException, KeyError, ValueError):
        return table
    return local


def _zoned(kind: pa.DataType, time_zone: str) -> pa.DataType:
    if pat.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, time_zone)
    if pat.is_struct(kind):
        return pa.struct([field.with_type(_zoned(field.type, time_zone)) for field in kind])
    if pat.is_list(kind):
        return pa.list_(kind.value_field.with_type(_zoned(kind.value_type, time_zone)))
    return kind


def _brief(cell: str) -> str:
    return cell if len(cell) <= SHOWN_CHARACTERS else f"{cell[: SHOWN_CHARACTERS - 1]}…"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pat.is_integer(kind) or pat.is_floating(kind) or pat.is_decimal(kind))
