"""Compaction of a Delta table, by deltalake."""

from __future__ import annotations

from penstock.lake.storage import DeltaPlace, import_deltalake
from penstock.tables.compaction import TableCompaction, attempts_exhausted_error, table_not_found_error
from penstock.tables.delta.schema import require_partitioning
from penstock.tables.delta.transactions import committing

_ATTEMPTS = 10


def compact(place: DeltaPlace, file_bytes: int) -> TableCompaction:
    """Compact the small files of each partition, until at most one is left."""
    conflict = import_deltalake("deltalake.exceptions").CommitFailedError
    last_conflict = ""
    for _ in range(_ATTEMPTS):
        table = place.find()
        if table is None:
            raise table_not_found_error(f"Delta table {place.shown}", place.shown)
        require_partitioning(place, table)
        try:
            with committing(place):
                metrics = table.optimize.compact(target_size=file_bytes)
        except conflict as error:
            last_conflict = place.message(error)
        else:
            removed, added = metrics["numFilesRemoved"], metrics["numFilesAdded"]
            return TableCompaction(removed, added, 1 if removed else 0)
    raise attempts_exhausted_error(f"the Delta table {place.shown}", place.shown, _ATTEMPTS, last_conflict)
