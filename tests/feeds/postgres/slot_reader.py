"""Reads all of a PostgreSQL feed as Spark's driver and tasks do, and prints the number of rows and its
memory usage.

Argument: the feed's URL. Its last line: rows, bytes of their values, and bytes by which the memory in use has
grown at the most.
"""

from __future__ import annotations

import resource
import sys

import pyarrow.parquet  # noqa: F401 - what an executor has loaded already
from pyspark.sql import SparkSession  # noqa: F401

from penstock.feeds.urls import parse


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(url: str) -> None:
    feed = parse(url).open()
    schema = feed.describe().schema
    before, rows, size = peak(), 0, 0
    start = feed.oldest()
    upto = feed.newest(start)
    assert sum(commit.rows for commit in feed.commits(start, upto, 1000)) > 1000
    for task in feed.tasks(start, upto, 1000):
        for batch in feed.read(task, schema):
            rows, size = rows + batch.num_rows, size + batch.nbytes
    print("READ", rows, size, peak() - before, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
