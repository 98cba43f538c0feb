"""Net changes: several changes of one row combined into the difference between its first and last state."""

from __future__ import annotations

import numpy as np

from penstock.changes.passes.rows import IS_DELETE, IS_INSERT, IS_POSTIMAGE, IS_PREIMAGE, ChangeRows, Groups
from penstock.spark.factorize import Codes


def net(rows: ChangeRows, group: Codes, *, updates: bool) -> ChangeRows:
    """Return the net change of each group: one change, the two rows of an update, or nothing.

    The table of first and last change is Spark 4.3's: a row that existed before has the image of its first
    change, a row that exists afterwards that of its last change. A group that begins with a post-image is of
    a feed without pre-images: the row existed in an unknown state. Its net change is a post-image alone, or
    the delete.

    Parameters
    ----------
    rows
        Change rows with a known order inside each group.
    group
        The number of each row's group.
    updates
        Whether an update is a pre-image and a post-image, rather than a delete and an insert.
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
    groups = Groups(group)
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
