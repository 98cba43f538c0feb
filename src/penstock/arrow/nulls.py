"""Finding nulls where the schema takes none, in nested values too. Arrow itself does not look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.arrow.spark_json import join


def nested_fields(arrow_type: pa.DataType) -> list[pa.Field]:
    """Return the fields directly below a canonical type."""
    if pat.is_map(arrow_type):
        return [arrow_type.key_field, arrow_type.item_field]
    if pat.is_list(arrow_type):
        return [arrow_type.value_field]
    return list(arrow_type) if pat.is_struct(arrow_type) else []


def forbids_nulls(field: pa.Field, *, below_only: bool = False) -> bool:
    """Tell whether the field, or anything in it, takes no nulls; map keys, which Arrow guards, do not count."""
    if not field.nullable and not below_only:
        return True
    below = nested_fields(field.type)
    return any(forbids_nulls(each) for each in (below[1:] if pat.is_map(field.type) else below))


def null_path(array: pa.Array, field: pa.Field, path: str) -> str | None:
    """Return the dotted path of the first field in a column that holds a forbidden null, or None.

    Parameters
    ----------
    array
        A column of the field's canonical type.
    field
        What the schema says of it.
    path
        The field's own dotted path.
    """
    if not field.nullable and array.null_count:
        return path
    if not forbids_nulls(field, below_only=True):
        return None
    for name, child, child_field in _below(array):
        found = null_path(child, child_field, join(path, name))
        if found is not None:
            return found
    return None


def _below(array: pa.Array) -> list[tuple[str, pa.Array, pa.Field]]:
    kind = array.type
    if pat.is_list(kind):
        return [("element", array.flatten(), kind.value_field)]
    if pat.is_map(kind):
        return [("value", map_entries(array).flatten().field(1), kind.item_field)]
    # A null below a null struct is no null of its own.
    alive = array.filter(array.is_valid()) if array.null_count else array
    return [(each.name, alive.field(i), each) for i, each in enumerate(kind)]


def map_entries(array: pa.Array) -> pa.Array:
    """Return a map array as a list array of key and value structs; unlike a map, a list can be flattened as it is sliced."""
    kind = array.type
    # Put together rather than cast: a cast looks below null values too, and refuses what it finds there.
    entries = pa.StructArray.from_arrays(
        [array.keys, array.items], fields=[kind.key_field, kind.item_field.with_nullable(True)]
    )
    parts = array.buffers()[:2]
    return pa.Array.from_buffers(
        pa.list_(entries.type), len(array), parts, offset=array.offset, children=[entries]
    )


def first_row(length: int, is_bad: Callable[[int, int], bool]) -> int:
    """Return the first bad row, by bisection.

    Parameters
    ----------
    length
        How many rows there are; one of them is bad.
    is_bad
        Tells whether there is a bad row among those from the first index up to, not including, the second.
    """
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(low, middle) else (middle, high)
    return low


def chunks_of(column: Any) -> Sequence[pa.Array]:
    """Return the arrays of a column of a table or of a batch."""
    chunks: Sequence[pa.Array] = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return chunks
