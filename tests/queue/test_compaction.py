"""Compaction of small segments reduces their number, and keeps rows, timestamps and append ids."""

from __future__ import annotations

import random
import threading
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.store.log import compact, reading, segmenting
from penstock.store.log.partition_log import COMPACTION_FAN_IN
from penstock.store.log.reading import Range
from penstock.store.log.segmenting import Runs
from tests.support.queues import SCHEMA, await_maintenance, backdate, numbers, rows


def _segments(queue: penstock.Queue, partition: int = 0) -> list[Any]:
    return queue.database.run(
        lambda tx: tx.all(
            "read_segments",
            queue_id=queue.record.queue_id,
            partition=partition,
            start_index=-1,
            max_segments=10**6,
        ),
        write=False,
    )


def _appends(queue: penstock.Queue) -> list[tuple[int, int]]:
    """Return the append id and the timestamp of each row."""
    found: list[tuple[int, int]] = []
    segments = {segment.start_index: segment for segment in _segments(queue)}
    end = queue.info().partitions[0].next_index
    for chunk in reading.read(queue.database, queue.record, [Range(0, 0, end)], with_runs=True):
        count = chunk.end - chunk.start
        if chunk.runs is None:
            segment = segments[chunk.start]
            assert segment.first_append == segment.last_append
            found += [(segment.first_append, chunk.first_timestamp)] * count
        else:
            times = chunk.runs.timestamps().to_pylist()
            found += [(chunk.runs.append_at(row), times[row]) for row in range(count)]
            assert [chunk.runs.timestamp_at(row) for row in range(count)] == times
    return found


def test_compaction_keeps_rows_appends_and_timestamps(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(20):
        queue.append(rows(*[n] * (n % 4 + 1)))
    before, table = _appends(queue), queue.read(0, 0)
    assert len(set(before)) == 20
    assert before == sorted(before)
    assert queue.compact() == 19
    (merged,) = _segments(queue)
    assert (merged.first_append, merged.first_timestamp) == before[0]
    assert (merged.last_append, merged.last_timestamp) == before[-1]
    assert _appends(queue) == before
    assert queue.read(0, 0).equals(table)
    for n in range(20):
        queue.append(rows(*[n] * 3))
    before = _appends(queue)
    assert queue.compact() == 20
    assert _appends(queue) == before
    assert queue.compact() == 0


def test_a_part_of_a_compacted_segment_keeps_its_append_ids_and_timestamps(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(5):
        queue.append(rows(n, n, n))
    before = _appends(queue)
    queue.compact()
    for start in range(15):
        for end in range(start + 1, 16):
            (chunk,) = reading.read(store.database, queue.record, [Range(0, start, end)], with_runs=True)
            runs = chunk.runs
            assert runs is not None
            assert [(runs.append_at(row), runs.timestamp_at(row)) for row in range(end - start)] == before[
                start:end
            ]


def test_runs_can_be_sliced_joined_and_searched() -> None:
    runs = Runs.of([2, 3, 7], [10, 11, 12], [100, 100, 300])
    assert runs.timestamps().to_pylist() == [100, 100, 100, 300, 300, 300, 300]
    assert [runs.append_at(row) for row in range(7)] == [10, 10, 11, 12, 12, 12, 12]
    assert [runs.rows_before(time) for time in (100, 101, 300, 301)] == [0, 3, 3, 7]
    assert [runs.end_of(append) for append in (9, 10, 11, 12, 13)] == [0, 2, 3, 7, 7]
    cut = runs.slice(1, 4)
    assert cut.timestamps().to_pylist() == [100, 100, 300, 300]
    assert Runs.from_bytes(runs.to_buffer(), 7).batch.equals(runs.batch)


def test_segments_are_compacted_in_the_background_after_appends(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(4 * COMPACTION_FAN_IN):
        queue.append(rows(n))
    await_maintenance(store)
    assert len(_segments(queue)) < 3 * COMPACTION_FAN_IN
    assert numbers(queue.read(0, 0)) == list(range(4 * COMPACTION_FAN_IN))


@pytest.mark.parametrize("sizes", [[1], [1, 100], [100, 1, 1], [1] * 40 + [3000], [500, 3], [7, 70, 700]])
def test_the_number_of_segments_stays_low_and_rows_are_rarely_rewritten(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    """This tests the policy alone, without a store, on a long series of appends of mixed sizes."""
    from dataclasses import dataclass

    @dataclass
    class Fake:
        start_index: int
        end_index: int
        bytes: int = 10

    segments: list[Fake] = []
    end = rewritten = most = 0
    for step in range(6000):
        size = sizes[step % len(sizes)]
        segments.append(Fake(end, end + size))
        end += size
        if len(segments) // COMPACTION_FAN_IN > (len(segments) - 1) // COMPACTION_FAN_IN:
            for group in compact.adjacent_groups(
                compact.segments_worth_compacting(segments[: -compact.NEWEST_SEGMENTS - 1 : -1])
            ):
                if len(group) > 1:
                    first = segments.index(group[0])
                    segments[first : first + len(group)] = [Fake(group[0].start_index, group[-1].end_index)]
                    rewritten += group[-1].end_index - group[0].start_index
        most = max(most, len(segments) - end // (segmenting.SEGMENT_ROWS // 2))
    assert most < 6 * COMPACTION_FAN_IN
    assert rewritten < 6 * end


def test_compaction_respects_the_size_limit_of_segments(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compact, segmenting):
        monkeypatch.setattr(module, "SEGMENT_ROWS", 10)
    queue = store.create_queue("q", SCHEMA)
    for n in range(12):
        queue.append(rows(n, n, n))
    assert queue.compact() == 8
    assert [segment.end_index - segment.start_index for segment in _segments(queue)] == [9, 9, 9, 9]
    assert queue.compact() == 0
    assert numbers(queue.read(0, 0)) == [n for n in range(12) for _ in range(3)]


def test_compaction_stays_within_its_memory_limit(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rows that compress well would become segments that do not fit into a reader's memory."""
    monkeypatch.setattr(compact, "SEGMENT_RAW_BYTES", 50_000)
    queue = store.create_queue("q", SCHEMA)
    for n in range(20):
        queue.append([{"n": n, "s": "x" * 10_000}])
    assert queue.compact() > 10
    assert all(segment.end_index - segment.start_index <= 5 for segment in _segments(queue))
    assert numbers(queue.read(0, 0)) == list(range(20))


def test_a_compaction_that_comes_too_late_changes_nothing(store: penstock.Store) -> None:
    """Other processes have trimmed or compacted between the read and the replacement."""
    queue = store.create_queue("q", SCHEMA)
    for n in range(10):
        queue.append(rows(n))
    run = _segments(queue)
    queue.trim(0, 3)
    assert compact.compact_segments(store.database, queue.record, 0, run) == 0
    run = _segments(queue)
    assert queue.compact() == 6
    assert compact.compact_segments(store.database, queue.record, 0, run) == 0
    assert numbers(queue.read(0, 3)) == list(range(3, 10))


def test_a_replacement_of_segments_that_comes_too_late_changes_nothing(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(4):
        queue.append(rows(n))
    run = _segments(queue)
    late = compact.compact_in_memory(store.database, queue.record, [compact.SegmentGroup(0, run)])
    queue.trim(0, 1)
    assert late.replace() == [(0, 0)]
    assert numbers(queue.read(0, 1)) == [1, 2, 3]


def test_segments_of_a_restored_backup_are_not_replaced_by_a_compaction_of_earlier_ones(
    store: penstock.Store,
) -> None:
    """After a restore, new payloads get ids that other payloads had before the restore."""
    queue = store.create_queue("q", SCHEMA)
    for n in range(4):
        queue.append(rows(n))
    late = compact.compact_in_memory(
        store.database, queue.record, [compact.SegmentGroup(0, _segments(queue))]
    )
    backdate(store, 1)
    assert late.replace() == [(0, 0)]
    assert len(_segments(queue)) == 4


def test_concurrent_compactions_compact_every_segment_once(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(200):
        queue.append(rows(n))
    await_maintenance(store)
    before = len(_segments(queue))
    went: list[int] = []
    threads = [threading.Thread(target=lambda: went.append(queue.compact())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(went) == before - 1
    assert len(_segments(queue)) == 1
    assert numbers(queue.read(0, 0)) == list(range(200))


def test_a_reader_sees_every_row_once_while_others_compact_append_and_trim(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAGE_SEGMENTS", 2)
    queue = store.create_queue("q", SCHEMA)
    for n in range(100):
        queue.append(rows(n))
    await_maintenance(store)
    random_ = random.Random(1)
    expected = 0
    for chunk in reading.read(store.database, queue.record, [Range(0, 0, 100)]):
        assert chunk.start == expected
        assert chunk.batch.column("n").to_pylist() == list(range(chunk.start, chunk.end))
        expected = chunk.end
        action = random_.choice(
            [queue.compact, lambda: queue.append(rows(-1)), lambda e=expected: queue.trim(0, e)]
        )
        action()
    assert expected == 100


def test_concurrent_reads_and_compactions_in_threads_agree(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(*range(10)))
    stop = threading.Event()
    failures: list[BaseException] = []

    def until_stopped(work: Any) -> threading.Thread:
        def loop() -> None:
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def read() -> None:
        found = numbers(queue.read(0, 0))
        assert found == list(range(len(found)))

    threads = [until_stopped(read), until_stopped(queue.compact)]
    for n in range(10, 150):
        queue.append(rows(n))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert numbers(queue.read(0, 0)) == list(range(150))


def test_failed_maintenance_is_logged_and_the_next_append_works(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> int:
        raise pa.ArrowInvalid("too large")

    monkeypatch.setattr(compact, "compact_newest", broken)
    queue = store.create_queue("q", SCHEMA)
    for n in range(2 * COMPACTION_FAN_IN):
        queue.append(rows(n))
    await_maintenance(store)
    assert "maintenance of queue 'q' failed: too large" in caplog.text
    monkeypatch.undo()
    for n in range(2 * COMPACTION_FAN_IN):
        queue.append(rows(n))
    await_maintenance(store)
    assert len(_segments(queue)) < 3 * COMPACTION_FAN_IN


def test_maintenance_of_a_dropped_queue_is_skipped(
    store: penstock.Store, caplog: pytest.LogCaptureFixture
) -> None:
    queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(rows=1))
    queue.append(rows(1))
    store.drop_queue("q")
    await_maintenance(store)
    store.maintainer.after_change(queue.record, [0])
    await_maintenance(store)
    assert caplog.text == ""
