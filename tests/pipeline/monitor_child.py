"""Program: run queries of a folder's store until it is killed.

Arguments: a folder for Spark, the store's URL, and a folder for checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path

import penstock as ps
from tests.support.sparks import make_spark


def main(folder: str, url: str, checkpoints: str) -> None:
    spark = make_spark(Path(folder))
    triggers = {
        "batches": ps.Trigger.processing_time("100 milliseconds"),
        "epochs": ps.Trigger.continuous("50 ms"),
    }
    for name, trigger in triggers.items():
        stream = ps.stream(spark, ps.QueueSource("in", name, url))
        stream.write(ps.QueueSink("out", url)).start(
            name=name, checkpoint=Path(checkpoints) / name, trigger=trigger
        )
    print("STARTED", flush=True)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
