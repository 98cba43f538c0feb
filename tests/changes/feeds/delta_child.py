"""Streams a Delta feed into a queue, one commit at a time, until it has come to the end. Killed by its parent, mostly.

Arguments: a folder for Spark, the table, the store's URL, and the checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import penstock as ps
from penstock.changes.feeds.delta import DeltaFeed
from tests.support.sparks import make_spark


def main(folder: str, table: str, url: str, checkpoint: str) -> None:
    spark = make_spark(Path(folder))
    frame = ps.changes.read_stream(spark, DeltaFeed(table, "id"), options={"maxCommitsPerTrigger": 1})
    rows = frame.selectExpr("id", "_change_type as change", "_commit_version as version")
    query = (
        ps.stream(spark, rows)
        .write(ps.QueueSink("out", url=url), guarantee="exactly_once")
        .start(checkpoint=checkpoint, trigger=ps.Trigger.available_now())
    )
    query.awaitTermination()
    print("ENDED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
