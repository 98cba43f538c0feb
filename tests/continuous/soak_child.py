"""Program that runs continuous copies like ``tests.continuous.child``, and prints the JVM's live heap.

Arguments: the seconds between two measurements of the heap, and then those of ``tests.continuous.child``.
With ``idle`` instead of the seconds, it measures nothing, prints READY, and starts its queries on SIGUSR1.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

from pyspark import SparkContext

from tests.continuous import child
from tests.support.sparks import make_spark


def main(seconds: str, *arguments: str) -> None:
    if seconds == "idle":
        start_on_signal(*arguments)
    else:
        threading.Thread(target=print_heap, args=[float(seconds)], daemon=True).start()
        child.main(*arguments)


def start_on_signal(folder: str, master: str, *copies: str) -> None:
    spark = make_spark(Path(folder), master)
    # Run a job first, so that the measurement includes all that jobs start, such as Python workers.
    spark.range(2).mapInArrow(lambda batches: batches, "id bigint").collect()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("READY", flush=True)
    signal.sigwait({signal.SIGUSR1})
    child.main(folder, master, *copies)


def print_heap(seconds: float) -> None:
    while True:
        time.sleep(seconds)
        jvm = SparkContext._jvm
        if jvm is not None:
            runtime = jvm.java.lang.Runtime.getRuntime()
            runtime.gc()
            print(f"HEAP {time.monotonic()} {runtime.totalMemory() - runtime.freeMemory()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
