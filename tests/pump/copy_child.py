"""Copies the tables of pgbench from the queues of a pump until its parent kills it.

Arguments: a folder for Spark and the checkpoints, the URL of the pump's store, that of the copies' store, and
each table with its key, as ``pgbench_tellers:tid``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import penstock
from tests.support.sparks import make_spark


def main(folder: str, store: str, copies: str, *tables: str) -> None:
    spark = make_spark(Path(folder) / "spark")
    for named in tables:
        table, key = named.split(":")
        changes = penstock.changes.read_stream(
            spark, penstock.QueueFeed(table, store), options={"maxRowsPerTrigger": 200_000}
        )
        sink = penstock.TableSink(table, [key], copies, apply_changes=True, schema_changes="evolve")
        penstock.stream(spark, changes).write(sink).start(
            checkpoint=Path(folder) / table,
            name=table,
            trigger=penstock.Trigger.processing_time("500 milliseconds"),
        )
    print("all queries run", flush=True)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
