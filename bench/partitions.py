"""Plan and commit of a micro-batch over 10,000 partitions in PostgreSQL, half a millisecond away."""

from __future__ import annotations

import json
from contextlib import closing
from statistics import median

import psycopg
import pyarrow as pa

import penstock
from bench.delay import delayed
from bench.harness import Result, bounded, timed
from penstock.commit.micro_batch import BatchCommit, QueueTarget
from penstock.commit.offsets import QueueOffset
from penstock.commit.owner import Owner
from penstock.commit.protocol import commit_batch
from penstock.commit.source_rows import row_times
from penstock.queue.store import open_store
from penstock.spark.options import SourceOptions
from penstock.spark.ranges import next_end
from penstock.store import staging
from penstock.store.database import Transaction
from penstock.store.log import partition_log
from penstock.store.log.segmenting import Segment, to_segments
from penstock.store.records import catalog
from penstock.store.records.catalog import MAX_PARTITIONS
from penstock.store.staging import Attempt
from penstock.testing.stores import drop_schema, with_schema

_SCHEMA = pa.schema([("id", pa.int64())])
_DELAY = 0.0005
_ROUNDS = 9
_NAME = "bench_partitions"


def commits(pg_url: str) -> list[Result]:
    """Plan a row of each partition, stage it for a partition of another queue, and commit it."""
    with (
        delayed(pg_url, _DELAY) as delayed_url,
        penstock.connect(url := with_schema(delayed_url, _NAME)) as store,
    ):
        batches = _Batches(store, url)
        rounds = [batches.round() for _ in range(_ROUNDS)][2:]
        plan_ms, commit_ms, wal_bytes, append_ms = (median(values) for values in zip(*rounds, strict=True))
        peer_ms = median(_measure_peer(delayed_url) for _ in range(_ROUNDS))
    drop_schema(pg_url, _NAME)
    count = f"{MAX_PARTITIONS:,} partitions"
    # The peer processes the same rows with set-based statements of PostgreSQL, without a store.
    return [
        bounded(f"commit over {count}, 0.5 ms away", commit_ms, 150, "ms", peer=peer_ms),
        bounded(f"WAL of that commit, a partition of {count}", wal_bytes, 100, "bytes"),
        bounded(f"plan of a micro-batch over {count}", plan_ms, 300, "ms"),
        bounded(f"append to {count}", append_ms, None, "ms"),
    ]


class _Batches:
    """Query that owns a consumer, without Spark."""

    def __init__(self, store: penstock.Store, url: str) -> None:
        self._options = SourceOptions(url, "in", "c")
        self._source, self._sink = (
            store.create_queue(name, _SCHEMA, partitions=MAX_PARTITIONS) for name in ("in", "out")
        )
        store.create_consumer("c").register("in")
        self._database = open_store(url).database
        self._owner = Owner(self._database, "c", "in", moved_by_sink=True)
        self._logged: QueueOffset | None = None
        self._segments: list[Segment] = [
            segment
            for partition in range(MAX_PARTITIONS)
            for segment in to_segments(pa.table({"id": [partition]}, schema=_SCHEMA), partition)
        ]
        self._number = -1

    def round(self) -> tuple[float, float, float, float]:
        """Return milliseconds of plan and commit, WAL bytes of a partition, and milliseconds of an append."""
        self._number += 1
        database, record, attempt = self._database, self._sink.record, Attempt("app", self._number, 0, "a")
        appended = timed(
            lambda: database.run(lambda tx: partition_log.append(tx, self._source.record, self._segments))
        )
        planned = timed(self._plan)
        staging.stage_segments(database, record, attempt, self._segments, 0)
        assert self._logged is not None
        batch = BatchCommit(
            sink=QueueTarget(record),
            app_id="app",
            batch_id=self._number,
            rows=len(self._segments),
            origin="query",
            sources=[self._logged],
            attempts={"a": len(self._segments)},
        )
        before = self._wal_position()
        committed = timed(lambda: commit_batch(database, batch))
        logged = (self._wal_position() - before) / MAX_PARTITIONS
        return 1e3 * planned, 1e3 * committed, logged, 1e3 * appended

    def _plan(self) -> None:
        start = (0,) * MAX_PARTITIONS
        if self._logged is not None:
            self._owner.observe(self._logged)
            start = self._logged.end

        def compute_range(tx: Transaction) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
            partitions = self._partitions(tx)
            end = next_end(tx, self._source.record, partitions, start, self._options, None)
            return end, row_times(tx, self._source.record, partitions, end)

        end, times = self._database.run(compute_range, write=False)
        offset = QueueOffset(
            self._database.uuid, "in", "c", self._owner.generation, self._owner.epoch, start, end, times=times
        )
        # Spark logs the offset as JSON, and passes it on.
        self._logged = QueueOffset.of(json.loads(json.dumps(offset.to_dict())))
        assert self._logged is not None
        self._owner.plan(self._logged)

    def _partitions(self, tx: Transaction) -> list[catalog.PartitionRecord]:
        return catalog.partitions(tx, self._source.record)

    def _wal_position(self) -> int:
        with self._database.transaction(write=False) as tx:
            return int(tx.query("select pg_current_wal_lsn() - '0/0'::pg_lsn")[0][0])


def _measure_peer(url: str) -> float:
    """Return the milliseconds of a transaction that inserts and deletes 10,000 rows and updates 20,000."""
    numbers = f"generate_series(1, {MAX_PARTITIONS}) as n"
    with closing(psycopg.connect(url)) as connection, connection.cursor() as cursor:
        for name in ("heads", "offsets", "staged", "segments"):
            table = f"{_NAME}.plain_{name}"
            cursor.execute(f"drop table if exists {table}")
            cursor.execute(f"create table {table} (n bigint primary key, a bigint, b bigint, c bigint)")
            if name != "segments":
                cursor.execute(f"insert into {table} select n, 0, 0, 0 from {numbers}")
        connection.commit()

        def run_statements() -> None:
            cursor.execute(f"delete from {_NAME}.plain_staged")
            for name in ("heads", "offsets"):
                cursor.execute(f"update {_NAME}.plain_{name} set a = a + 1, b = b + 1")
            cursor.execute(f"insert into {_NAME}.plain_segments select n, 0, 0, 0 from {numbers}")
            connection.commit()

        return 1e3 * timed(run_statements)
