"""Program that runs continuous copies of queues until it is killed or asked to stop.

Arguments: a folder, the Spark master, and one JSON array for each copy: its name, store URL, guarantee, and
the target table, or null if the target is a queue.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import penstock
from tests.support.copies import filter_and_double
from tests.support.sparks import make_spark

INTERVAL = os.environ.get("INTERVAL", "20 ms")


def main(folder: str, master: str, *copies: str) -> None:
    faulthandler.register(signal.SIGUSR1)
    spark = make_spark(Path(folder), master)
    queries = []
    for copy in copies:
        name, url, guarantee, table = json.loads(copy)
        sink = penstock.QueueSink(name, url) if table is None else penstock.TableSink(table, url=url)
        stream = penstock.stream(spark, penstock.QueueSource(f"{name} in", name, url)).transform(
            filter_and_double
        )
        pipeline = stream.write(sink, guarantee=guarantee)
        checkpoint = Path(folder).parent / name
        queries.append(
            pipeline.start(checkpoint=checkpoint, name=name, trigger=penstock.Trigger.continuous(INTERVAL))
        )
    print("STARTED", flush=True)
    for query in queries:
        try:
            query.awaitTermination()
        except Exception as error:
            print(f"FAILED {query.name} {error}", flush=True)
        else:
            print(f"ENDED {query.name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
