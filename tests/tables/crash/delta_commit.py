"""Commits changes to a Delta table, without Spark, and kills itself at a moment of the commit.

Arguments: the folder of the table, the type of its history, and the moment.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.tables.delta.applied_table import AppliedTable
from penstock.tables.delta.changes_writer import ChangesWriter
from tests.tables.delta.driver import SECOND, Driver


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, scd_type: str, moment: str) -> None:
    commit, remember = ChangesWriter._commit, AppliedTable.record

    def committing(self: ChangesWriter, *arguments: Any) -> None:
        if moment == "STAGED":
            die()
        commit(self, *arguments)
        die()

    def remembering(self: AppliedTable, *arguments: Any) -> int:
        version = remember(self, *arguments)
        if moment == "REMEMBERED":
            die()
        return version

    ChangesWriter._commit, AppliedTable.record = committing, remembering  # type: ignore[method-assign]  # of this process
    Driver(Path(folder), int(scd_type)).apply(1, SECOND)


if __name__ == "__main__":
    main(*sys.argv[1:])
