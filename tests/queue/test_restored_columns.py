"""Programs that know columns of a queue, although its store was restored from a backup without these
columns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import CommitRefusedError, SchemaMismatchError
from penstock.store import staging
from penstock.store.log import partition_log
from penstock.store.log.segmenting import Segment
from penstock.store.log.written import TaskSegments
from penstock.store.records.catalog import QueueChanged
from penstock.store.staging import Attempt
from tests.support.raw_sql import run_sql

FIRST = pa.schema([("n", pa.int32())])
A, B = pa.field("a", pa.string()), pa.field("b", pa.string())


def restore(store: penstock.Store) -> None:
    """Restore a backup that was made before any column was added or widened."""
    run_sql(store.database, "update penstock.queue set added_columns = null")


@pytest.fixture
def old(store: penstock.Store) -> penstock.Queue:
    """The queue object of a program that opened the queue before its store was restored."""
    store.create_queue("q", FIRST, partitions=2).append([{"n": 0}], 0)
    queue = store.queue("q")
    queue.add_columns(A)
    restore(store)
    assert queue.schema.names == ["n", "a"]
    return queue


def rows(queue: penstock.Queue) -> list[dict[str, Any]]:
    tables = [queue.read(partition, 0) for partition in range(queue.partitions)]
    return [row for table in tables for row in table.to_pylist()]


def test_rows_with_a_lost_column_are_refused_until_it_is_added_again(
    store: penstock.Store, old: penstock.Queue
) -> None:
    with pytest.raises(SchemaMismatchError, match="there is no column 'a'"):
        old.append([{"n": 1, "a": "x"}], 0)
    assert rows(store.queue("q")) == [{"n": 0}]
    store.queue("q").add_columns(A)
    old.append([{"n": 1, "a": "x"}], 0)
    assert rows(store.queue("q")) == [{"n": 0, "a": None}, {"n": 1, "a": "x"}]


@pytest.mark.parametrize("count", [1, 2])
def test_rows_without_the_lost_column_are_appended_with_the_remaining_columns(
    store: penstock.Store, old: penstock.Queue, count: int
) -> None:
    old.append([{"n": each} for each in range(count)], 1)
    assert rows(store.queue("q")) == [{"n": 0}, *({"n": each} for each in range(count))]


def test_a_producer_session_continues_with_the_remaining_columns(store: penstock.Store) -> None:
    store.create_queue("q", FIRST).add_columns(A)
    producer = store.producer("q", "s")
    producer.append([{"n": 1, "a": "x"}])
    restore(store)
    run_sql(store.database, "delete from penstock.segment")
    run_sql(store.database, "delete from penstock.payload")
    run_sql(store.database, "update penstock.partition set next_index = 0, bytes = 0, segments = 0")
    with pytest.raises(SchemaMismatchError, match="there is no column 'a'"):
        producer.append([{"n": 2, "a": "x"}])
    producer.append([{"n": 2}])
    assert rows(store.queue("q")) == [{"n": 2}]


def test_a_lost_wider_type_is_refused_for_the_values_that_need_it(store: penstock.Store) -> None:
    store.create_queue("q", FIRST)
    old = store.queue("q")
    old.widen_columns(pa.field("n", pa.int64()))
    restore(store)
    with pytest.raises(SchemaMismatchError):
        old.append([{"n": 1 << 40}])
    old.append([{"n": 1}])
    assert rows(store.queue("q")) == [{"n": 1}]


def test_a_column_added_in_its_place_does_not_get_its_values(
    store: penstock.Store, old: penstock.Queue
) -> None:
    store.queue("q").add_columns(B)
    with pytest.raises(SchemaMismatchError, match="there is no column 'a'"):
        old.append([{"n": 1, "a": "x"}], 0)
    old.append([{"n": 2}], 0)
    assert rows(store.queue("q")) == [{"n": 0, "b": None}, {"n": 2, "b": None}]


def test_columns_added_again_in_another_order_are_read_and_compacted_by_name(store: penstock.Store) -> None:
    store.create_queue("q", FIRST)
    old = store.queue("q")
    old.add_columns([A, B])
    restore(store)
    new = store.queue("q")
    new.add_columns([B, A])
    for number in range(2):
        new.append([{"n": number, "a": "of a", "b": "of b"}])
    expected = [{"n": number, "a": "of a", "b": "of b"} for number in range(2)]
    assert rows(old) == expected
    assert old.compact() == 1
    assert rows(old) == expected
    assert rows(store.queue("q")) == expected
    old.append([{"n": 2, "a": "of a", "b": "of b"}])
    assert rows(store.queue("q"))[2] == {"n": 2, "a": "of a", "b": "of b"}


ATTEMPT = Attempt("app", 0, 0, "1")


def stage(store: penstock.Store, queue: penstock.Queue, segments: list[Segment]) -> None:
    staging.stage_segments(store.database, queue.record, ATTEMPT, segments, 0)


def publish_written(store: penstock.Store, queue: penstock.Queue, segments: list[Segment]) -> None:
    record, folder = queue.record, Path(tempfile.mkdtemp())
    (folder / store.uuid).mkdir()
    storage = store.database.storages.at(folder.as_uri())
    written = [TaskSegments.of(storage, store.database.uuid, record.queue_id, segments, 0)]
    store.database.run(lambda tx: staging.publish_written(tx, record, "app", 0, written))


def publish_objects(store: penstock.Store, queue: penstock.Queue, segments: list[Segment]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock.store.log.payloads.INLINE_BYTES", 0)
        publish_written(store, queue, segments)


def append(store: penstock.Store, queue: penstock.Queue, segments: list[Segment]) -> None:
    store.database.run(lambda tx: partition_log.append(tx, queue.record, segments))


def append_at_least_once(store: penstock.Store, queue: penstock.Queue, segments: list[Segment]) -> None:
    partition_log.append_at_least_once(store.database, queue.record, segments)


@pytest.mark.parametrize("write", [stage, publish_written, publish_objects, append, append_at_least_once])
@pytest.mark.parametrize("partitions", [[0], [0, 1]])
@pytest.mark.parametrize("again", [False, True])
def test_rows_that_tasks_prepared_with_a_lost_column_are_refused(
    store: penstock.Store,
    old: penstock.Queue,
    write: Callable[[penstock.Store, penstock.Queue, list[Segment]], None],
    partitions: list[int],
    again: bool,
) -> None:
    _, placement = old.current_placement()
    table = pa.table({"n": pa.array([1], pa.int32()), "a": ["x"]})
    segments = [each for part in partitions for each in old.segments_of(table, placement, part)]
    if again:
        # A column that is added again is a different column.
        store.queue("q").add_columns(A)
    with pytest.raises(QueueChanged, match="restored from an older backup") as refused:
        write(store, old, segments)
    assert isinstance(refused.value, CommitRefusedError)
    assert refused.value.condition == "COMMIT_REFUSED.QUEUE_CHANGED"
    assert [row["n"] for row in rows(store.queue("q"))] == [0]
    assert run_sql(store.database, "select count(*) from penstock.payload")[0][0] == 1
