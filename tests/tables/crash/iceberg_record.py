"""Applies a micro-batch of changes to an Iceberg table, without Spark, and kills itself around the snapshots
of the record of keys and of the table, which one change of the table's metadata makes.

Arguments: the folder of the catalog, the type of the table's history, the number of the micro-batch, and the
moment.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyiceberg.catalog import MetastoreCatalog

from penstock.tables.iceberg.applied_events import AppliedEvents, AppliedEventsChange
from penstock.tables.iceberg.applied_events_writer import AppliedEventsWriter
from penstock.tables.iceberg.transactions import SingleAttemptCatalog
from tests.tables.crash.delta_record import die
from tests.tables.crash.record_batches import BATCHES
from tests.tables.iceberg.changes_driver import ChangesDriver

WAYS = ("copy-on-write", "merge-on-read")
MOMENTS: dict[str, tuple[object, str]] = {
    "CREATED": (AppliedEvents, "_begin"),
    "BEGUN": (SingleAttemptCatalog, "commit_table"),
    "WRITTEN": (AppliedEventsWriter, "change"),
    "RECORDED": (AppliedEventsChange, "commit"),
    "BOTH": (AppliedEventsChange, "properties"),
    "METADATA": (MetastoreCatalog, "_write_metadata"),
    "COMMITTED": (SingleAttemptCatalog, "commit_table"),
}
"""The functions that it dies before or after: before the record of a new table begins, and after; when its
file is written, when its snapshot is in the transaction, when that of the table is too, when a file has the
new metadata, and when the catalog names this file.
"""
_AT_THE_START = ("CREATED", "BEGUN")


def main(folder: str, scd_type: str, batch_id: str, moment: str) -> None:
    after = moment != "CREATED"
    if moment in _AT_THE_START:
        die(*MOMENTS[moment], after=after)
    driver = ChangesDriver(Path(folder), int(scd_type))
    die(*MOMENTS[moment], after=after)
    driver.apply(int(batch_id), BATCHES[int(batch_id)])


if __name__ == "__main__":
    main(*sys.argv[1:])
