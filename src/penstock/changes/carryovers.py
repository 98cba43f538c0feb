"""Rows that did not change, which copy-on-write tables give as a delete and an insert."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.changes.groups import Groups
from penstock.changes.rows import IS_DELETE, IS_INSERT, ChangeRows
from penstock.changes.violations import check_same_data


def changed(rows: ChangeRows) -> Any:
    """The mask of the rows that are left when each delete has cancelled an insert of the same content.

    The two are of one row and one commit, and have the same row version, or without one the same data. Spark 4.3 drops a
    pair only where it is alone; here pairs are counted, so it does not matter how many of them meet, nor whether they do
    so in one step or in several.

    Raises
    ------
    ChangelogContractViolation
        When it is not clear which of several rows a delete or an insert cancels.
    """
    deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
    groups = Groups(rows.content)
    many_deletes, many_inserts = groups.counts(deletes), groups.counts(inserts)
    pairs = np.minimum(many_deletes, many_inserts)
    even = many_deletes == many_inserts
    gone = groups.holding(even) & (deletes | inserts)
    uneven = ~even & (pairs > 0)
    if uneven.any():
        for mask in (deletes, inserts):
            places = np.flatnonzero(groups.holding(uneven) & mask)
            check_same_data(rows, places)
            gone[places[groups.ranks(places) < pairs[groups.of[places]]]] = True
    return ~gone
