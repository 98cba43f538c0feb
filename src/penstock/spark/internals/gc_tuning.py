"""Garbage collection in Spark's Python workers: imported modules are left out of it.

Before a worker takes its next task it runs a collection over everything it holds (pyspark/daemon.py, Spark 4.2 and 4.3). With
Arrow and pandas that takes 40 ms and more, since a forked worker copies the memory pages that the collector touches, and the next
micro-batch waits for it.
"""

from __future__ import annotations

import gc
from functools import cache

from pyspark import TaskContext


def freeze_imports() -> None:
    """Exclude the objects that this worker holds so far from garbage collection; outside of a task, do nothing."""
    if TaskContext.get() is not None:
        _freeze()


@cache
def _freeze() -> None:
    gc.freeze()
