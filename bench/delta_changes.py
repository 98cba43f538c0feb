"""Changes of keys from everywhere in a Delta table: rows deleted by deletion vectors, against a MERGE of the
same rows by deltalake, in tables of several sizes.

``python -m bench.delta_changes 100000000`` measures a table of that size alone, without the peer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

import penstock
from bench.harness import Result, bounded, pairs, peak_memory, scratch, timed, worker_peaks
from bench.spark_session import spark

CHANGES = 10_000
FEW, MANY = 1_000_000, 10_000_000
ROUNDS = 3
_STEP = 500_000
_FILE_BYTES = 64 << 20
_ROWS = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("note", pa.string()),
        ("amount", pa.float64()),
        ("score", pa.float64()),
    ]
)
_CHANGES = pa.schema([*_ROWS, ("_change_type", pa.string()), ("_commit_version", pa.int64())])
_RECORD = pa.schema(
    [("id", pa.int64()), ("_penstock_sequence", pa.int64()), ("_penstock_present", pa.int32())]
)


def growth(rounds: int = ROUNDS) -> list[Result]:
    """So many changes into tables of a million and of ten million keys, without and with history."""
    results = []
    for scd_type in (1, 2):
        times = []
        for keys in (FEW, MANY):
            with scratch() as folder:
                bench = _Bench(folder, keys, scd_type)
                name = f"{CHANGES:,} changes of type {scd_type} into Delta, {keys:,} keys"
                if scd_type == 1:
                    ours, peer = pairs(bench.apply, bench.merge, rounds)
                    results.append(bounded(f"{name} / MERGE of deltalake", ours, None, "s", peer=peer))
                else:
                    ours, _ = pairs(bench.apply, float, rounds)
                    results.append(bounded(name, ours, None, "s"))
                times.append(ours)
        name = f"the same, type {scd_type}, {MANY:,} keys, in times of {FEW:,}"
        results.append(bounded(name, times[1] / times[0], 2, "x"))
    return results


class _Bench:
    """A table that has so many keys, and a query that applies changes to it."""

    def __init__(self, folder: Path, keys: int, scd_type: int, *, peer: bool = True) -> None:
        self.keys, self.folder, self.scd_type = keys, folder, scd_type
        self.random = np.random.default_rng(1)
        self.url = f"sqlite:///{folder}/store.db"
        self.store = penstock.connect(self.url)
        self.queue = self.store.create_queue("changes", _CHANGES)
        self.store.create_consumer("bench").register("changes")
        self.version = 1
        self.table, self.peer = folder / "tables" / "t", folder / "peer"
        self.apply(np.array([keys]))
        DeltaTable(str(self.table)).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
        self._fill(self.table, pa.schema(DeltaTable(str(self.table)).schema().to_arrow()))
        if scd_type == 1:
            self._record()
            if peer:
                self._fill(self.peer, _ROWS)

    def apply(self, ids: np.ndarray | None = None) -> float:
        """What Spark says that a micro-batch took."""
        self.version += 1
        rows = self._rows(self._chosen() if ids is None else ids)
        kinds = [pa.array(["insert"] * rows.num_rows), pa.array(np.full(rows.num_rows, self.version))]
        self.queue.append(pa.table([*rows.columns, *kinds], schema=_CHANGES))
        url = f"delta://{self.table.parent}"
        sink = penstock.TableSink("t", ["id"], url, apply_changes=True, scd_type=self.scd_type)
        source = penstock.QueueSource("changes", consumer="bench", url=self.url)
        query = (
            penstock.stream(spark(), source)
            .write(sink)
            .start(checkpoint=self.folder / "checkpoint", trigger=penstock.Trigger.available_now())
        )
        query.awaitTermination()
        return sum(progress.durationMs.get("addBatch", 0) for progress in query.recentProgress) / 1000

    def merge(self) -> float:
        rows = self._rows(self._chosen())
        table = DeltaTable(str(self.peer))
        merge = table.merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
        return timed(merge.when_matched_update_all().when_not_matched_insert_all().execute)

    def _chosen(self) -> np.ndarray:
        return np.sort(self.random.choice(self.keys, CHANGES, replace=False))

    def _fill(self, path: Path, schema: pa.Schema) -> None:
        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, self.keys, _STEP):
                rows = self._rows(np.arange(start, min(self.keys, start + _STEP)))
                for name in schema.names[len(_ROWS) :]:
                    begun, open_ended = np.zeros(rows.num_rows, np.int64), pa.nulls(rows.num_rows, pa.int64())
                    rows = rows.append_column(name, pa.array(begun) if "from" in name else open_ended)
                yield from rows.cast(schema).to_batches()

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        write_deltalake(str(path), reader, mode="append", target_file_size=_FILE_BYTES)

    def _record(self) -> None:
        """Record the events of all keys, as if a query had applied them."""
        (path,) = self.table.glob("_penstock/applied-*")

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, self.keys, _STEP):
                ids = np.arange(start, min(self.keys, start + _STEP))
                ones = pa.array(np.ones(len(ids), np.int32))
                columns = [pa.array(ids), pa.array(np.zeros(len(ids), np.int64)), ones]
                yield pa.record_batch(columns, schema=_RECORD)

        reader = pa.RecordBatchReader.from_batches(_RECORD, batches())
        write_deltalake(str(path), reader, mode="append", target_file_size=_FILE_BYTES)
        table = DeltaTable(str(self.table))
        named = Transaction(f"penstock:{path.name}", DeltaTable(str(path)).version())
        nothing = pa.schema(table.schema().to_arrow()).empty_table()
        write_deltalake(
            table, nothing, mode="append", commit_properties=CommitProperties(app_transactions=[named])
        )

    def _rows(self, ids: np.ndarray) -> pa.Table:
        count = len(ids)
        columns = [
            pa.array(ids),
            pa.array(np.char.add("name ", ids.astype(str))),
            pa.array(np.char.mod("note %x", self.random.integers(0, 2**62, count))),
            pa.array(self.random.random(count)),
            pa.array(self.random.random(count)),
        ]
        return pa.table(columns, schema=_ROWS)


def main(keys: int, scd_type: int = 1) -> None:
    with scratch() as folder:
        bench = _Bench(folder, keys, scd_type, peer=False)
        filled = peak_memory()
        for _ in range(ROUNDS + 1):
            print(f"{keys:,} keys, type {scd_type}: {bench.apply():.2f} s", flush=True)
        worker = max(worker_peaks().values(), default=0)
        print(
            f"peak: driver {filled >> 20} MiB after the table was made, {peak_memory() >> 20} MiB at the end"
        )
        print(f"peak: worker {worker >> 20} MiB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
