"""Applies a micro-batch of changes to a Delta table, without Spark, and kills itself around the commit of the
record of keys.

Arguments: the folder of the table, the type of its history, how rows are changed, the number of the
micro-batch, and the moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from penstock.tables.delta import lookups, vectors
from penstock.tables.delta.applied_table import AppliedTable
from penstock.tables.delta.changes_commit import ChangesCommit
from penstock.tables.delta.changes_writer import ChangesWriter
from tests.tables.crash.record_batches import BATCHES
from tests.tables.delta.driver import Driver

WAYS = ("deltalake", "copies", "vectors")
MOMENTS: dict[str, list[tuple[object, str]]] = {
    "CREATED": [(AppliedTable, "prepare")],
    "UNNAMED": [(AppliedTable, "set_version_in")],
    "WRITTEN": [(AppliedTable, "record")],
    "RESTORED": [(DeltaTable, "restore")],
    "RECORDED": [(AppliedTable, "record")],
    "COMMITTED": [(ChangesCommit, "__call__"), (ChangesWriter, "_merge")],
}
"""The functions that it dies before or after: before the record of a new table, and before the table names
it; before anything is recorded, after a record that does not count was taken back, and between the commits of
the record and of the table; and after both.
"""
_BEFORE = ("CREATED", "UNNAMED", "WRITTEN")


def any_size(way: str) -> None:
    """Have a driver change rows in one way, as if each file was large enough for it."""
    Driver.by_tasks, Driver.by_vectors = way != "deltalake", way == "vectors"
    vectors._MIN_FILE_BYTES, vectors._MAX_DELETED_SHARE, lookups._DRIVER_BYTES = 0, 0.6, -1


def die(place: object, name: str, *, after: bool) -> None:
    """Have this process killed before or after a function."""
    function: Callable[..., Any] = getattr(place, name)

    @wraps(function)
    def dying(*arguments: Any, **options: Any) -> None:
        if after:
            function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    is_static = isinstance(vars(place)[name], staticmethod)
    setattr(place, name, staticmethod(dying) if is_static else dying)


def main(folder: str, scd_type: str, way: str, batch_id: str, moment: str) -> None:
    any_size(way)
    for place, name in MOMENTS[moment]:
        die(place, name, after=moment not in _BEFORE)
    Driver(Path(folder), int(scd_type)).apply(int(batch_id), BATCHES[int(batch_id)])


if __name__ == "__main__":
    main(*sys.argv[1:])
