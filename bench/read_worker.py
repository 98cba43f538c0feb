"""Reads a partition as a Spark task does and prints its own peak resident memory in bytes."""

from __future__ import annotations

import sys

from bench.harness import peak_memory
from penstock.queue.opened import open_store
from penstock.spark.tasks import RangePartition, Scan


def main(url: str, count: int) -> None:
    record = open_store(url).queue("large").record
    scan = Scan(url, record, record.schema)
    read = sum(batch.num_rows for batch in scan.read(RangePartition(0, 0, count)))
    if read != count:
        raise SystemExit(f"read {read} rows of {count}")
    print(peak_memory())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
