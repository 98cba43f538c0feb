"""Rows to remove from their data files, at the positions where a lookup found them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.lake.deletion_vectors import Positions
from penstock.tables.changes.lookup_keys import LookupKeys
from penstock.tables.changes.merge_plan import with_row_numbers
from penstock.tables.columns import VALID_TO
from penstock.tables.delta.lookups import POSITION, FoundRows
from penstock.tables.delta.removed_rows import FileRemovals, RemovedAtPositions
from penstock.tables.delta.stored_files import StoredFile

_FOUND_ROW, _UPDATE_ROW = "_penstock_row", "_penstock_other"


def removals_with_keys(found_by_file: Sequence[FoundRows], keys: pa.Table) -> RemovedAtPositions:
    """Return those of the found rows that have one of the keys."""
    lookup_keys = LookupKeys(keys)
    removals = [
        (
            file,
            FileRemovals(
                _positions(rows.take(pa.array(lookup_keys.positions_in(rows.select(keys.column_names)))))
            ),
        )
        for file, rows in found_by_file
    ]
    return _removed_at_positions(
        [(file, file_removals) for file, file_removals in removals if len(file_removals.positions)]
    )


def removals_with_new_valid_to(
    found_by_file: Sequence[FoundRows], ended_versions: pa.Table
) -> RemovedAtPositions:
    """Return those of the found rows whose ``VALID_TO`` changes, with the new value to store them with.

    ``ended_versions`` has their keys, ``VALID_FROM`` and the new ``VALID_TO``.
    """
    if not ended_versions.num_rows:
        return _removed_at_positions([])
    names = [name for name in ended_versions.column_names if name != VALID_TO]
    offsets = np.cumsum([0, *(rows.num_rows for _, rows in found_by_file)])
    found_keys = with_row_numbers(
        pa.concat_tables([rows.select(names) for _, rows in found_by_file]), _FOUND_ROW
    )
    updated_keys = with_row_numbers(ended_versions.select(names), _UPDATE_ROW)
    matched = found_keys.join(updated_keys, keys=names, join_type="inner").sort_by(_FOUND_ROW)
    rows_found, valid_to = matched[_FOUND_ROW].to_numpy(), ended_versions[VALID_TO].take(matched[_UPDATE_ROW])
    limits = np.searchsorted(rows_found, offsets)
    removals = []
    for (file, rows), start, low, high in zip(found_by_file, offsets, limits, limits[1:], strict=False):
        if low < high:
            removed = rows.take(pa.array(rows_found[low:high] - start))
            values = removed.select(names).append_column(VALID_TO, valid_to.slice(low, high - low))
            removals.append((file, FileRemovals(_positions(removed), values)))
    return _removed_at_positions(removals)


def _removed_at_positions(removals: Sequence[tuple[StoredFile, FileRemovals]]) -> RemovedAtPositions:
    return RemovedAtPositions(
        [file for file, _ in removals], {file.identity: file_removals for file, file_removals in removals}
    )


def _positions(rows: pa.Table) -> Positions:
    positions: Positions = rows[POSITION].to_numpy()
    return positions
