"""Check whether an Iceberg table was rolled back or replaced after a commit.

A rollback does not restore table properties, so they name the snapshot that was committed with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.table.snapshots import ancestors_of

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot


def is_rolled_back(metadata: TableMetadata, snapshot_id: int, number: int) -> bool:
    """Whether the current snapshot is neither the given one nor one of its descendants.

    If too many snapshots have expired to decide this, the table counts as not rolled back.

    Parameters
    ----------
    number
        The sequence number of the given snapshot, which may have expired.
    """
    last: Snapshot | None = None
    for last in ancestors_of(metadata.current_snapshot(), metadata):
        if last.snapshot_id == snapshot_id:
            return False
        if (last.sequence_number or 0) < number:
            return True
    if last is None:
        return True
    # The oldest ancestor that is left may have no parent because it replaced the table (CREATE OR REPLACE
    # TABLE), or because its parent has expired, after which pyiceberg removes the parent's id.
    return metadata.snapshot_by_id(snapshot_id) is not None and _begins_a_table(last)


def _begins_a_table(snapshot: Snapshot) -> bool:
    if snapshot.parent_snapshot_id is not None or snapshot.summary is None:
        return False
    total, added = (snapshot.summary[name] for name in ("total-data-files", "added-data-files"))
    return total is not None and total == added
