"""Rows that did not change, which copy-on-write tables give as a delete and an insert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.changes.passes.rows import IS_DELETE, IS_INSERT, ChangeRows, Groups
from penstock.changes.passes.violations import check_same_data
from penstock.spark.factorize import combine_codes, factorize, rows_equal


def changed(rows: ChangeRows, *, partial: bool = False) -> Any:
    """The mask of the rows that are left when each delete has cancelled an insert of the same content.

    Where the rows are only part of those that belong together, only rows that are equal in all data cancel, and those of a
    content that is there unevenly stay: the others will tell.

    The two are of one row and one commit, and have the same row version, or without one the same data. Spark 4.3 drops a
    pair only where it is alone; here pairs are counted, so it does not matter how many of them meet, nor whether they do
    so in one step or in several.

    Raises
    ------
    ChangelogContractViolation
        When it is not clear which of several rows a delete or an insert cancels.
    """
    deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
    groups = rows.changes
    many_deletes, many_inserts = groups.counts(deletes), groups.counts(inserts)
    gone = np.zeros(len(rows), bool)
    # Nearly always a commit has at most one delete and one insert of a row: those need no more than a look at each other.
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
        gone[of_delete] = gone[of_insert] = True
    several = (many_deletes > 0) & (many_inserts > 0) & (many_deletes + many_inserts > 2)
    if several.any():
        _cancel(rows, np.flatnonzero(groups.holding(several)), gone, partial)
    return ~gone


def _cancel(rows: ChangeRows, chosen: Any, gone: Any, partial: bool) -> None:
    """Let deletes and inserts of equal content cancel one by one, among some rows."""
    some = ChangeRows(rows.table.take(pa.array(chosen)), rows.layout)
    deletes, inserts = some.kinds == IS_DELETE, some.kinds == IS_INSERT
    groups = Groups(some.content)
    many_deletes, many_inserts = groups.counts(deletes), groups.counts(inserts)
    pairs = np.minimum(many_deletes, many_inserts)
    even = many_deletes == many_inserts
    cancelled = groups.holding(even) & (deletes | inserts)
    if partial:
        gone[chosen[cancelled & _alike(some, groups, deletes | inserts)]] = True
        return
    gone[chosen[cancelled]] = True
    uneven = ~even & (pairs > 0)
    if not uneven.any():
        return
    # The first deletes and the last inserts are left.
    order = np.lexsort(some.order)
    for mask, places in ((deletes, order[::-1]), (inserts, order)):
        places = places[(groups.holding(uneven) & mask)[places]]
        check_same_data(some, places)
        gone[chosen[places[groups.ranks(places) < pairs[groups.of[places]]]]] = True


def _alike(rows: ChangeRows, groups: Groups, among: Any) -> Any:
    """The mask of the rows in groups whose rows, among those that a mask chooses, are all equal in their data."""
    finer = Groups(combine_codes(rows.content, factorize(rows.columns(rows.layout.data))))
    return finer.holding(finer.counts(among)) == groups.holding(groups.counts(among))
