"""Program: run continuous copies as ``tests.continuous.child`` does, and print the JVM's live heap at
intervals.

Arguments: seconds between two measurements of the heap, then those of the other one. With ``rest`` before
them it prints READY first, and starts its queries when it gets SIGUSR1.
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


def main(seconds: str, *others: str) -> None:
    if seconds == "rest":
        rest(*others)
    else:
        threading.Thread(target=tell_heap, args=[float(seconds)], daemon=True).start()
        child.main(*others)


def rest(folder: str, master: str, *texts: str) -> None:
    spark = make_spark(Path(folder), master)
    # With everything that a job brings with it, Python workers included.
    spark.range(2).mapInArrow(lambda batches: batches, "id bigint").collect()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("READY", flush=True)
    signal.sigwait({signal.SIGUSR1})
    child.main(folder, master, *texts)


def tell_heap(seconds: float) -> None:
    while True:
        time.sleep(seconds)
        jvm = SparkContext._jvm
        if jvm is not None:
            runtime = jvm.java.lang.Runtime.getRuntime()
            runtime.gc()
            print(f"HEAP {time.monotonic()} {runtime.totalMemory() - runtime.freeMemory()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
