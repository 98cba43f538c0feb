"""Change feeds on a cluster master, whose executors ask the commit tracker. Argument: a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import penstock
from tests.support.change_frames import Files, Row, Sink, collected, contract, frame
from tests.support.sparks import make_spark

START = 1_700_000_000_000_000
folder = Path(sys.argv[1])


def row(key: int, version: int, kind: str = "insert", *, time: int = 0) -> Row:
    return key, "a", version, kind, version, START + version * 1_000_000 + time


def refused(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return next((word for word in CONDITIONS if word in str(error)), str(error))
    return "taken"


CONDITIONS = ("SEVERAL_TIMESTAMPS", "COMMIT_IN_SEVERAL_MICRO_BATCHES")

spark = make_spark(folder / "spark", "local-cluster[2,1,512]", spark__executor__memory="512m")
spark.sparkContext.setLogLevel("OFF")
promise = contract("CU", whole_commits=True)


def process(df: object) -> object:
    return penstock.changes.post_process(df, promise, compute_updates=True)


# Four partitions over two executors; the carry-over of row 1 lies in two of them.
rows = [row(1, 7, "delete"), row(2, 7), row(3, 7), row(1, 7)]
feed = frame(spark, rows).repartitionByRange(4, "id", "_change_type")
print("BATCH", sorted(key for key, *_ in collected(process(feed))))
print("TIMES", refused(lambda: process(frame(spark, [*rows, row(4, 7, time=1)]).repartition(4)).count()))

files = Files(spark, folder)
files.add([row(1, 1), row(2, 1)], [row(3, 2)])
sink = Sink(folder)
print("STREAM", sum(sink.run(process(files.read())).values()))
files.add([row(4, 2)])
print("AGAIN", refused(lambda: sink.run(process(files.read()))))
spark.stop()
