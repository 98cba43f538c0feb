"""Values that a change did not touch and its feed does not tell, taken from earlier changes of the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.changes.passes.rows import IS_INSERT, IS_POSTIMAGE, ChangeRows, column_at
from penstock.changes.passes.violations import unknown_value
from penstock.spark.factorize import Codes


def carried(rows: ChangeRows, group: Codes) -> ChangeRows:
    """Rows with the values that their groups tell; what is still not known, no change of the group has touched.

    Parameters
    ----------
    rows
        Change rows whose order inside a group is known.
    group
        The number of each row's group.

    Raises
    ------
    ChangelogContractViolation
        UNKNOWN_VALUE, when the last change of a group leaves a row that began in the group without all its values: nobody who
        reads it could have them.
    """
    path = rows.layout.unchanged
    if path is None:
        return rows
    named = column_at(rows.table, path)
    names = pc.list_flatten(named)
    if not len(names):
        return rows
    lives = _Lives(rows, group)
    parents = pc.list_parent_indices(named).to_numpy()
    table, left = rows.table, np.ones(len(names), bool)
    for name in filter(lambda name: _has(table, name), pc.unique(names).to_pylist()):
        entries = pc.equal(names, name).to_numpy(zero_copy_only=False)
        unknown = np.zeros(len(rows), bool)
        unknown[parents[entries]] = True
        source = lives.sources(unknown)
        lost = lives.lost(unknown & (source < 0))
        if lost is not None:
            raise unknown_value(rows, lost, name)
        table = _taken(table, name, np.where(source < 0, np.arange(len(rows)), source))
        left[entries] = source[parents[entries]] < 0
    field = table.schema.field(path[0])
    table = table.set_column(path[0], field, _listed(names, parents, left, len(rows)).cast(field.type))
    return rows.with_table(table)


class _Lives:
    """The changes of a row in their order, each time from where it comes or from where the group begins."""

    def __init__(self, rows: ChangeRows, group: Codes) -> None:
        self._kinds = rows.kinds
        order, changes = rows.in_groups(group)
        self._order = order
        begins = changes | (rows.kinds[order] == IS_INSERT)
        self._places = np.arange(len(order))
        self._begin = np.maximum.accumulate(np.where(begins, self._places, 0))
        self._last = np.flatnonzero(np.r_[changes[1:], True])

    def sources(self, unknown: Any) -> Any:
        """The row that tells the value for each row that does not; -1 where there is none."""
        order = self._order
        latest = np.maximum.accumulate(np.where(unknown[order], -1, self._places))
        found = np.full(len(order), -1)
        found[order] = np.where(latest >= self._begin, order[latest], -1)
        return found

    def lost(self, unknown: Any) -> int | None:
        """A row that is the last of its group, began in it, and lacks the value."""
        order, last = self._order, self._last
        there = np.isin(self._kinds[order[last]], (IS_INSERT, IS_POSTIMAGE))
        came = self._kinds[order[self._begin[last]]] == IS_INSERT
        found = order[last[there & came & unknown[order[last]]]]
        return int(found[0]) if len(found) else None


def _has(table: pa.Table, name: str) -> bool:
    """Whether a column is there, or was not asked for."""
    structs = (field.type for field in table.schema if pat.is_struct(field.type))
    return name in table.column_names or any(kind.get_field_index(name) >= 0 for kind in structs)


def _taken(table: pa.Table, name: str, places: Any) -> pa.Table:
    """A table with a column's values from other rows; the column is one of its own, or inside its structs."""
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


def _listed(names: pa.Array, parents: Any, left: Any, rows: int) -> pa.ListArray:
    sizes = np.bincount(parents[left], minlength=rows)
    ends = np.r_[0, np.cumsum(sizes)].astype(np.int32)
    offsets = pa.array(ends, mask=np.r_[sizes == 0, False])
    return pa.ListArray.from_arrays(offsets, names.filter(pa.array(left)))
