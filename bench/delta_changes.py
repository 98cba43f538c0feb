"""Changes of random keys in Delta tables of several sizes, compared with a MERGE of deltalake.

Penstock deletes rows with deletion vectors. ``python -m bench.delta_changes 100000000`` measures only a table
of that size, without the peer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

import penstock
from bench.applied_changes import CHANGES, FEW, MANY, ROUNDS, ROWS, AppliedChanges, growth_result
from bench.harness import Result, bounded, pairs, peak_memory, scratch, timed, worker_peaks

_FILE_BYTES = 64 << 20
_APPLIED_SCHEMA = pa.schema(
    [("id", pa.int64()), ("_penstock_sequence", pa.int64()), ("_penstock_present", pa.int32())]
)


def growth(rounds: int = ROUNDS) -> list[Result]:
    """Measure changes in tables of one million and ten million keys, without and with history."""
    results = []
    for scd_type in (1, 2):
        seconds = []
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
                seconds.append(ours)
        results.append(growth_result(seconds, f"type {scd_type}, "))
    return results


class _Bench(AppliedChanges):
    """Table with a number of keys, and an equal one for the peer."""

    def __init__(self, folder: Path, keys: int, scd_type: int, *, peer: bool = True) -> None:
        self.table, self.peer = folder / "tables" / "t", folder / "peer"
        url = f"delta://{self.table.parent}"
        sink = penstock.TableSink("t", ["id"], url, apply_changes=True, scd_type=scd_type)
        super().__init__(folder, keys, sink)
        self.apply(np.array([keys]))
        DeltaTable(str(self.table)).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
        self._fill(self.table, pa.schema(DeltaTable(str(self.table)).schema().to_arrow()))
        if scd_type == 1:
            self._record_applied()
            if peer:
                self._fill(self.peer, ROWS)

    def merge(self) -> float:
        rows = self.rows(self.random_ids())
        table = DeltaTable(str(self.peer))
        merge = table.merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
        return timed(merge.when_matched_update_all().when_not_matched_insert_all().execute)

    def _fill(self, path: Path, schema: pa.Schema) -> None:
        def batches() -> Iterator[pa.RecordBatch]:
            for ids in self.id_chunks():
                rows = self.rows(ids)
                for name in schema.names[len(ROWS) :]:
                    starts, open_ended = (
                        np.zeros(rows.num_rows, np.int64),
                        pa.nulls(rows.num_rows, pa.int64()),
                    )
                    rows = rows.append_column(name, pa.array(starts) if "from" in name else open_ended)
                yield from rows.cast(schema).to_batches()

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        write_deltalake(str(path), reader, mode="append", target_file_size=_FILE_BYTES)

    def _record_applied(self) -> None:
        """Record the events of all keys, as if a query had applied them."""
        (path,) = self.table.glob("_penstock/applied-*")

        def batches() -> Iterator[pa.RecordBatch]:
            for ids in self.id_chunks():
                ones = pa.array(np.ones(len(ids), np.int32))
                columns = [pa.array(ids), pa.array(np.zeros(len(ids), np.int64)), ones]
                yield pa.record_batch(columns, schema=_APPLIED_SCHEMA)

        reader = pa.RecordBatchReader.from_batches(_APPLIED_SCHEMA, batches())
        write_deltalake(str(path), reader, mode="append", target_file_size=_FILE_BYTES)
        table = DeltaTable(str(self.table))
        app_transaction = Transaction(f"penstock:{path.name}", DeltaTable(str(path)).version())
        empty = pa.schema(table.schema().to_arrow()).empty_table()
        write_deltalake(
            table,
            empty,
            mode="append",
            commit_properties=CommitProperties(app_transactions=[app_transaction]),
        )


def main(keys: int, scd_type: int = 1) -> None:
    with scratch() as folder:
        bench = _Bench(folder, keys, scd_type, peer=False)
        memory_after_fill = peak_memory()
        for _ in range(ROUNDS + 1):
            print(f"{keys:,} keys, type {scd_type}: {bench.apply():.2f} s", flush=True)
        worker_memory = max(worker_peaks().values(), default=0)
        print(
            f"peak: driver {memory_after_fill >> 20} MiB after the table was created, "
            f"{peak_memory() >> 20} MiB at the end"
        )
        print(f"peak: worker {worker_memory >> 20} MiB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
