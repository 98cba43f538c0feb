"""Maintenance continues past unreadable rows, when a program exits, and after its thread has died."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import penstock
from penstock.commit.offsets import QueueOffset
from penstock.commit.source_rows import SourceRows, row_times
from penstock.errors import CheckpointMismatchError, StoreError
from penstock.queue import maintenance
from penstock.store.database import Transaction
from penstock.store.log import compact
from penstock.store.log.partition_log import COMPACTION_FAN_IN
from penstock.store.log.segmenting import Runs
from penstock.store.records import catalog
from tests.support.object_queues import large, objects
from tests.support.queues import SCHEMA, await_maintenance, everything, rows
from tests.support.raw_sql import run_sql

HOUR = 3_600_000_000


def damage(store: penstock.Store, column: str, partition: int, data: bytes = b"damaged") -> None:
    literal = f"x'{data.hex()}'" if store.database.dialect == "sqlite" else f"'\\x{data.hex()}'"
    which = f"select payload_id from penstock.segment where partition = {partition}"
    run_sql(store.database, f"update penstock.payload set {column} = {literal} where payload_id in ({which})")


def segments(queue: penstock.Queue) -> list[int]:
    return [part.segments for part in queue.info().partitions]


def test_retention_of_other_partitions_is_applied(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=3)
    for partition in range(3):
        for number in range(10):
            queue.append(rows(number), partition)
    queue.compact()
    # Some rows in the middle of a compacted segment are too old.
    for change in (
        f"segment set first_timestamp = first_timestamp - {HOUR}, last_timestamp = last_timestamp + {HOUR}",
        f"partition set last_timestamp = last_timestamp + {HOUR}, last_clock = last_clock + {HOUR}",
    ):
        run_sql(store.database, f"update penstock.{change}")
    damage(store, "runs", 0)
    queue.set_retention(penstock.Retention(age=timedelta(0)))
    with pytest.raises(StoreError, match=r"queue 'q', partition 0, rows \[0, 10\)"):
        queue.maintain()
    assert [part.rows for part in queue.info().partitions] == [10, 0, 0]


def test_other_partitions_are_compacted(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance.Maintainer, "after_change", lambda *_: None)
    queue = store.create_queue("q", SCHEMA, partitions=3)
    for partition in range(3):
        for number in range(COMPACTION_FAN_IN):
            queue.append(rows(number), partition)
    damage(store, "data", 0)
    with pytest.raises(StoreError, match="partition 0"):
        queue.maintain()
    assert segments(queue) == [COMPACTION_FAN_IN, 1, 1]


def test_values_without_bytes_are_compacted_up_to_a_segments_limit(store: penstock.Store) -> None:
    count = 9_000_000
    queue = store.create_queue("q", pa.schema([("v", pa.list_(pa.null()))]), partitions=2)
    many = pa.table({"v": pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count))})
    few = pa.table({"v": pa.array([[]], pa.list_(pa.null()))})
    for table, partition in ((many, 0), (many, 0), (few, 0), (few, 1), (few, 1)):
        queue.append(table, partition)
    assert queue.compact() == 2
    assert segments(queue) == [2, 1]
    assert [len(value) for value in queue.read(0, 0)["v"]] == [count, count, 0]


def test_an_error_in_one_queue_does_not_stop_the_maintenance_of_others(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_queue("a", SCHEMA)
    other = store.create_queue("b", SCHEMA)
    for number in range(3):
        other.append(rows(number))
    other.set_retention(penstock.Retention(rows=1))
    maintain = penstock.Queue.maintain

    def failing(queue: penstock.Queue) -> None:
        if queue.name == "a":
            raise penstock.errors.InvalidInputError("its rows are too large")
        maintain(queue)

    monkeypatch.setattr(penstock.Queue, "maintain", failing)
    with pytest.raises(penstock.errors.InvalidInputError, match="too large"):
        store.maintain()
    assert other.info().rows == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_replaced(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may raise an error that is not an Exception."""

    class Panic(BaseException):
        pass

    def panics(*_: object) -> int:
        raise Panic

    queue = store.create_queue("q", SCHEMA)
    with monkeypatch.context() as patch:
        patch.setattr(compact, "compact_newest", panics)
        for number in range(COMPACTION_FAN_IN):
            queue.append(rows(number))
        await_maintenance(store)
    for number in range(COMPACTION_FAN_IN):
        queue.append(rows(number))
    await_maintenance(store)
    assert segments(queue)[0] < COMPACTION_FAN_IN


def test_a_program_that_exits_first_compacts_small_objects(
    store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    store.create_queue("q", SCHEMA, payloads=tmp_path / "rows")
    program = f"""
import sys
import penstock
from penstock.store.log import payloads
payloads.INLINE_BYTES = 0
queue = penstock.connect(sys.argv[1]).queue("q")
for number in range({COMPACTION_FAN_IN}):
    queue.append([{{"n": number}}])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, store_url], capture_output=True, text=True, check=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert segments(store.queue("q")) == [1]
    assert everything(store.queue("q")) == {0: list(range(COMPACTION_FAN_IN))}


def test_a_missing_object_is_found_even_if_it_is_marked_as_unused(
    store: penstock.Store, tmp_path: Path
) -> None:
    queue = store.create_queue("q", pa.schema([("n", pa.int64()), ("text", pa.string())]), payloads=tmp_path)
    queue.append(large(1))
    run_sql(store.database, "update penstock.object set unused_at = 0")
    (path,) = objects(tmp_path)
    path.unlink()
    (checked,) = store.check_objects()
    assert [name.rpartition("/")[2] for name in checked.missing] == [path.name]
    assert checked.unused == 0


# Runs of segments: any program that appends can make them as long as the store allows.

LONG, PARTITIONS = 65_536, 50


@pytest.fixture
def timed(store: penstock.Store) -> tuple[penstock.Queue, list[int]]:
    """A queue whose compacted segments have the longest possible runs, and the timestamp of the tenth row of
    each partition.
    """
    queue = store.create_queue("q", SCHEMA, partitions=PARTITIONS)
    table = pa.table({"n": range(LONG), "s": [None] * LONG}, schema=SCHEMA)
    expected = []
    for partition in range(PARTITIONS):
        queue.append(table, partition)
        noise = pa.array(memoryview(os.urandom(8 * LONG)).cast("q"))
        times = pa.compute.add(pa.compute.bit_wise_and(noise, 255), pa.array(range(0, LONG * 1000, 1000)))
        runs = Runs.of(pa.array(range(1, LONG + 1)), noise, times).to_buffer()
        expected.append(times[9].as_py())
        damage(store, "runs", partition, bytes(memoryview(runs)))
    change = f"first_timestamp = 0, last_timestamp = {LONG * 1000}"
    run_sql(store.database, f"update penstock.segment set {change}")
    return queue, expected


@pytest.mark.soak
def test_reading_times_of_many_partitions_takes_limited_memory(
    store: penstock.Store, timed: tuple[penstock.Queue, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, expected = timed
    kind = type(store.database.run(lambda tx: tx, write=False))
    answers = []
    ask = kind.all

    def counting(tx: Transaction, name: str, /, **values: object) -> list[object]:
        found = ask(tx, name, **values)
        answers.append(sum(len(getattr(row, "runs", None) or b"") for row in found))
        return found

    monkeypatch.setattr(kind, "all", counting)

    def times(tx: Transaction) -> tuple[int | None, ...]:
        return row_times(tx, queue.record, catalog.partitions(tx, queue.record), [10] * PARTITIONS)

    def require(tx: Transaction, last: list[int]) -> None:
        ends = (10,) * PARTITIONS
        offset = QueueOffset(store.uuid, "q", None, queue.record.generation, 0, ends, ends, times=tuple(last))
        SourceRows().require(tx, queue.record.queue_id, offset)

    assert list(store.database.run(times, write=False)) == expected
    store.database.run(lambda tx: require(tx, expected), write=False)
    with pytest.raises(CheckpointMismatchError):
        store.database.run(lambda tx: require(tx, [*expected[:-1], expected[-1] + 1]), write=False)
    assert sum(answers) > 3 * 33 << 20
    assert max(answers) <= 32 << 20


def test_the_schema_refuses_longer_runs_than_a_segment_can_have(store: penstock.Store) -> None:
    store.create_queue("q", SCHEMA).append(rows(1))
    with pytest.raises(Exception, match=r"(?i)check constraint"):
        damage(store, "runs", 0, bytes((2 << 20) + 1))
