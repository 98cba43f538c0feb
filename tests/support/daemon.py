"""Spark's daemon for Python workers, which imports beforehand what most workers need.

The workers are forked from it, so each starts half a second faster. Spark runs it as
``python -m tests.support.daemon WORKER_MODULE``.
"""

from __future__ import annotations

import gc
import importlib
import sys
from contextlib import suppress

PRELOADED = ("pandas", "pyarrow.compute", "penstock.spark.queue_writers", "penstock.changes.stage")


def main() -> None:
    if sys.argv[1] == "pyspark.worker":
        for name in PRELOADED:
            # Without a module, the workers themselves report that it is missing.
            with suppress(ImportError):
                importlib.import_module(name)
    from pyspark import daemon

    # A worker collects garbage after each task. Traversing all that is imported here would take longer than
    # most tasks.
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
