"""Compaction of a Delta table, by deltalake."""

from __future__ import annotations

from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.tables.compaction import TableCompaction, attempts_exhausted_error, table_not_found_error
from penstock.tables.delta.schema import require_partitioning
from penstock.tables.delta.transactions import committing

_ATTEMPTS = 10


def compact(location: DeltaLocation, file_bytes: int) -> TableCompaction:
    """Compact the small files of each partition, until at most one is left."""
    conflict = import_deltalake("deltalake.exceptions").CommitFailedError
    last_conflict = ""
    for _ in range(_ATTEMPTS):
        table = location.find()
        if table is None:
            raise table_not_found_error(f"Delta table {location.label}", location.label)
        require_partitioning(location, table)
        try:
            with committing(location):
                metrics = table.optimize.compact(target_size=file_bytes)
        except conflict as error:
            last_conflict = location.message(error)
        else:
            removed, added = metrics["numFilesRemoved"], metrics["numFilesAdded"]
            return TableCompaction(removed, added, 1 if removed else 0)
    raise attempts_exhausted_error(
        f"the Delta table {location.label}", location.label, _ATTEMPTS, last_conflict
    )
