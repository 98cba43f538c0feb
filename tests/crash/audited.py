"""Program: run one query from a queue into a keyed queue or a table until it is asked to stop, or killed.

Arguments: a folder for Spark, and the query as JSON. With SIGUSR1 it says where its threads are.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import penstock
from tests.support.sparks import make_spark
from tests.support.warm import warm_workers

SOURCE, SINK, CONSUMER = "source", "sink", "billing"
MICRO_BATCH, CONTINUOUS = "micro-batch", "continuous"


@dataclass(frozen=True)
class Query:
    """What a driver runs."""

    url: str
    guarantee: str
    engine: str
    table: str | None
    """The name of the table to write to; None for the keyed queue."""
    checkpoint: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def trigger(self) -> penstock.Trigger:
        if self.engine == CONTINUOUS:
            return penstock.Trigger.continuous("100 ms")
        return penstock.Trigger.processing_time("200 milliseconds")


def main(folder: str, text: str) -> None:
    faulthandler.register(signal.SIGUSR1)
    began = time.monotonic()
    query = Query(**json.loads(text))
    with warm_workers():
        spark = make_spark(Path(folder))
    sink = (
        penstock.QueueSink(SINK, query.url)
        if query.table is None
        else penstock.TableSink(query.table, url=query.url)
    )
    try:
        stream = penstock.stream(spark, penstock.QueueSource(SOURCE, CONSUMER, query.url))
        pipeline = stream.write(sink, guarantee=query.guarantee)
        running = pipeline.start(checkpoint=query.checkpoint, name="audited", trigger=query.trigger)
        print(f"STARTED after {time.monotonic() - began:.1f} s", flush=True)
        running.awaitTermination()
    except Exception as error:
        print(f"FAILED {type(error).__name__} {error}", flush=True)
        # As a program that an error ends, and without waiting for a JVM that may be in any state.
        os._exit(1)
    print("ENDED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
