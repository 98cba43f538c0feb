"""Unchanged TOAST values, filled in from earlier changes of the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.changes.passes.rows import IS_INSERT, IS_POSTIMAGE, ChangeRows, column_at
from penstock.changes.passes.violations import unknown_value
from penstock.spark.factorize import Codes


def filled(rows: ChangeRows, group: Codes) -> ChangeRows:
    """Fill in unchanged TOAST values from earlier changes of the group.

    Parameters
    ----------
    rows
        Change rows with a known order inside each group.
    group
        The number of each row's group.
    """
    path = rows.layout.unchanged
    if path is None:
        return rows
    named = column_at(rows.table, path)
    names = pc.list_flatten(named)
    if not len(names):
        return rows
    lifetimes = _Lifetimes(rows, group)
    parents = pc.list_parent_indices(named).to_numpy()
    table, remaining = rows.table, np.ones(len(names), bool)
    for name in filter(lambda name: _has_column(table, name), pc.unique(names).to_pylist()):
        entries = pc.equal(names, name).to_numpy(zero_copy_only=False)
        unknown = np.zeros(len(rows), bool)
        unknown[parents[entries]] = True
        source = lifetimes.sources(unknown)
        incomplete = lifetimes.incomplete(unknown & (source < 0))
        if incomplete is not None:
            raise unknown_value(rows, incomplete, name)
        table = _with_values_from(table, name, np.where(source < 0, np.arange(len(rows)), source))
        remaining[entries] = source[parents[entries]] < 0
    field = table.schema.field(path[0])
    table = table.set_column(
        path[0], field, _names_by_row(names, parents, remaining, len(rows)).cast(field.type)
    )
    return rows.with_table(table)


class _Lifetimes:
    """The changes of rows in order, from each insert or from the beginning of the group."""

    def __init__(self, rows: ChangeRows, group: Codes) -> None:
        self._kinds = rows.kinds
        order, changes = rows.in_groups(group)
        self._order = order
        begins = changes | (rows.kinds[order] == IS_INSERT)
        self._places = np.arange(len(order))
        self._begin = np.maximum.accumulate(np.where(begins, self._places, 0))
        self._last = np.flatnonzero(np.r_[changes[1:], True])

    def sources(self, unknown: Any) -> Any:
        """Return for each row the latest row that has the value; -1 if there is none."""
        order = self._order
        latest = np.maximum.accumulate(np.where(unknown[order], -1, self._places))
        sources = np.full(len(order), -1)
        sources[order] = np.where(latest >= self._begin, order[latest], -1)
        return sources

    def incomplete(self, unknown: Any) -> int | None:
        """Return a row that was inserted in its group, exists after it, and lacks the value."""
        order, last = self._order, self._last
        exists = np.isin(self._kinds[order[last]], (IS_INSERT, IS_POSTIMAGE))
        inserted = self._kinds[order[self._begin[last]]] == IS_INSERT
        rows = order[last[exists & inserted & unknown[order[last]]]]
        return int(rows[0]) if len(rows) else None


def _has_column(table: pa.Table, name: str) -> bool:
    """Whether a column is part of the read."""
    structs = (field.type for field in table.schema if pat.is_struct(field.type))
    return name in table.column_names or any(kind.get_field_index(name) >= 0 for kind in structs)


def _with_values_from(table: pa.Table, name: str, places: Any) -> pa.Table:
    """Take a column's values from other rows; it is a column of the table, or a field of its structs."""
    chosen = pa.array(places)
    place = table.schema.get_field_index(name)
    if place >= 0 and not pat.is_struct(table.schema.field(place).type):
        return table.set_column(place, table.schema.field(place), column_at(table, (place,)).take(chosen))
    for place, field in enumerate(table.schema):
        if pat.is_struct(field.type) and field.type.get_field_index(name) >= 0:
            column = column_at(table, (place,))
            parts = column.flatten()
            inner = field.type.get_field_index(name)
            parts[inner] = parts[inner].take(chosen)
            whole = pa.StructArray.from_arrays(parts, fields=list(field.type), mask=column.is_null())
            table = table.set_column(place, field, whole)
    return table


def _names_by_row(names: pa.Array, parents: Any, kept: Any, rows: int) -> pa.ListArray:
    sizes = np.bincount(parents[kept], minlength=rows)
    ends = np.r_[0, np.cumsum(sizes)].astype(np.int32)
    offsets = pa.array(ends, mask=np.r_[sizes == 0, False])
    return pa.ListArray.from_arrays(offsets, names.filter(pa.array(kept)))
