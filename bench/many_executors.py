"""What a thousand executors that write through object storage cost PostgreSQL.

The tasks are modelled: each puts objects of at most 8 MiB, which hold a segment of every partition that the
task has rows of, and takes as long as storage takes to answer (log-normal, with a median of 100 ms and a 99th
percentile of 400 ms; nothing waits for it here). What they report is real, and so are the transactions that
commit it and that delete it again when it is trimmed, as compaction or retention does with each segment once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
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
_SCHEMA = pa.schema([("data", pa.binary())])
_MEDIAN, _P99 = 0.1, 0.4
_COMMITS, _WARM = 60, 5


@dataclass(frozen=True)
class Load:
    """A streaming query that writes into a queue with a key, partition by partition."""

    executors: int = 1_000
    partitions: int = 10_000
    rate: int = 1 << 30
    """Bytes a second."""
    interval: float = 4.0
    """Seconds from one micro-batch to the next."""


@dataclass(frozen=True)
class Cost:
    commits: list[float]
    """Seconds of each commit."""
    wal: float
    """Bytes of a commit and of deleting what it entered."""
    cpu: float
    """Seconds of the server's processes for both."""


class _StandIn(LocalStorage):
    """A location whose objects are counted, and not written."""

    def _put(self, name: str, parts: Sequence[Buffer], existing: str | None) -> None:
        pass


def load(pg_url: str) -> list[Result]:
    """1 GB/s into 10,000 partitions from 1,000 executors."""
    given = Load()
    cost = measure(pg_url, given)
    p99 = 1e3 * _percentile(cost.commits, 0.99)
    visible = [_slowest_put(given) + commit for commit in cost.commits for _ in range(20)]
    name = f"{given.executors:,} executors, {given.partitions:,} partitions, 1 GiB/s"
    note = f"a micro-batch each {given.interval:g} s"
    return [
        bounded(f"{name}: WAL", cost.wal / given.interval / 1e6, 10, "MB/s", note=note),
        bounded(f"{name}: PostgreSQL", 100 * cost.cpu / given.interval, 30, "% of a core", note=note),
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


def _curve(pg_url: str, name: str, against: str, loads: Sequence[Load]) -> Curve:
    commits, cores = [], []
    for each in loads:
        place = {"executors": each.executors, "partitions": each.partitions}.get(against, each.rate >> 20)
        cost = measure(pg_url, each, commits=20)
        commits.append((float(place), 1e3 * median(cost.commits)))
        cores.append((float(place), 1e3 * cost.cpu))
    title = f"A commit of rows in object storage, by {against}"
    return Curve(name, title, against, {"commit, p50": commits, "time of PostgreSQL's processes": cores})


def measure(pg_url: str, load: Load, *, commits: int = _COMMITS) -> Cost:
    """Commit micro-batches, and trim all of them again."""
    url = with_schema(pg_url, _NAME)
    with scratch() as folder, penstock.connect(url) as store, closing(_Server(pg_url)) as server:
        writer = _Query(store, url, folder, load)
        taken: list[float] = []
        for number in range(_WARM + commits):
            if number == _WARM:
                before = server.spent()
            taken.append(writer.commit())
        writer.trim()
        wal, cpu = (now - then for now, then in zip(server.spent(), before, strict=True))
        found = Cost(taken[_WARM:], wal / commits, cpu / commits)
    drop_schema(pg_url, _NAME)
    return found


class _Query:
    """A query's commits, without Spark."""

    def __init__(self, store: penstock.Store, url: str, folder: Path, load: Load) -> None:
        self._load = load
        self._queue = store.create_queue("out", _SCHEMA, partitions=load.partitions, payloads=folder)
        self._database = open_store(url).database
        self._storage = _StandIn(str(self._queue.record.payloads))
        self._number = -1

    def commit(self) -> float:
        """Return the seconds of a commit."""
        self._number += 1
        record = self._queue.record
        written = self._written(object_write_time(self._database, str(record.payloads)))
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

    def _written(self, begun_at: int) -> list[TaskSegments]:
        """What the tasks report: each has the rows of some partitions, as after a shuffle by key."""
        load, record = self._load, self._queue.record
        tasks = min(load.executors, load.partitions)
        size = load.rate * load.interval / tasks
        found = []
        for task in range(tasks):
            own = range(task * load.partitions // tasks, (task + 1) * load.partitions // tasks)
            # A task with more rows than fit into an object has more segments of each of its partitions.
            objects = max(1, math.ceil(size / OBJECT_BYTES))
            payload = pa.py_buffer(bytes(INLINE_BYTES // len(own) + 1))
            for _ in range(objects):
                segments = [Segment.written(each, 100, FIRST_COLUMNS, payload, None) for each in own]
                found.append(
                    TaskSegments.of(self._storage, self._database.uuid, record.queue_id, segments, begun_at)
                )
        return found

    def trim(self) -> None:
        for part in self._queue.info().partitions:
            self._queue.trim(part.partition, part.next_index)


class _Server:
    """A server on this machine."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def spent(self) -> tuple[float, float]:
        """Bytes of WAL, and seconds of all processes."""
        place = self._connection.execute("select pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert place is not None
        seconds = 0.0
        for (pid,) in self._connection.execute("select pid from pg_stat_activity"):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / 100
        return float(place[0]), seconds

    def close(self) -> None:
        self._connection.close()


def _slowest_put(load: Load) -> float:
    """Seconds until the last of all tasks has its answer."""
    sigma = math.log(_P99 / _MEDIAN) / 2.326
    return max(random.lognormvariate(math.log(_MEDIAN), sigma) for _ in range(load.executors))


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
