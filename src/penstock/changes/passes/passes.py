"""The passes that a contract and the options need, and running them on a table.

Carry-overs are unchanged rows, which copy-on-write tables have as a delete and an insert. Net changes combine
several changes of one row into the difference between its first and last state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arrow.arrays import lists_of
from penstock.changes.options import COMMIT, EVER, ChangeOptions
from penstock.changes.passes.rows import ChangeRows, Groups, Mask, Numbers, column_at
from penstock.changes.passes.violations import (
    check_order_known,
    check_repeated,
    check_same_data,
    check_sequence,
    check_single,
    unknown_value,
)
from penstock.feeds.contract import IS_DELETE, IS_INSERT, IS_POSTIMAGE, IS_PREIMAGE, ChangeContract
from penstock.spark.factorize import Codes, combine_codes, factorize, order_codes, rows_equal


@dataclass(frozen=True)
class Passes:
    """The passes to run on change rows; the rules are those of Spark 4.3, without its defects."""

    carryovers: bool = False
    updates: bool = False
    net: int | None = None
    """Net changes of the range (EVER), of commits (COMMIT), or of windows of that many microseconds."""
    compute_updates: bool = False
    ordered: bool = False
    """Whether a column orders the changes of a row inside a commit."""
    intermediate: bool = False

    def __bool__(self) -> bool:
        return self.carryovers or self.updates or self.net is not None

    @property
    def needs_content(self) -> bool:
        """Whether rows are compared by row version or by data."""
        return self.carryovers or (
            self.intermediate and not self.ordered and (self.updates or self.net is not None)
        )

    @classmethod
    def of(cls, contract: ChangeContract, options: ChangeOptions) -> Passes:
        """Select the passes that the feed needs."""
        net_changes = options.net_changes and contract.intermediate_changes
        return cls(
            carryovers=options.drop_carryovers and contract.carryover_rows,
            updates=options.compute_updates and contract.updates_as_delete_and_insert,
            net=options.net_window if net_changes else None,
            compute_updates=options.compute_updates,
            ordered=contract.sequence is not None,
            intermediate=contract.intermediate_changes,
        )

    def first(self, rows: ChangeRows) -> ChangeRows:
        """Run what can be done to any part of the rows, before the shuffle."""
        # If changes have an order, it takes all of them to decide which of several equal ones remains.
        partly = self.carryovers and not self.ordered
        return rows.filter(changed(rows, partial=True)) if partly else rows

    def whole(self, rows: ChangeRows) -> ChangeRows:
        """Run all passes on all changes of each row in a commit, or in a window for net changes."""
        if rows.layout.repeats:
            rows = rows.filter(first_deliveries(rows))
        if self.carryovers:
            rows = rows.filter(changed(rows))
        if rows.layout.keyless:
            # Equal ids mean equal rows: there are no updates, and no order.
            return rows if self.net is None else counted(rows, self._windows(rows))
        if self.updates and self.net is None:
            return self._with_updates(rows)
        if self.net is not None:
            self._check_order(rows)
            windows = self._windows(rows)
            return net(filled(rows, windows), windows, updates=self.compute_updates)
        if not self.intermediate:
            check_single(rows, asks_for_sequence=False)
        return rows

    def _with_updates(self, rows: ChangeRows) -> ChangeRows:
        self._check_order(rows)
        if self.ordered:
            return net(rows, rows.change, updates=True)
        deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
        groups = rows.changes
        pairs = groups.holding((groups.counts(deletes) == 1) & (groups.counts(inserts) == 1))
        kinds = np.where(pairs & deletes, IS_PREIMAGE, np.where(pairs & inserts, IS_POSTIMAGE, rows.kinds))
        return rows.with_kinds(kinds.astype(np.int8))

    def _check_order(self, rows: ChangeRows) -> None:
        if self.ordered:
            check_sequence(rows)
            return
        check_single(rows, asks_for_sequence=self.intermediate)
        if self.intermediate and not self.carryovers:
            check_order_known(rows)

    def _windows(self, rows: ChangeRows) -> Codes:
        if self.net == COMMIT:
            return rows.change
        if self.net == EVER:
            return rows.row
        assert self.net is not None
        times = column_at(rows.table, (rows.layout.timestamp,)).cast(pa.int64()).to_numpy()
        return combine_codes(rows.row, factorize([pa.array(times // self.net)]))


def first_deliveries(rows: ChangeRows) -> Mask:
    """Return the mask of the rows without those that repeat another one; refuse those that differ from it.

    A version has at most one change of a row with one sequence, or the two rows of an update. The rows of a
    snapshot that is read again have another time, so the earliest one counts.
    """
    assert rows.layout.sequence is not None
    after = np.isin(rows.kinds, (IS_INSERT, IS_POSTIMAGE))
    place = factorize([pa.array(after), *rows.columns([rows.layout.sequence])])
    groups = Groups.by(combine_codes(rows.change, place))
    order = np.lexsort([order_codes(column_at(rows.table, (rows.layout.timestamp,))), groups.of])
    _, place_in_order = np.unique(groups.of[order], return_index=True)
    first = order[place_in_order]
    keep = np.zeros(len(rows), bool)
    keep[first] = True
    if not keep.all():
        check_repeated(rows, np.flatnonzero(~keep), first[groups.of[~keep]])
    return keep


def changed(rows: ChangeRows, *, partial: bool = False) -> Mask:
    """Return the mask of the rows that remain when each delete has cancelled an insert of the same content.

    If the rows are only part of a commit, only rows that are equal in all data cancel, and rows of a content
    with uneven counts stay for a later step.

    The two are of one row and one commit, and have the same row version, or without one the same data. Spark
    4.3 drops a pair only if it is the only one; here pairs are counted, so that any number of them cancels,
    in one step or several.
    """
    deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
    groups = rows.changes
    many_deletes, many_inserts = groups.counts(deletes), groups.counts(inserts)
    cancelled_rows = np.zeros(len(rows), bool)
    # Nearly always a commit has at most one delete and one insert of a row, which are compared directly.
    single = np.flatnonzero((many_deletes == 1) & (many_inserts == 1))
    if len(single):
        of_delete, of_insert = groups.places(deletes)[single], groups.places(inserts)[single]
        content = factorize(rows.columns(rows.layout.content)).values
        equal = content[of_delete] == content[of_insert]
        of_delete, of_insert = of_delete[equal], of_insert[equal]
        if partial and rows.layout.content != rows.layout.data:
            known = (*rows.layout.row_id, rows.layout.row_version)
            others = [path for path in rows.layout.data if path not in known]
            same = rows_equal(rows.columns(others), of_delete, of_insert)
            of_delete, of_insert = of_delete[same], of_insert[same]
        cancelled_rows[of_delete] = cancelled_rows[of_insert] = True
    several = (many_deletes > 0) & (many_inserts > 0) & (many_deletes + many_inserts > 2)
    if several.any():
        _cancel(rows, np.flatnonzero(groups.holding(several)), cancelled_rows, partial)
    return ~cancelled_rows


def _cancel(rows: ChangeRows, chosen: Numbers, cancelled_rows: Mask, partial: bool) -> None:
    """Cancel deletes and inserts of equal content one by one, among some rows."""
    some = ChangeRows(rows.table.take(pa.array(chosen)), rows.layout)
    deletes, inserts = some.kinds == IS_DELETE, some.kinds == IS_INSERT
    groups = Groups.by(some.content)
    many_deletes, many_inserts = groups.counts(deletes), groups.counts(inserts)
    pairs = np.minimum(many_deletes, many_inserts)
    even = many_deletes == many_inserts
    cancelled = groups.holding(even) & (deletes | inserts)
    if partial:
        cancelled_rows[chosen[cancelled & _all_equal(some, groups, deletes | inserts)]] = True
        return
    cancelled_rows[chosen[cancelled]] = True
    uneven = ~even & (pairs > 0)
    if not uneven.any():
        return
    # The first deletes and the last inserts remain.
    order = np.lexsort(some.order)
    for mask, places in ((deletes, order[::-1]), (inserts, order)):
        places = places[(groups.holding(uneven) & mask)[places]]
        check_same_data(some, places)
        cancelled_rows[chosen[places[groups.cumcount(places) < pairs[groups.of[places]]]]] = True


def _all_equal(rows: ChangeRows, groups: Groups, among: Mask) -> Mask:
    """Return the mask of the rows in groups whose rows, among the selected ones, all have equal data."""
    finer = Groups.by(combine_codes(rows.content, factorize(rows.columns(rows.layout.data))))
    equal: Mask = finer.holding(finer.counts(among)) == groups.holding(groups.counts(among))
    return equal


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
    remaining_names = lists_of(names.filter(pa.array(remaining)), pa.array(sizes)).cast(field.type)
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
