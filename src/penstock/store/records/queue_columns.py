"""The columns of a queue, now and when older rows were written.

A queue is created with some columns. Later, columns may be added at the end, and a column may get a wider
type. These steps have one order, and each segment stores how many of them its rows have: its width. So one
number says how to decode a segment, and stored segments are never rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import pyarrow as pa

from penstock.arrow.coerce import same_type
from penstock.arrow.schema import fields_from_bytes, is_wider, schema_from_bytes, schema_to_bytes
from penstock.json_text import unreadable_record


@dataclass(frozen=True)
class QueueColumns:
    """The columns of a queue.

    Parameters
    ----------
    first
        The columns that it was created with, as an Arrow schema message.
    later
        The later steps, also as an Arrow schema message: new columns, and earlier columns with wider types.
        None if there are none.
    """

    first: bytes
    later: bytes | None = None

    @property
    def schema(self) -> pa.Schema:
        """All columns as they are now."""
        return _columns(self.first, self.later, None)

    @cached_property
    def first_width(self) -> int:
        """The width of rows with the columns that the queue was created with."""
        return len(_columns(self.first, None, None))

    @cached_property
    def width(self) -> int:
        """The width of rows with all columns as they are now."""
        return self.first_width + len(_later(self.later))

    def of(self, width: int) -> pa.Schema:
        """Return the columns of rows of a width; the current columns if it is larger."""
        return _columns(self.first, self.later, width if width < self.width else None)

    def width_of(self, schema: pa.Schema) -> int | None:
        """Return the width of rows with the current or an earlier schema; None if their columns are newer."""
        if schema.equals(self.schema):
            return self.width
        widths = range(self.width, self.first_width - 1, -1)
        return next((width for width in widths if _have_same_types(self.of(width), schema)), None)

    def with_more(self, fields: Sequence[pa.Field]) -> bytes:
        """Return ``later`` extended by new or widened columns."""
        return schema_to_bytes(pa.schema([*_later(self.later), *fields]))


def _have_same_types(left: pa.Schema, right: pa.Schema) -> bool:
    return len(left) == len(right) and all(map(same_type, left.types, right.types))


@lru_cache(maxsize=256)
def _later(data: bytes | None) -> tuple[pa.Field, ...]:
    return () if data is None else tuple(fields_from_bytes(data))


@lru_cache(maxsize=1024)
def _columns(first: bytes, later: bytes | None, width: int | None) -> pa.Schema:
    columns = list(schema_from_bytes(first))
    if width is not None and width < len(columns):
        return pa.schema(columns[:width])
    steps = _later(later)
    places = {column.name.lower(): place for place, column in enumerate(columns)}
    for step in steps if width is None else steps[: width - len(columns)]:
        place = places.setdefault(step.name.lower(), len(columns))
        if place == len(columns):
            columns.append(step)
        elif columns[place].name == step.name and is_wider(step.type, columns[place].type):
            columns[place] = step
        else:
            raise unreadable_record("the schema of a queue", ValueError(f"it has {step.name!r} twice"))
    return pa.schema(columns)
