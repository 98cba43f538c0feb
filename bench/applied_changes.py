"""Query that applies changes of random keys to Delta and Iceberg tables of different sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock
from bench.harness import Result, bounded
from bench.spark_session import spark

CHANGES = 10_000
FEW, MANY = 1_000_000, 10_000_000
ROUNDS = 3
ROWS = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("note", pa.string()),
        ("amount", pa.float64()),
        ("score", pa.float64()),
    ]
)
_CHANGES = pa.schema([*ROWS, ("_change_type", pa.string()), ("_commit_version", pa.int64())])
_STEP = 500_000


class AppliedChanges:
    """Query that applies changes from a queue to a table with a number of keys."""

    def __init__(self, folder: Path, keys: int, sink: penstock.TableSink) -> None:
        self.folder, self.keys, self.sink = folder, keys, sink
        self.random = np.random.default_rng(1)
        self.url = f"sqlite:///{folder}/store.db"
        self.store = penstock.connect(self.url)
        self.queue = self.store.create_queue("changes", _CHANGES)
        self.store.create_consumer("bench").register("changes")
        self.version = 0

    def apply(self, *id_arrays: np.ndarray) -> float:
        """Change the values of keys, by default random ones, and return the seconds that Spark reports."""
        self.version += 1
        for ids in id_arrays or [self.random_ids()]:
            rows = self.rows(ids)
            kinds = [pa.array(["insert"] * len(ids)), pa.array(np.full(len(ids), self.version))]
            self.queue.append(pa.table([*rows.columns, *kinds], schema=_CHANGES))
        source = penstock.QueueSource("changes", consumer="bench", url=self.url)
        query = (
            penstock.stream(spark(), source)
            .write(self.sink)
            .start(checkpoint=self.folder / "checkpoint", trigger=penstock.Trigger.available_now())
        )
        query.awaitTermination()
        return sum(progress.durationMs.get("addBatch", 0) for progress in query.recentProgress) / 1000

    def random_ids(self) -> np.ndarray:
        return np.sort(self.random.choice(self.keys, CHANGES, replace=False))

    def id_chunks(self) -> Iterator[np.ndarray]:
        """Return all keys in chunks."""
        return (np.arange(start, min(self.keys, start + _STEP)) for start in range(0, self.keys, _STEP))

    def rows(self, ids: np.ndarray) -> pa.Table:
        count = len(ids)
        columns = [
            pa.array(ids),
            pa.array(np.char.add("name ", ids.astype(str))),
            pa.array(np.char.mod("note %x", self.random.integers(0, 2**62, count))),
            pa.array(self.random.random(count)),
            pa.array(self.random.random(count)),
        ]
        return pa.table(columns, schema=ROWS)


def growth_result(times: list[float], kind: str = "") -> Result:
    """Compare the time of the changes in the larger table with that in the smaller one."""
    return bounded(f"the same, {kind}{MANY:,} keys, in times of {FEW:,}", times[1] / times[0], 2, "x")
