"""Compaction of a queue by a Spark job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import penstock
from penstock.errors import (
    InvalidNameError,
    InvalidOptionError,
    QueryFailedError,
    QueueNotFoundError,
    StoreError,
)
from penstock.spark import compaction
from penstock.store.log import compact as log
from penstock.store.log import payloads
from tests.support.queues import everything
from tests.support.raw_sql import run_sql

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
PARTITIONS, APPENDS = 12, 6


def small(*values: int) -> pa.Table:
    return pa.table({"n": values, "text": [os.urandom(100).hex() for _ in values]})


@pytest.fixture(params=["inline", "objects"])
def queue(
    request: pytest.FixtureRequest, store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> penstock.Queue:
    """A queue with small segments: in the database, or each append in an object of its own."""
    folder = tmp_path / "rows" if request.param == "objects" else None
    made = store.create_queue("q", SCHEMA, partitions=PARTITIONS, payloads=folder)
    if folder is not None:
        monkeypatch.setattr("penstock.store.log.payloads.INLINE_BYTES", 0)
    append_everywhere(made, range(APPENDS))
    return made


def append_everywhere(queue: penstock.Queue, numbers: range) -> None:
    for n in numbers:
        for partition in range(PARTITIONS):
            queue.append(small(n, -n), partition)


def segments(store: penstock.Store) -> int:
    return int(run_sql(store.database, "select count(*) from penstock.segment")[0][0])


def complete(appends: int) -> dict[int, list[int]]:
    rows = [row for n in range(appends) for row in (n, -n)]
    return dict.fromkeys(range(PARTITIONS), rows)


def test_each_partition_has_one_segment_afterwards(
    spark: SparkSession, store: penstock.Store, store_url: str, queue: penstock.Queue
) -> None:
    assert penstock.compact(spark, "q", url=store_url) == PARTITIONS * (APPENDS - 1)
    assert segments(store) == PARTITIONS
    assert everything(queue) == complete(APPENDS)
    assert penstock.compact(spark, "q", url=store_url) == 0


def test_several_partitions_share_an_object(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    queue = store.create_queue("q", SCHEMA, partitions=PARTITIONS, payloads=folder)
    for n in range(APPENDS):
        text = [os.urandom(5_000).hex() for _ in range(PARTITIONS)]
        for partition in range(PARTITIONS):
            queue.append(pa.table({"n": [n], "text": text[:1]}), partition)
    assert not list(folder.rglob("*.segments"))
    assert penstock.compact(spark, "q", url=store_url) == PARTITIONS * (APPENDS - 1)
    # One for each task at the most, and not one for each partition.
    assert 1 <= len(list(folder.rglob("*.segments"))) < PARTITIONS
    assert everything(queue) == {partition: list(range(APPENDS)) for partition in range(PARTITIONS)}


def test_rows_are_appended_and_read_meanwhile(
    spark: SparkSession, store: penstock.Store, store_url: str, queue: penstock.Queue
) -> None:
    done = threading.Event()
    seen: list[dict[int, list[int]]] = []

    def read() -> None:
        with penstock.connect(store_url) as own:
            while not done.is_set():
                seen.append(everything(own.queue("q")))

    def write() -> None:
        with penstock.connect(store_url) as own:
            append_everywhere(own.queue("q"), range(APPENDS, 2 * APPENDS))

    others = [threading.Thread(target=read), threading.Thread(target=write)]
    for each in others:
        each.start()
    penstock.compact(spark, "q", url=store_url)
    others[1].join()
    penstock.compact(spark, "q", url=store_url)
    done.set()
    others[0].join()
    assert everything(queue) == complete(2 * APPENDS)
    assert segments(store) == PARTITIONS
    expected = complete(2 * APPENDS)
    assert seen
    assert all(rows == expected[partition][: len(rows)] for each in seen for partition, rows in each.items())


def test_a_task_that_is_repeated_finds_its_work_done(store_url: str, queue: penstock.Queue) -> None:
    task = compaction._CompactTask(store_url, "q", [range(PARTITIONS)])
    share = pa.RecordBatch.from_pydict({"id": [0]})
    reports = [report.column(0).to_pylist() for _ in range(2) for report in task([share])]
    assert reports == [[PARTITIONS * (APPENDS - 1)], [0]]
    assert everything(queue) == complete(APPENDS)


@pytest.mark.parametrize("task_bytes", [compaction._TASK_BYTES, 1])
def test_a_segment_that_cannot_be_read_is_named_and_the_others_are_compacted(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    task_bytes: int,
) -> None:
    """Also those of other tasks, of which Spark has not begun all when it comes to this one."""
    monkeypatch.setattr(compaction, "_TASK_BYTES", task_bytes)
    queue = store.create_queue("q", SCHEMA, partitions=PARTITIONS)
    append_everywhere(queue, range(APPENDS))
    bad = "select payload_id from penstock.segment where partition = 3 and start_index = 2"
    damage = "x'00'" if store.database.dialect == "sqlite" else "'\\x00'"
    run_sql(store.database, f"update penstock.payload set data = {damage} where payload_id in ({bad})")
    with pytest.raises(StoreError, match=r"partition 3, rows \[2, 4\)") as caught:
        penstock.compact(spark, "q", url=store_url)
    assert caught.value.condition == "SEGMENT_UNREADABLE"
    assert segments(store) == PARTITIONS - 1 + APPENDS


def test_what_cannot_be_compacted_is_named(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    with pytest.raises(QueueNotFoundError):
        penstock.compact(spark, "absent", url=store_url)
    with pytest.raises(InvalidOptionError, match="no store is named for the queue 'q'"):
        penstock.compact(spark, "q")
    with pytest.raises(InvalidNameError, match="the name of a queue is text, not NoneType"):
        penstock.compact(spark, None)  # type: ignore[arg-type]


def test_a_job_that_spark_ends_is_an_error_of_a_line(
    spark: SparkSession, store_url: str, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(*_: object) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        def dies(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            os._exit(1)
            yield from batches

        return dies

    monkeypatch.setattr(compaction, "_CompactTask", task)
    with pytest.raises(QueryFailedError, match="Spark could not compact queue 'q': ") as caught:
        penstock.compact(spark, "q", url=store_url)
    assert len(str(caught.value)) < 500
    assert everything(queue) == complete(APPENDS)


@given(
    st.lists(st.integers(0, 1 << 40), max_size=200).map(lambda sizes: list(enumerate(sizes))),
    st.integers(1, 64),
)
def test_every_partition_is_in_one_share(to_compact: list[tuple[int, int]], most: int) -> None:
    shares = compaction._shares(to_compact, most)
    assert [partition for share in shares for partition in share] == [
        partition for partition, _ in to_compact
    ]
    assert all(shares)
    assert len(shares) <= most


def test_partitions_together_take_bounded_memory(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever sizes the log says that rows in the database have."""
    run_sql(store.database, "update penstock.segment set bytes = 0 where object_id is null")
    monkeypatch.setattr(log, "GROUP_BYTES", 3000)
    loaded: list[int] = []

    def counting(*arguments: Any) -> Any:
        found = payloads.with_payloads(*arguments)
        loaded.append(sum(len(row.data) for rows in found for row in rows))
        return found

    monkeypatch.setattr(log, "with_payloads", counting)
    while queue.compact():
        pass
    assert segments(store) == PARTITIONS
    assert max(loaded) < 3 * 3000
    assert everything(queue) == complete(APPENDS)
