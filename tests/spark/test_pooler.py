"""Spark's tasks behind a pooler, which gives one of two connections to each transaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.testing import temporary_store_url
from tests.support.pgbouncer import pgbouncer
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
IDS = range(400)


@pytest.fixture(scope="module")
def pooler(pg_url: str) -> Iterator[str]:
    with pgbouncer(pg_url) as url:
        yield url


@pytest.fixture
def pooled(pooler: str) -> Iterator[str]:
    with temporary_store_url(pooler) as url:
        yield url


def _ids(queue: penstock.Queue) -> list[int]:
    ends = {part.partition: part.next_index for part in queue.info().partitions}
    return sorted(n for part, end in ends.items() for n in queue.read(part, 0, end)["id"].to_pylist())


def _sessions(url: str) -> set[int]:
    with psycopg.connect(url) as admin:
        rows = admin.execute(
            "select pid from pg_stat_activity where backend_type = 'client backend'"
        ).fetchall()
        return {pid for (pid,) in rows} - {admin.info.backend_pid}


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "idempotent"])
def test_micro_batches_arrive_as_guaranteed(
    spark: SparkSession, pooled: str, tmp_path: Path, guarantee: str
) -> None:
    with penstock.connect(pooled) as store:
        source, sink = (store.create_queue(name, SCHEMA, partitions=4) for name in ("in", "out"))
        store.create_consumer("c").register("in")
        pipeline = penstock.stream(spark, penstock.QueueSource("in", "c", pooled)).write(
            penstock.QueueSink("out", pooled), guarantee=guarantee
        )
        for half in (IDS[:200], IDS[200:]):
            for part in range(4):
                source.append([{"id": n} for n in half[part::4]], partition=part)
            query = pipeline.start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now())
            assert query.awaitTermination(120)
        assert _ids(sink) == list(IDS)


def test_a_continuous_query_uses_few_connections(
    spark: SparkSession, pg_url: str, pooled: str, tmp_path: Path
) -> None:
    before = _sessions(pg_url)
    with penstock.connect(pooled) as store:
        source, sink = (store.create_queue(name, SCHEMA, partitions=2) for name in ("in", "out"))
        store.create_consumer("c").register("in")
        query = (
            penstock.stream(spark, penstock.QueueSource("in", "c", pooled))
            .write(penstock.QueueSink("out", pooled))
            .start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.continuous("20 ms"))
        )
        try:
            for n in IDS:
                source.append([{"id": n}])
            wait_until(lambda: len(_ids(sink)) >= len(IDS), timeout=60)
            after = _sessions(pg_url)
        finally:
            query.stop()
        assert _ids(sink) == list(IDS)
    # Two of the pooler, the owner's lock, and a watch of each task that reads.
    assert len(after - before) <= 5
