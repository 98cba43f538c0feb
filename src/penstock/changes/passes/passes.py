"""The passes over change rows: which ones a contract and the options need, and how each works.

Carry-over rows are unchanged rows, which copy-on-write tables write as a delete and an insert. Net changes
combine several changes of one row into the difference between its first and last state.
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
    """Net changes of the whole range (EVER), of each commit (COMMIT), or of windows of N microseconds."""
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
        needs_net = options.net_changes and contract.intermediate_changes
        return cls(
            carryovers=options.drop_carryovers and contract.carryover_rows,
            updates=options.compute_updates and contract.updates_as_delete_and_insert,
            net=options.net_window if needs_net else None,
            compute_updates=options.compute_updates,
            ordered=contract.sequence is not None,
            intermediate=contract.intermediate_changes,
        )

    def run_on_part(self, rows: ChangeRows) -> ChangeRows:
        """Run the passes that work on any part of the rows, before the shuffle."""
        # If changes have an order, all of them are needed to decide which of several equal rows remain.
        partly = self.carryovers and not self.ordered
        return rows.filter(without_carryovers(rows, partial=True)) if partly else rows

    def run(self, rows: ChangeRows) -> ChangeRows:
        """Run all passes; ``rows`` has all changes of each row in a commit, or in a net window."""
        if rows.layout.repeats:
            rows = rows.filter(first_deliveries(rows))
        if self.carryovers:
            rows = rows.filter(without_carryovers(rows))
        if rows.layout.keyless:
            # Rows with equal ids are equal, so there are no updates, and the order does not matter.
            return rows if self.net is None else net_counts(rows, self._windows(rows))
        if self.updates and self.net is None:
            return self._with_updates(rows)
        if self.net is not None:
            self._check_order(rows)
            windows = self._windows(rows)
            return net_changes(with_unchanged_values(rows, windows), windows, updates=self.compute_updates)
        if not self.intermediate:
            check_single(rows, asks_for_sequence=False)
        return rows

    def _with_updates(self, rows: ChangeRows) -> ChangeRows:
        self._check_order(rows)
        if self.ordered:
            return net_changes(rows, rows.change, updates=True)
        deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
        groups = rows.changes
        pairs = groups.per_row((groups.counts(deletes) == 1) & (groups.counts(inserts) == 1))
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
    """Return the mask of the first delivery of each change; refuse repeated deliveries that differ from it.

    A version has at most one change of a row with one sequence, or the two rows of an update. If a snapshot
    is read again, its rows have a later time, so the first delivery is the one with the earliest time.
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


def without_carryovers(rows: ChangeRows, *, partial: bool = False) -> Mask:
    """Return the mask of the rows that remain after each delete cancels an insert with the same content.

    A pair that cancels belongs to one row and one commit, and has the same row version, or the same data if
    there is no row version. Spark 4.3 drops a pair only if the row has no other change in the commit; here
    any number of pairs cancels, in one step or several.

    If the rows are only part of a commit (``partial``), only rows that are equal in all data cancel. If a
    content has more deletes than inserts, or fewer, its rows remain for a later step.
    """
    deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
    groups = rows.changes
    delete_counts, insert_counts = groups.counts(deletes), groups.counts(inserts)
    cancelled_rows = np.zeros(len(rows), bool)
    # Most commits have at most one delete and one insert of a row, which are compared directly.
    single = np.flatnonzero((delete_counts == 1) & (insert_counts == 1))
    if len(single):
        delete_places, insert_places = groups.places(deletes)[single], groups.places(inserts)[single]
        content = factorize(rows.columns(rows.layout.content)).values
        equal = content[delete_places] == content[insert_places]
        delete_places, insert_places = delete_places[equal], insert_places[equal]
        if partial and rows.layout.content != rows.layout.data:
            known = (*rows.layout.row_id, rows.layout.row_version)
            others = [path for path in rows.layout.data if path not in known]
            same = rows_equal(rows.columns(others), delete_places, insert_places)
            delete_places, insert_places = delete_places[same], insert_places[same]
        cancelled_rows[delete_places] = cancelled_rows[insert_places] = True
    is_several = (delete_counts > 0) & (insert_counts > 0) & (delete_counts + insert_counts > 2)
    if is_several.any():
        _cancel(rows, np.flatnonzero(groups.per_row(is_several)), cancelled_rows, partial)
    return ~cancelled_rows


def _cancel(rows: ChangeRows, chosen: Numbers, cancelled_rows: Mask, partial: bool) -> None:
    """Cancel pairs of a delete and an insert with equal content among the chosen rows, by counting them."""
    chosen_rows = ChangeRows(rows.table.take(pa.array(chosen)), rows.layout)
    deletes, inserts = chosen_rows.kinds == IS_DELETE, chosen_rows.kinds == IS_INSERT
    groups = Groups.by(chosen_rows.content)
    delete_counts, insert_counts = groups.counts(deletes), groups.counts(inserts)
    pairs = np.minimum(delete_counts, insert_counts)
    even = delete_counts == insert_counts
    cancelled = groups.per_row(even) & (deletes | inserts)
    if partial:
        cancelled_rows[chosen[cancelled & _in_equal_groups(chosen_rows, groups, deletes | inserts)]] = True
        return
    cancelled_rows[chosen[cancelled]] = True
    uneven = ~even & (pairs > 0)
    if not uneven.any():
        return
    # The first deletes and the last inserts remain.
    order = np.lexsort(chosen_rows.order)
    for mask, places in ((deletes, order[::-1]), (inserts, order)):
        places = places[(groups.per_row(uneven) & mask)[places]]
        check_same_data(chosen_rows, places)
        cancelled_rows[chosen[places[groups.cumcount(places) < pairs[groups.of[places]]]]] = True


def _in_equal_groups(rows: ChangeRows, groups: Groups, selected: Mask) -> Mask:
    """Return the mask of the groups in which all selected rows have equal data."""
    data_groups = Groups.by(combine_codes(rows.content, factorize(rows.columns(rows.layout.data))))
    equal: Mask = data_groups.per_row(data_groups.counts(selected)) == groups.per_row(groups.counts(selected))
    return equal


def net_changes(rows: ChangeRows, group: Codes, *, updates: bool) -> ChangeRows:
    """Return the net change of each group: one change, the two rows of an update, or nothing.

    The order inside a group has to be known. The rules are those of Spark 4.3: if the row existed before the
    group, the net change has the image of the first change; if it exists afterwards, that of the last change.
    A group that begins with a post-image comes from a feed without pre-images, so the state of the row before
    is unknown. Its net change is only a post-image, or the delete. With ``updates``, an update is a pre-image
    and a post-image instead of a delete and an insert.
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


def net_counts(rows: ChangeRows, group: Codes) -> ChangeRows:
    """Return the surplus of inserts over deletes, or of deletes over inserts, of each group.

    This is for rows whose data is equal if their row ids are: only the number of inserts and deletes matters.
    The last inserts remain, or the first deletes.
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


def with_unchanged_values(rows: ChangeRows, group: Codes) -> ChangeRows:
    """Fill in unchanged TOAST values from earlier changes of the group, whose order has to be known."""
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
    """The ordered changes of each group, divided into lifetimes of the row, each begun by an insert."""

    def __init__(self, rows: ChangeRows, group: Codes) -> None:
        self._kinds = rows.kinds
        order, changes = rows.in_groups(group)
        self._order = order
        begins = changes | (rows.kinds[order] == IS_INSERT)
        self._places = np.arange(len(order))
        self._begin = np.maximum.accumulate(np.where(begins, self._places, 0))
        self._last = np.flatnonzero(np.r_[changes[1:], True])

    def sources(self, unknown: Mask) -> Numbers:
        """Return for each row the latest row of its lifetime that has the value; -1 if there is none."""
        order = self._order
        latest = np.maximum.accumulate(np.where(unknown[order], -1, self._places))
        sources = np.full(len(order), -1)
        sources[order] = np.where(latest >= self._begin, order[latest], -1)
        return sources

    def incomplete(self, unknown: Mask) -> int | None:
        """Return a row that was inserted in its group, exists at its end, and lacks the value."""
        order, last = self._order, self._last
        exists = np.isin(self._kinds[order[last]], (IS_INSERT, IS_POSTIMAGE))
        inserted = self._kinds[order[self._begin[last]]] == IS_INSERT
        rows = order[last[exists & inserted & unknown[order[last]]]]
        return int(rows[0]) if len(rows) else None


def _has_column(table: pa.Table, name: str) -> bool:
    """Whether the table, or one of its structs, has a column with this name."""
    structs = (field.type for field in table.schema if pat.is_struct(field.type))
    return name in table.column_names or any(kind.get_field_index(name) >= 0 for kind in structs)


def _with_values_from(table: pa.Table, name: str, places: Numbers) -> pa.Table:
    """Take the values of a column from other rows; it is a column of the table, or a field of its structs."""
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
