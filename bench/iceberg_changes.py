"""Changes of keys from everywhere in an Iceberg table: rows deleted by position, against copies of the data
files, in tables of two sizes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

import penstock
from bench.harness import Result, bounded, pairs, scratch
from bench.spark_session import spark

CHANGES = 10_000
FEW, MANY = 1_000_000, 10_000_000
ROUNDS = 3
_STEP = 500_000
_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("note", pa.string()),
        ("amount", pa.float64()),
        ("score", pa.float64()),
        ("_change_type", pa.string()),
        ("_commit_version", pa.int64()),
    ]
)


def growth(rounds: int = ROUNDS) -> list[Result]:
    """So many changes into tables of a million and of ten million keys."""
    results, times = [], []
    for keys in (FEW, MANY):
        with scratch() as folder:
            bench = _Bench(folder, keys)
            ours, peer = pairs(
                partial(bench.apply, "merge-on-read"), partial(bench.apply, "copy-on-write"), rounds
            )
            times.append(ours)
            name = f"{CHANGES:,} changes into Iceberg, {keys:,} keys / copies of files"
            results.append(bounded(name, ours, None, "s", peer=peer))
    name = f"the same, {MANY:,} keys, in times of {FEW:,}"
    return [*results, bounded(name, times[1] / times[0], 2, "x")]


class _Bench:
    """A table that has so many keys, and a query that applies changes to it."""

    def __init__(self, folder: Path, keys: int) -> None:
        self.keys, self.folder, self.random = keys, folder, np.random.default_rng(1)
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.url = f"sqlite:///{folder}/store.db"
        self.store = penstock.connect(self.url)
        self.queue = self.store.create_queue("changes", _SCHEMA)
        self.store.create_consumer("bench").register("changes")
        self.version = 1
        for start in range(0, keys, _STEP):
            self.queue.append(self._rows(np.arange(start, min(keys, start + _STEP))))
        self._run()

    def apply(self, mode: str) -> float:
        """What Spark says that a micro-batch took."""
        table = SqlCatalog("lake", **self.properties).load_table(("shop", "t"))
        table.transaction().set_properties({"write.merge.mode": mode}).commit_transaction()
        self.version += 1
        self.queue.append(self._rows(np.sort(self.random.choice(self.keys, CHANGES, replace=False))))
        return self._run()

    def _run(self) -> float:
        properties = "&".join(f"property.{name}={value}" for name, value in self.properties.items())
        sink = penstock.TableSink("shop.t", ["id"], f"iceberg:lake?{properties}", apply_changes=True)
        source = penstock.QueueSource("changes", consumer="bench", url=self.url)
        query = (
            penstock.stream(spark(), source)
            .write(sink)
            .start(checkpoint=self.folder / "checkpoint", trigger=penstock.Trigger.available_now())
        )
        query.awaitTermination()
        return sum(progress.durationMs.get("addBatch", 0) for progress in query.recentProgress) / 1000

    def _rows(self, ids: np.ndarray) -> pa.Table:
        count = len(ids)
        numbers = pa.array(ids)
        columns = [
            numbers,
            pa.array(np.char.add("name ", ids.astype(str))),
            pa.array(np.char.mod("note %x", self.random.integers(0, 2**62, count))),
            pa.array(self.random.random(count)),
            pa.array(self.random.random(count)),
            pa.array(["insert"] * count),
            pa.array(np.full(count, self.version)),
        ]
        return pa.table(columns, schema=_SCHEMA)
