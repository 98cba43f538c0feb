"""Formatting rows as text for users: the values of a table, and lines with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

_WINDOW_FIELDS = {"start", "end"}


def rows_as_text(table: pa.Table) -> Iterator[tuple[str, ...]]:
    """Format the values of a table, row by row."""
    columns = [[_cell(value, column.type) for value in column.to_pylist()] for column in table.columns]
    # By position, because two columns may have the same name.
    return zip(*columns, strict=True)


def align_columns(lines: Sequence[Sequence[str]], right: Collection[int], margin: str = "  ") -> list[str]:
    """Pad cells to the width of their columns; the columns in ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            if width
        ]
        for line in lines
    ]
    return [margin + "  ".join(cells).rstrip() for cells in padded]


def _cell(value: object, kind: pa.DataType) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return value if value.isprintable() else repr(value)[1:-1]
    if isinstance(value, datetime):
        return wall_clock(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    return _nested(value, kind) if pat.is_nested(kind) else str(value)


def _nested(value: Any, kind: pa.DataType) -> str:
    if pat.is_map(kind):
        return _braces(f"{_cell(key, kind.key_type)}: {_cell(item, kind.item_type)}" for key, item in value)
    if pat.is_struct(kind):
        if value.keys() == _WINDOW_FIELDS and all(isinstance(end, datetime) for end in value.values()):
            return _window(value["start"], value["end"])
        return _braces(f"{field.name}={_cell(value[field.name], field.type)}" for field in kind)
    return f"[{', '.join(_cell(item, kind.value_type) for item in value)}]"


def _braces(parts: Iterator[str]) -> str:
    return f"{{{', '.join(parts)}}}"


def _window(start: datetime, end: datetime) -> str:
    """Format a half-open window; the end has a date only if it differs from the start's."""
    end_text = wall_clock(end)
    return f"[{wall_clock(start)}, {end_text.partition(' ')[2] if start.date() == end.date() else end_text})"


def wall_clock(moment: datetime) -> str:
    """Format an instant in its own time zone."""
    return str(moment.replace(tzinfo=None))
