"""Load on PostgreSQL from a thousand executors that write to object storage.

The tasks are modelled. Each puts objects of at most 8 MiB, with a segment of every partition that the task
has rows of. Its time is that of the storage's reply (log-normal, with a median of 100 ms and a 99th
percentile of 400 ms), but nothing waits for it here. The tasks' reports are real, and so are the transactions
that commit them and that delete them when they are trimmed, as compaction or retention does once with each
segment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import psycopg
import pyarrow as pa

import penstock
from bench.harness import Result, bounded, scratch, timed
from bench.scaling import Curve
from penstock.commit.micro_batch import BatchCommit, QueueTarget
from penstock.commit.protocol import commit_batch
from penstock.objects.local import LocalStorage
from penstock.objects.storage import Buffer
from penstock.queue.store import open_store
from penstock.store.log.payloads import INLINE_BYTES, OBJECT_BYTES, object_write_time
from penstock.store.log.segmenting import Segment
from penstock.store.log.written import TaskSegments
from penstock.store.records.queue_columns import FIRST_COLUMNS
from penstock.testing.stores import drop_schema, with_schema

_NAME = "bench_executors"
_measurements = count()
_SCHEMA = pa.schema([("data", pa.binary())])
_MEDIAN, _P99 = 0.1, 0.4
_COMMITS, _WARM_UP = 60, 5


@dataclass(frozen=True)
class Load:
    """Streaming query that writes into a keyed queue, partition by partition."""

    executors: int = 1_000
    partitions: int = 10_000
    rate: int = 1 << 30
    """Bytes per second."""
    interval: float = 4.0
    """Seconds between micro-batches."""


@dataclass(frozen=True)
class Cost:
    commits: list[float]
    """Seconds of each commit."""
    wal: float
    """WAL bytes of a commit and of the deletion of its entries."""
    cpu: float
    """CPU seconds of the server's processes for both."""


class _DiscardingStorage(LocalStorage):
    """Location whose objects are counted but not written."""

    def _put(self, name: str, parts: Sequence[Buffer], existing: str | None) -> None:
        pass


def load(pg_url: str) -> list[Result]:
    """Measure 1 GB/s into 10,000 partitions from 1,000 executors."""
    default_load = Load()
    cost = measure(pg_url, default_load)
    p99 = 1e3 * _percentile(cost.commits, 0.99)
    visible = [_slowest_put(default_load) + commit for commit in cost.commits for _ in range(20)]
    name = f"{default_load.executors:,} executors, {default_load.partitions:,} partitions, 1 GiB/s"
    note = f"a micro-batch each {default_load.interval:g} s"
    return [
        bounded(f"{name}: WAL", cost.wal / default_load.interval / 1e6, 10, "MB/s", note=note),
        bounded(f"{name}: PostgreSQL", 100 * cost.cpu / default_load.interval, 30, "% of a core", note=note),
        bounded(f"{name}: commit, p99", p99, 150, "ms", note=f"p50 {1e3 * median(cost.commits):.0f} ms"),
        bounded(
            f"{name}: from the last PUT's start to visible, p50",
            1e3 * median(visible),
            None,
            "ms",
            note=f"p99 {1e3 * _percentile(visible, 0.99):.0f} ms",
        ),
    ]


def by_executors(pg_url: str) -> Curve:
    return _curve(
        pg_url, "scaling-executors", "executors", [Load(executors=n) for n in (100, 300, 1_000, 3_000)]
    )


def by_partitions(pg_url: str) -> Curve:
    loads = [Load(partitions=n) for n in (100, 1_000, 3_000, 10_000)]
    return _curve(pg_url, "scaling-object-partitions", "partitions", loads)


def by_rate(pg_url: str) -> Curve:
    loads = [Load(rate=n << 20) for n in (1, 10, 100, 1_000, 4_000)]
    return _curve(pg_url, "scaling-rate", "MiB a second", loads)


def _curve(pg_url: str, name: str, parameter: str, loads: Sequence[Load]) -> Curve:
    commits, cores = [], []
    for load in loads:
        x = {"executors": load.executors, "partitions": load.partitions}.get(parameter, load.rate >> 20)
        cost = measure(pg_url, load, commits=20)
        commits.append((float(x), 1e3 * median(cost.commits)))
        cores.append((float(x), 1e3 * cost.cpu))
    title = f"A commit of rows in object storage, by {parameter}"
    return Curve(name, title, parameter, {"commit, p50": commits, "time of PostgreSQL's processes": cores})


def measure(pg_url: str, load: Load, *, commits: int = _COMMITS) -> Cost:
    """Commit micro-batches, and trim all of their rows."""
    # A process does not take another store in the same schema for the one that it had open.
    name = f"{_NAME}_{next(_measurements)}"
    url = with_schema(pg_url, name)
    with scratch() as folder, penstock.connect(url) as store, closing(_Server(pg_url)) as server:
        writer = _Query(store, url, folder, load)
        commit_seconds: list[float] = []
        for number in range(_WARM_UP + commits):
            if number == _WARM_UP:
                before = server.usage()
            commit_seconds.append(writer.commit())
        writer.trim()
        wal, cpu = (after - before_value for after, before_value in zip(server.usage(), before, strict=True))
        cost = Cost(commit_seconds[_WARM_UP:], wal / commits, cpu / commits)
    drop_schema(pg_url, name)
    return cost


class _Query:
    """Query that commits without Spark."""

    def __init__(self, store: penstock.Store, url: str, folder: Path, load: Load) -> None:
        self._load = load
        self._queue = store.create_queue("out", _SCHEMA, partitions=load.partitions, payloads=folder)
        self._database = open_store(url).database
        self._storage = _DiscardingStorage(str(self._queue.record.payloads))
        self._number = -1

    def commit(self) -> float:
        """Return the seconds of a commit."""
        self._number += 1
        record = self._queue.record
        written = self._task_reports(object_write_time(self._database, str(record.payloads)))
        batch = BatchCommit(
            sink=QueueTarget(record),
            app_id="app",
            batch_id=self._number,
            rows=len(written),
            origin="query",
            others=[self._number],
            written=written,
        )
        return timed(lambda: commit_batch(self._database, batch))

    def _task_reports(self, begun_at: int) -> list[TaskSegments]:
        """Return the reports of tasks, each with the rows of some partitions, as after a shuffle by key."""
        load, record = self._load, self._queue.record
        tasks = min(load.executors, load.partitions)
        size = load.rate * load.interval / tasks
        reports = []
        for task in range(tasks):
            partitions = range(task * load.partitions // tasks, (task + 1) * load.partitions // tasks)
            # A task whose rows exceed an object has several segments of each of its partitions.
            objects = max(1, math.ceil(size / OBJECT_BYTES))
            payload = pa.py_buffer(bytes(INLINE_BYTES // len(partitions) + 1))
            for _ in range(objects):
                segments = [
                    Segment.written(partition, 100, FIRST_COLUMNS, payload, None) for partition in partitions
                ]
                reports.append(
                    TaskSegments.of(self._storage, self._database.uuid, record.queue_id, segments, begun_at)
                )
        return reports

    def trim(self) -> None:
        for part in self._queue.info().partitions:
            self._queue.trim(part.partition, part.next_index)


class _Server:
    """Resource usage of a PostgreSQL server on this machine."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def usage(self) -> tuple[float, float]:
        """Return the WAL position in bytes, and the CPU seconds of all processes."""
        row = self._connection.execute("select pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        seconds = 0.0
        for (pid,) in self._connection.execute("select pid from pg_stat_activity"):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / 100
        return float(row[0]), seconds

    def close(self) -> None:
        self._connection.close()


def _slowest_put(load: Load) -> float:
    """Return the seconds until the storage has answered all tasks."""
    sigma = math.log(_P99 / _MEDIAN) / 2.326
    return max(random.lognormvariate(math.log(_MEDIAN), sigma) for _ in range(load.executors))


def _percentile(values: Sequence[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]
