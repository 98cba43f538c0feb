"""What is left of several changes of one row: the difference between before the first and after the last."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.changes.rows import (
    IS_DELETE,
    IS_INSERT,
    IS_POSTIMAGE,
    IS_PREIMAGE,
    ChangeRows,
)


def net(rows: ChangeRows, group: Any, *, updates: bool) -> ChangeRows:
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
    that is there afterwards as its last one does.
    """
    if not len(rows):
        return rows
    order = np.lexsort([*rows.order, group])
    ends = np.flatnonzero(group[order][1:] != group[order][:-1])
    first, last = order[np.r_[0, ends + 1]], order[np.r_[ends, len(order) - 1]]
    before = np.isin(rows.kinds[first], (IS_DELETE, IS_PREIMAGE))
    after = np.isin(rows.kinds[last], (IS_INSERT, IS_POSTIMAGE))
    kinds = np.full(len(rows), -1, np.int8)
    kinds[first[before]] = np.where(updates & after[before], IS_PREIMAGE, IS_DELETE)
    kinds[last[after]] = np.where(updates & before[after], IS_POSTIMAGE, IS_INSERT)
    keep = kinds >= 0
    return rows.filter(keep).with_kinds(kinds[keep])
