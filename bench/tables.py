"""Upsert of a micro-batch into a PostgreSQL table, exactly once.

The peer is handwritten code with COPY and INSERT … ON CONFLICT.
"""

from __future__ import annotations

from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.csv as pacsv

import penstock
from bench.harness import Result, scratch, speed, timed
from bench.spark_session import spark
from penstock.testing.stores import drop_schema, with_schema

ROWS = 1_000_000
ROUNDS = 3
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
_COLUMNS = "id bigint not null, name text, amount double precision, primary key (id)"
_NAME = "bench_tables"


def upsert(url: str, rows: int = ROWS, rounds: int = ROUNDS) -> Result:
    """Measure an upsert of rows into a table of the same size, which already has half of them."""
    drop_schema(url, _NAME)
    with scratch() as folder, psycopg.connect(url, autocommit=True) as connection:
        bench = _Bench(url, connection, folder, rows)
        try:
            return speed(
                f"upsert {rows:,} rows / COPY, ON CONFLICT", bench.ours, bench.peer, least=0.7, rounds=rounds
            )
        finally:
            bench.store.close()
            drop_schema(url, _NAME)


class _Bench:
    def __init__(self, url: str, connection: psycopg.Connection, folder: Path, rows: int) -> None:
        self.url, self.connection, self.folder, self.rows = with_schema(url, _NAME), connection, folder, rows
        self.store = penstock.connect(self.url)
        self.data = _rows(rows // 2, rows + rows // 2)
        queue = self.store.create_queue("in", SCHEMA, partitions=2)
        for partition in range(2):
            queue.append(self.data.slice(partition * (rows // 2), rows // 2), partition=partition)
        self.store.create_consumer("bench").register("in")
        self.runs = 0

    def _fill(self, table: str) -> None:
        """Recreate the table with the same rows for each round."""
        self.connection.execute(f"drop table if exists {_NAME}.{table}")
        self.connection.execute(f"create table {_NAME}.{table} ({_COLUMNS})")
        self.connection.execute(
            f"insert into {_NAME}.{table} "
            f"select i, 'name ' || i, i from generate_series(0, {self.rows} - 1) as i"
        )
        self.connection.execute(f"vacuum analyze {_NAME}.{table}")
        self.connection.execute("checkpoint")

    def ours(self) -> float:
        """Return the seconds of the micro-batch that Spark reports: read, stage, merge and commit."""
        self._fill("ours")
        self.store.consumer("bench").seek("in", to="earliest")
        self.runs += 1
        stream = penstock.stream(spark(), penstock.QueueSource("in", consumer="bench", url=self.url))
        pipeline = stream.write(penstock.TableSink(f"{_NAME}.ours", ["id"], self.url), output_mode="update")
        query = pipeline.start(
            checkpoint=self.folder / f"ck{self.runs}", trigger=penstock.Trigger.available_now()
        )
        query.awaitTermination()
        self._check("ours")
        return sum(progress.durationMs.get("addBatch", 0) for progress in query.recentProgress) / 1000

    def peer(self) -> float:
        """Return the seconds of an upsert from an Arrow table in one transaction."""
        self._fill("peer")
        seconds = timed(self._upsert_by_hand)
        self._check("peer")
        return seconds

    def _upsert_by_hand(self) -> None:
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.execute(f"create temporary table incoming (like {_NAME}.peer) on commit drop")
            with cursor.copy("copy incoming from stdin (format csv)") as copy:
                for batch in self.data.to_batches(max_chunksize=65_536):
                    sink = pa.BufferOutputStream()
                    pacsv.write_csv(batch, sink, pacsv.WriteOptions(include_header=False))
                    copy.write(memoryview(sink.getvalue()))
            cursor.execute(
                f"insert into {_NAME}.peer select * from incoming on conflict (id) do update "
                "set name = excluded.name, amount = excluded.amount"
            )

    def _check(self, table: str) -> None:
        row = self.connection.execute(f"select count(*), sum(amount) from {_NAME}.{table}").fetchone()
        expected = self.rows + self.rows // 2
        assert row is not None
        assert row[0] == expected, f"{row[0]} rows of {expected} are in {table}"


def _rows(start: int, end: int) -> pa.Table:
    numbers = pa.array(range(start, end), pa.int64())
    names = pa.array([f"other {number}" for number in range(start, end)])
    return pa.table([numbers, names, numbers.cast(pa.float64())], schema=SCHEMA)
