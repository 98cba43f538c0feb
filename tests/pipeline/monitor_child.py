"""Program: run queries of a folder's store until it is killed.

Arguments: a folder for Spark, the store's URL, and a folder for checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path

import penstock
from tests.support.sparks import make_spark


def main(folder: str, url: str, checkpoints: str) -> None:
    spark = make_spark(Path(folder))
    triggers = {
        "batches": penstock.Trigger.processing_time("100 milliseconds"),
        "epochs": penstock.Trigger.continuous("50 ms"),
    }
    for name, trigger in triggers.items():
        stream = penstock.stream(spark, penstock.QueueSource("in", name, url))
        stream.write(penstock.QueueSink("out", url)).start(
            name=name, checkpoint=Path(checkpoints) / name, trigger=trigger
        )
    print("STARTED", flush=True)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
