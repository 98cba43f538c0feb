"""Spark's daemon for Python workers, with what most of them import.

They are forked then, so each starts with half a second less work. Spark runs it as
``python -m tests.support.daemon WORKER_MODULE``.
"""

from __future__ import annotations

import gc
import importlib
import sys
from contextlib import suppress

USUAL = ("pandas", "pyarrow.compute", "penstock.spark.queue_writers", "penstock.changes.stage")


def main() -> None:
    if sys.argv[1] == "pyspark.worker":
        for name in USUAL:
            # A Python without them has workers that say so themselves.
            with suppress(ImportError):
                importlib.import_module(name)
    from pyspark import daemon

    # A worker collects garbage after each task; what is imported here is none, and looking at it would take
    # longer than most tasks.
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
