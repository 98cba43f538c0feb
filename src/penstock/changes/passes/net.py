"""What is left of several changes of one row: the difference between before the first and after the last."""

from __future__ import annotations

import numpy as np

from penstock.changes.passes.rows import IS_DELETE, IS_INSERT, IS_POSTIMAGE, IS_PREIMAGE, ChangeRows, Groups
from penstock.spark.factorize import Codes


def net(rows: ChangeRows, group: Codes, *, updates: bool) -> ChangeRows:
    """One change, or the two rows of an update, for each group of changes of one row; nothing where it was made and lost.

    Parameters
    ----------
    rows
        Change rows whose order inside a group is known.
    group
        The number of each row's group.
    updates
        Whether an update comes as pre-image and post-image, rather than as delete and insert.

    The table of first and last change is Spark 4.3's: a row that was there before shows as its first change shows it, a row
    that is there afterwards as its last one does. A group that begins with a post-image is of a feed that gives none of what
    was there before: the row was there, and nobody knows how. What is left of it then is a post-image alone, or the delete.
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
    """As many inserts or deletes of each group as it has more of one than of the other.

    For rows that are equal where their row ids are: it does not matter which of them came or went, only how many did. The last
    inserts are left, or the first deletes.

    Parameters
    ----------
    rows
        Change rows.
    group
        The number of each row's group.
    """
    groups = Groups(group)
    order = np.lexsort(rows.order)
    come = np.isin(rows.kinds, (IS_INSERT, IS_POSTIMAGE))
    more = groups.counts(come) - groups.counts(~come)
    kinds = np.full(len(rows), -1, np.int8)
    for kind, places, left in (
        (IS_INSERT, order[come[order]][::-1], more),
        (IS_DELETE, order[~come[order]], -more),
    ):
        kinds[places[groups.ranks(places) < left[groups.of[places]]]] = kind
    keep = kinds >= 0
    return rows.filter(keep).with_kinds(kinds[keep])
