"""Streams an Iceberg table's changes into a queue, a commit at a time.

Arguments: the feed's URL, the store's, a folder, and whether to go on for ever or to take all that is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import penstock as ps
from tests.support.sparks import make_spark


def main(feed: str, url: str, folder: str, how: str) -> None:
    spark = make_spark(Path(folder) / f"spark-{how}")
    changes = ps.changes.read_stream(
        spark, feed, deduplication_mode="none", options={"maxCommitsPerTrigger": 1}
    )
    trigger = ps.Trigger.available_now() if how == "all" else ps.Trigger.processing_time("0 seconds")
    sink = ps.QueueSink("changes", url=url)
    query = ps.stream(spark, changes).write(sink, guarantee="exactly_once")
    query.start(checkpoint=f"{folder}/checkpoint", trigger=trigger).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
