"""Updates a few rows of a large Delta file, without Spark, and kills itself at a moment of the commit.

Arguments: the folder of the table, and the moment.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.lake import new_files
from penstock.tables.delta import copy_on_write, log_commit, vectors
from tests.tables.delta.row_queries import RowQuery
from tests.tables.delta.vectors import ENABLED, create

SCHEMA = pa.schema([("a", pa.int64()), ("v", pa.int64())])
MOMENTS = ("MARKED", "UNFINISHED", "LINKED", "CHECKPOINT")
"""After a vector is written, before and after the commit has its name, and in the checkpoint after it."""
_ROWS = 100


def large_table(folder: Path) -> None:
    """Create a table with one file, whose next commit but one writes a checkpoint."""
    create(folder, SCHEMA, ENABLED | {"delta.checkpointInterval": "3"})
    _query(folder).write(0, pa.table({"a": range(_ROWS), "v": [0] * _ROWS}, SCHEMA))


def update(folder: Path, batch_id: int) -> None:
    """Set a few rows to the number of the micro-batch."""
    _query(folder).write(batch_id, pa.table({"a": [batch_id, 50], "v": [batch_id] * 2}, SCHEMA))


def rows_after(batch_id: int) -> list[tuple[int, int]]:
    """The rows that the table then has, sorted as they are shown."""
    rows = dict.fromkeys(range(_ROWS), 0)
    for number in range(1, batch_id + 1):
        rows |= {number: number, 50: number}
    return sorted(rows.items(), key=repr)


def _query(folder: Path) -> RowQuery:
    return RowQuery(folder, SCHEMA, "update", ["a"])


def main(folder: str, moment: str) -> None:
    # As if the table's file was large, and its vector too.
    vectors._MIN_FILE_BYTES, vectors._INLINE_BYTES = 0, 0

    def dying(module: Any, name: str, *, after: bool) -> None:
        function = getattr(module, name)

        def die(*arguments: Any) -> None:
            if after:
                function(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, die)

    if moment == "MARKED":
        dying(copy_on_write, "write_vector", after=True)
    elif moment == "CHECKPOINT":
        dying(log_commit, "_checkpoint_if_due", after=False)
    else:
        dying(new_files.os, "link", after=moment == "LINKED")
    update(Path(folder), 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
