"""Programs that tests of queues run in separate processes.

``python -m tests.queue.programs NAME ARGUMENT…`` runs one.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock

MOST_COLUMNS = 20


def append_keys(url: str, queue: str, seed: str, appends: str) -> None:
    """Append twenty rows at a time, with ever more keys."""
    random_ = random.Random(int(seed))
    with penstock.connect(url, create=False) as store:
        target = store.queue(queue)
        for n in range(int(appends)):
            target.append([{"n": random_.randrange(30 * (n + 1)), "s": seed} for _ in range(20)])
            if n == 5:
                print("appended", flush=True)


def append_numbered(url: str, queue: str, writer: str, appends: str, go: str) -> None:
    """Append one to four numbered rows at a time. Each row has the number and the size of its append."""
    number = int(writer)
    random_ = random.Random(number)
    with penstock.connect(url, create=False) as store:
        target = store.queue(queue)
        print("ready", flush=True)
        while not Path(go).exists():
            time.sleep(0.002)
        for n in range(int(appends)):
            count = random_.randint(1, 4)
            result = target.append([{"n": n * 1000 + number, "s": f"{i}/{count}"} for i in range(count)], 0)
            if n == 5:
                print("appended", flush=True)
            assert result.rows == count
    print("done", flush=True)


def add_columns(url: str, queue: str, writer: str) -> None:
    """Append rows that say how many columns they have, add columns and compact, until this process is
    killed.
    """
    random_ = random.Random(int(writer))
    with penstock.connect(url, create=False) as store:
        target, old = store.queue(queue), store.queue(queue)
        for n in itertools.count():
            if len(target.schema) < MOST_COLUMNS and random_.random() < 0.3:
                target.add_columns(pa.field(f"c{len(target.schema)}", pa.int64()))
            width = len(target.schema)
            value = n * 10 + int(writer)
            target.append([{"n": value, "width": width} | {f"c{i}": value for i in range(2, width)}] * 3)
            old.append([{"n": value, "width": 2}])
            if random_.random() < 0.1:
                target.compact()
            if n == 5:
                print("appended", flush=True)


def check_widths(rows: list[dict[str, Any]]) -> None:
    """Check that each row has exactly the values that it was written with."""
    for row in rows:
        n, width, *others = row.values()
        assert others == [n] * (width - 2) + [None] * (len(others) - width + 2), row


def read_prefixes(url: str, queue: str, rows: str) -> None:
    """Read the partition until it has all rows, and check that each read returns a longer prefix of whole
    appends.
    """
    with penstock.connect(url, create=False) as store:
        target = store.queue(queue)
        print("ready", flush=True)
        seen: list[tuple[int, str]] = []
        while len(seen) < int(rows):
            there = target.info().partitions[0].next_index
            table = target.read(0, len(seen), there)
            assert table.num_rows == there - len(seen), (table.num_rows, there, len(seen))
            seen += zip(table["n"].to_pylist(), table["s"].to_pylist(), strict=True)
            check(seen)
            table = target.read(0, 0, max_rows=50)
            again = list(zip(table["n"].to_pylist(), table["s"].to_pylist(), strict=True))
            assert again[: len(seen)] == seen[: len(again)]
    print("done", flush=True)


def check(seen: list[tuple[int, str]]) -> None:
    """Check that appends are complete and contiguous, and that each writer's appends are in order without
    gaps.
    """
    position = 0
    last: dict[int, int] = {}
    while position < len(seen):
        value, text = seen[position]
        count = int(text.split("/")[1])
        expected = [(value, f"{i}/{count}") for i in range(count)]
        assert seen[position : position + count] == expected, (position, seen[position : position + count])
        append, writer = divmod(value, 1000)
        assert append == last.get(writer, -1) + 1, (writer, append, last.get(writer))
        last[writer] = append
        position += count


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
