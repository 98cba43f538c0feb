"""What a Python worker of Spark's has imported is no garbage.

Before a worker takes its next task it looks for garbage among everything it holds (pyspark/daemon.py, Spark 4.2 and 4.3). With
Arrow and pandas that takes 40 ms and more, since a worker that was forked copies the pages it looks at, and the next
micro-batch waits for it.
"""

from __future__ import annotations

import gc
from functools import cache

from pyspark import TaskContext


def spare_imports() -> None:
    """Let the collector of this worker look only at what comes from now on; elsewhere than in a task nothing happens."""
    if TaskContext.get() is not None:
        _freeze()


@cache
def _freeze() -> None:
    gc.freeze()
