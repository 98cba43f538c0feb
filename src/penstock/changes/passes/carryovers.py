"""Carry-over removal: unchanged rows, which copy-on-write tables have as a delete and an insert."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.changes.passes.rows import ChangeRows, Groups, Mask, Numbers
from penstock.changes.passes.violations import check_same_data
from penstock.feeds.contract import IS_DELETE, IS_INSERT
from penstock.spark.factorize import combine_codes, factorize, rows_equal


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
