"""Rows to remove from their files, at positions that a lookup has found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.lake.deletion_vectors import Positions
from penstock.tables.changes.merge_plan import numbered
from penstock.tables.changes.wanted_keys import WantedKeys
from penstock.tables.columns import VALID_TO
from penstock.tables.delta.leaving_rows import KnownRows, Leaving
from penstock.tables.delta.lookups import POSITION, Found
from penstock.tables.delta.stored_files import Stored

_ROW, _OTHER = "_penstock_row", "_penstock_other"


def rows_with_keys(found: Sequence[Found], keys: pa.Table) -> KnownRows:
    """Return the found rows that have one of the keys."""
    wanted = WantedKeys(keys)
    leaving = [
        (file, Leaving(_positions(rows.take(pa.array(wanted.places_in(rows.select(keys.column_names)))))))
        for file, rows in found
    ]
    return _known([(file, each) for file, each in leaving if len(each.positions)])


def rows_with_new_ends(found: Sequence[Found], changed: pa.Table) -> KnownRows:
    """Return the found rows whose end of validity changes, and which are stored again with the new end.

    ``changed`` has their keys, ``VALID_FROM`` and the new ``VALID_TO``.
    """
    if not changed.num_rows:
        return _known([])
    names = [name for name in changed.column_names if name != VALID_TO]
    counts = np.cumsum([0, *(rows.num_rows for _, rows in found)])
    left = numbered(pa.concat_tables([rows.select(names) for _, rows in found]), _ROW)
    right = numbered(changed.select(names), _OTHER)
    both = left.join(right, keys=names, join_type="inner").sort_by(_ROW)
    places, ends = both[_ROW].to_numpy(), changed[VALID_TO].take(both[_OTHER])
    limits = np.searchsorted(places, counts)
    leaving = []
    for (file, rows), start, low, high in zip(found, counts, limits, limits[1:], strict=False):
        if low < high:
            leaves = rows.take(pa.array(places[low:high] - start))
            values = leaves.select(names).append_column(VALID_TO, ends.slice(low, high - low))
            leaving.append((file, Leaving(_positions(leaves), values)))
    return _known(leaving)


def _known(leaving: Sequence[tuple[Stored, Leaving]]) -> KnownRows:
    return KnownRows([file for file, _ in leaving], {file.identity: each for file, each in leaving})


def _positions(rows: pa.Table) -> Positions:
    positions: Positions = rows[POSITION].to_numpy()
    return positions
