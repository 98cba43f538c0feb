"""Net changes: several changes of one row combined into the difference between its first and last state."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.changes.passes.rows import ChangeRows, Groups, Mask, Numbers, column_at
from penstock.changes.passes.violations import unknown_value
from penstock.feeds.contract import IS_DELETE, IS_INSERT, IS_POSTIMAGE, IS_PREIMAGE
from penstock.feeds.protocol import lists_of
from penstock.spark.factorize import Codes


def net(rows: ChangeRows, group: Codes, *, updates: bool) -> ChangeRows:
    """Return the net change of each group: one change, the two rows of an update, or nothing.

    The order inside a group has to be known. The table of first and last change is Spark 4.3's: a row that
    existed before has the image of its first change, a row that exists afterwards that of its last change. A
    group that begins with a post-image is of a feed without pre-images: the row existed in an unknown state.
    Its net change is a post-image alone, or the delete. With ``updates`` an update is a pre-image and a post-
    image, rather than a delete and an insert.
    """
    if not len(rows):
        return rows
    order, begins = rows.in_groups(group)
    first, last = order[begins], order[np.r_[begins[1:], True]]
    before = np.isin(rows.kinds[first], (IS_DELETE, IS_PREIMAGE))
    unknown = rows.kinds[first] == IS_POSTIMAGE
    after = np.isin(rows.kinds[last], (IS_INSERT, IS_POSTIMAGE))
    kinds = np.full(len(rows), -1, np.int8)
    kinds[first[before]] = np.where(updates & after[before], IS_PREIMAGE, IS_DELETE)
    is_update = unknown | (updates & before)
    kinds[last[after]] = np.where(is_update[after], IS_POSTIMAGE, IS_INSERT)
    kinds[last[unknown & ~after]] = IS_DELETE
    keep = kinds >= 0
    return rows.filter(keep).with_kinds(kinds[keep])


def counted(rows: ChangeRows, group: Codes) -> ChangeRows:
    """Return the surplus of inserts over deletes, or of deletes over inserts, of each group.

    This is for rows that are equal if their row ids are: only the number of inserts and deletes matters. The
    last inserts remain, or the first deletes.
    """
    groups = Groups.by(group)
    order = np.lexsort(rows.order)
    inserted = np.isin(rows.kinds, (IS_INSERT, IS_POSTIMAGE))
    surplus = groups.counts(inserted) - groups.counts(~inserted)
    kinds = np.full(len(rows), -1, np.int8)
    for kind, places, left in (
        (IS_INSERT, order[inserted[order]][::-1], surplus),
        (IS_DELETE, order[~inserted[order]], -surplus),
    ):
        kinds[places[groups.cumcount(places) < left[groups.of[places]]]] = kind
    keep = kinds >= 0
    return rows.filter(keep).with_kinds(kinds[keep])


def filled(rows: ChangeRows, group: Codes) -> ChangeRows:
    """Fill in unchanged TOAST values from earlier changes of the group, inside which the order is known."""
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
    for name in pc.unique(names).to_pylist():
        if not _has_column(table, name):
            continue
        entries = pc.equal(names, name).to_numpy(zero_copy_only=False)
        unknown = np.zeros(len(rows), bool)
        unknown[parents[entries]] = True
        source = lifetimes.sources(unknown)
        incomplete = lifetimes.incomplete(unknown & (source < 0))
        if incomplete is not None:
            raise unknown_value(rows, incomplete, name)
        table = _with_values_from(table, name, np.where(source < 0, np.arange(len(rows)), source))
        remaining[entries] = source[parents[entries]] < 0
    sizes = np.bincount(parents[remaining], minlength=len(rows))
    field = table.schema.field(path[0])
    remaining_names = lists_of(names.filter(pa.array(remaining)), sizes).cast(field.type)
    table = table.set_column(path[0], field, remaining_names)
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

    def sources(self, unknown: Mask) -> Numbers:
        """Return for each row the latest row that has the value; -1 if there is none."""
        order = self._order
        latest = np.maximum.accumulate(np.where(unknown[order], -1, self._places))
        sources = np.full(len(order), -1)
        sources[order] = np.where(latest >= self._begin, order[latest], -1)
        return sources

    def incomplete(self, unknown: Mask) -> int | None:
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


def _with_values_from(table: pa.Table, name: str, places: Numbers) -> pa.Table:
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
