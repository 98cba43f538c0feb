"""Append buffers gather rows by size and by time, append them in order, and stop at an error."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import (
    CommitOutcomeUnknownError,
    InvalidInputError,
    ProducerFencedError,
    QueueNotFoundError,
    SchemaMismatchError,
    StoreError,
)
from penstock.queue.append_buffer import NumberedAppendBuffer
from penstock.queue.appends import AppendResult
from tests.support.queues import SCHEMA, everything, numbers, rows
from tests.support.waiting import wait_until

NEVER = timedelta(days=1)
AT_ONCE = timedelta(0)


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    return store.create_queue("q", SCHEMA)


class Appends:
    """Replacement for a queue's appends, which a test can delay or make fail."""

    def __init__(self, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        self.error: Exception | None = None
        self.go_on.set()
        append = queue.append_with

        def held_up(*args: object, **options: object) -> object:
            self.begun.release()
            assert self.go_on.wait(60)
            if self.error is not None:
                raise self.error
            return append(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(queue, "append_with", held_up)


@pytest.fixture
def appends(queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[Appends]:
    made = Appends(queue, monkeypatch)
    yield made
    made.go_on.set()


def test_rows_of_many_calls_are_one_append(queue: penstock.Queue) -> None:
    with queue.buffer(linger=NEVER) as buffer:
        futures = [buffer.append(rows(number)) for number in range(100)]
        assert not futures[0].done()
        buffer.flush()
        assert {future.result(0).ranges[0] for future in futures} == {(0, 100)}
        buffer.append(rows(100))
    assert numbers(queue.read(0, 0)) == list(range(101))


def test_rows_wait_for_further_rows_at_most_for_the_linger_time(queue: penstock.Queue) -> None:
    with queue.buffer(linger=timedelta(milliseconds=20), batch_bytes=1 << 40) as buffer:
        began = time.monotonic()
        assert buffer.append(rows(1)).result(30).rows == 1
        assert time.monotonic() - began >= 0.02
        assert buffer.append(rows(2)).result(30).ranges == {0: (1, 2)}


def test_a_full_batch_is_appended_immediately(queue: penstock.Queue) -> None:
    table = pa.table({"n": range(1000), "s": [None] * 1000}, schema=SCHEMA)
    with queue.buffer(linger=NEVER, batch_bytes=table.nbytes) as buffer:
        assert buffer.append(table).result(30).rows == 1000
        assert not buffer.append(table.slice(1)).done()


def test_append_waits_while_two_batches_are_full(queue: penstock.Queue, appends: Appends) -> None:
    appends.go_on.clear()
    with queue.buffer(linger=NEVER, batch_bytes=1) as buffer:
        for number in range(2):
            buffer.append(rows(number))
        third = threading.Thread(target=lambda: buffer.append(rows(2)))
        third.start()
        assert appends.begun.acquire(timeout=30)
        third.join(0.1)
        assert third.is_alive()
        appends.go_on.set()
        third.join(30)
        assert not third.is_alive()
    assert numbers(queue.read(0, 0)) == [0, 1, 2]


def _suppressed(call: Callable[[], object]) -> None:
    with suppress(StoreError):
        call()


def test_after_an_error_no_further_rows_are_appended(queue: penstock.Queue, appends: Appends) -> None:
    appends.go_on.clear()
    buffer = queue.buffer(linger=NEVER)
    first = buffer.append(rows(1))
    flushing = threading.Thread(target=partial(_suppressed, buffer.flush))
    flushing.start()
    assert appends.begun.acquire(timeout=30)
    second = buffer.append(rows(2))
    appends.error = StoreError("the disk is full")
    appends.go_on.set()
    for future in (first, second):
        assert future.exception(30) is appends.error
    flushing.join(30)
    for call in (lambda: buffer.append(rows(3)), buffer.flush, buffer.close):
        with pytest.raises(StoreError, match="the disk is full"):
            call()
    appends.error = None
    assert queue.info().rows == 0


def test_the_end_of_a_with_block_raises_the_error_of_an_append(
    queue: penstock.Queue, appends: Appends
) -> None:
    appends.error = StoreError("the disk is full")
    with pytest.raises(StoreError, match="the disk is full"), queue.buffer(linger=NEVER) as buffer:
        buffer.append(rows(1))


def test_an_error_in_a_with_block_is_not_hidden(queue: penstock.Queue, appends: Appends) -> None:
    appends.error = StoreError("the disk is full")
    buffer = queue.buffer(linger=NEVER)
    future = buffer.append(rows(1))
    with pytest.raises(KeyError), buffer:
        raise KeyError
    assert future.exception(0) is appends.error


def test_rows_that_do_not_fit_are_refused_immediately(queue: penstock.Queue) -> None:
    with queue.buffer(linger=NEVER) as buffer:
        buffer.append(rows(1))
        with pytest.raises(SchemaMismatchError):
            buffer.append([{"other": 1}])
        buffer.append(rows(2))
    assert numbers(queue.read(0, 0)) == [1, 2]


def test_a_column_that_was_added_while_rows_are_buffered_is_kept(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    with queue.buffer(linger=NEVER) as buffer:
        buffer.append(rows(1))
        store.queue("q").add_columns(pa.schema([("more", pa.string())]))
        buffer.append([{"n": 2, "more": "here"}])
    queue.refresh()
    assert queue.read(0, 0)["more"].to_pylist() == [None, "here"]


def test_a_buffer_of_a_dropped_queue_fails(store: penstock.Store, queue: penstock.Queue) -> None:
    buffer = queue.buffer(linger=NEVER)
    future = buffer.append(rows(1))
    store.drop_queue("q")
    with pytest.raises(QueueNotFoundError):
        buffer.close()
    assert isinstance(future.exception(0), QueueNotFoundError)


def test_a_closed_buffer_refuses_rows(queue: penstock.Queue) -> None:
    with queue.buffer() as buffer:
        pass
    buffer.close()
    for call in (lambda: buffer.append(rows(1)), buffer.flush):
        with pytest.raises(InvalidInputError, match="is closed: open another one"):
            call()


@pytest.mark.parametrize(
    "options", [{"linger": -1}, {"linger": timedelta(-1)}, {"batch_bytes": 0}, {"batch_bytes": "1"}]
)
def test_invalid_limits_of_a_buffer_are_refused(queue: penstock.Queue, options: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        queue.buffer(**options)  # type: ignore[arg-type]


def test_a_change_feed_has_no_buffer(store: penstock.Store, store_url: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    penstock.QueueFeed.create("feed", schema, penstock.ChangeContract("id"), store=store_url)
    with pytest.raises(InvalidInputError, match=r"QueueFeed\.append_commit"):
        store.queue("feed").buffer()


def test_a_forked_process_cannot_use_its_parents_buffer(queue: penstock.Queue, appends: Appends) -> None:
    appends.go_on.clear()
    buffer = queue.buffer(linger=NEVER, batch_bytes=1)
    for number in range(2):
        buffer.append(rows(number))
    child = os.fork()
    if child == 0:
        try:
            buffer.append(rows(2))
        except InvalidInputError as error:
            os._exit(7 if "open another one here" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    appends.go_on.set()
    buffer.close()
    assert numbers(queue.read(0, 0)) == [0, 1]


def test_large_batches_go_to_object_storage(store: penstock.Store, tmp_path: Path) -> None:
    schema = pa.schema([("data", pa.binary())])
    queue = store.create_queue("large", schema, payloads=str(tmp_path / "objects"))
    with queue.buffer(linger=NEVER) as buffer:
        for _ in range(100):
            buffer.append([{"data": os.urandom(1000)}])
    assert len(list((tmp_path / "objects").rglob("*.segments"))) == 1


def test_threads_can_share_a_buffer(queue: penstock.Queue) -> None:
    with queue.buffer(linger=AT_ONCE, batch_bytes=200) as buffer:

        def some(first: int) -> None:
            for number in range(first, first + 50):
                buffer.append(rows(number))

        threads = [threading.Thread(target=some, args=(100 * first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = numbers(queue.read(0, 0))
    assert sorted(found) == sorted(100 * first + number for first in range(4) for number in range(50))
    for first in range(4):
        own = [number for number in found if number // 100 == first]
        assert own == sorted(own)


def test_a_session_resumes_after_the_rows_that_were_appended(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    buffer = store.producer("q", "s").buffer(linger=NEVER)
    for number in (3, 4, 8):
        buffer.append(rows(number), sequence=number)
    buffer.flush()
    lost = buffer.append(rows(9), sequence=9)
    again = store.producer("q", "s")
    assert again.sequence == 8
    with again.buffer(linger=NEVER) as repeating:
        results = [repeating.append(rows(number), sequence=number) for number in (3, 4, 8, 9)]
    assert [future.result(0).skipped for future in results] == [True, True, True, False]
    assert repeating.skipped == 3
    with pytest.raises(ProducerFencedError):
        buffer.close()
    assert isinstance(lost.exception(0), ProducerFencedError)
    assert everything(queue) == {0: [3, 4, 8, 9]}


def test_sequence_numbers_in_a_buffer_must_ascend(store: penstock.Store, queue: penstock.Queue) -> None:
    producer = store.producer("q", "s")
    with producer.buffer(linger=NEVER) as buffer:
        buffer.append(rows(1), sequence=5)
        for number in (5, 2):
            with pytest.raises(InvalidInputError, match="is not above 5"):
                buffer.append(rows(2), sequence=number)
        buffer.append(rows(3))
        buffer.flush()
        assert producer.sequence == 6
    assert numbers(queue.read(0, 0)) == [1, 3]


def test_while_a_buffer_is_open_rows_are_appended_only_through_it(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    """Otherwise two appends could have the same number, and one would be skipped as a repeat."""
    producer = store.producer("q", "s")
    producer.append(rows(0))
    buffer = producer.buffer(linger=NEVER)
    for call in (lambda: producer.append(rows(9)), producer.buffer):
        with pytest.raises(InvalidInputError, match="has an open buffer"):
            call()
    buffer.append(rows(1))
    buffer.close()
    producer.append(rows(2))
    with producer.buffer() as buffer:
        buffer.append(rows(3))
    assert everything(queue) == {0: [0, 1, 2, 3]}
    assert producer.sequence == 3


def fail_with_unknown_outcome(producer: penstock.Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append ten rows through a buffer. They are committed, but the commit seems to fail."""
    append = producer._append

    def committed_and_unknown(*arguments: Any) -> object:
        append(*arguments)
        producer.sequence = -1
        raise CommitOutcomeUnknownError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(producer, "_append", committed_and_unknown)
        buffer = producer.buffer(linger=NEVER)
        for number in range(10):
            buffer.append(rows(number), sequence=number)
        with pytest.raises(CommitOutcomeUnknownError):
            buffer.close()


def test_a_buffer_resumes_after_an_append_with_an_unknown_outcome(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = store.producer("q", "s")
    fail_with_unknown_outcome(producer, monkeypatch)
    with producer.buffer(linger=NEVER) as buffer:
        assert producer.sequence == 9
        for number in range(20):
            buffer.append(rows(number), sequence=number)
    assert everything(queue) == {0: list(range(20))}


def test_a_callback_may_append_but_not_wait(queue: penstock.Queue) -> None:
    refused: list[InvalidInputError] = []

    def then(_: object) -> None:
        buffer.append(rows(2))
        for call in (buffer.flush, buffer.close):
            try:
                call()
            except InvalidInputError as error:
                refused.append(error)

    buffer = queue.buffer(linger=AT_ONCE)
    buffer.append(rows(1)).add_done_callback(then)
    wait_until(lambda: len(refused) == 2)
    buffer.close()
    assert numbers(queue.read(0, 0)) == [1, 2]


def test_a_callback_cannot_append_to_a_full_buffer(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread is waiting for room at the same time."""
    buffer = store.producer("q", "s").buffer(linger=AT_ONCE, batch_bytes=1)
    refused = 0

    def then(_: object) -> None:
        nonlocal refused
        try:
            buffer.append(rows(-1))
        except InvalidInputError:
            refused += 1

    for number in range(100):
        buffer.append(rows(number)).add_done_callback(then)
    buffer.close()
    found = numbers(queue.read(0, 0))
    assert [number for number in found if number >= 0] == list(range(100))
    assert found.count(-1) + refused == 100


def test_an_append_while_a_buffer_is_being_closed_is_not_skipped_as_a_repeat(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = store.producer("q", "s")
    append, begun, go_on = producer._append, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> AppendResult:
        begun.set()
        assert go_on.wait(60)
        return append(*arguments)

    monkeypatch.setattr(producer, "_append", slow)
    buffer = producer.buffer(linger=NEVER)
    buffer.append(rows(1))
    closing = threading.Thread(target=buffer.close)
    closing.start()
    assert begun.wait(30)
    appending = threading.Thread(target=lambda: suppressed(lambda: producer.append(rows(2))))
    appending.start()
    go_on.set()
    closing.join(30)
    appending.join(30)
    producer.append(rows(3))
    assert numbers(queue.read(0, 0))[0] == 1
    assert producer.skipped == 0


def suppressed(call: Callable[[], object]) -> None:
    with suppress(InvalidInputError):
        call()


def test_an_append_after_a_failed_buffer_continues_the_stores_sequence(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = store.producer("q", "s")
    fail_with_unknown_outcome(producer, monkeypatch)
    assert not producer.append(rows(10)).skipped
    assert everything(queue) == {0: list(range(11))}


def test_a_failed_buffer_releases_its_rows(queue: penstock.Queue, appends: Appends) -> None:
    before = pa.total_allocated_bytes()
    failed = []
    for _ in range(3):
        appends.error = StoreError("the disk is full")
        buffer = queue.buffer(linger=NEVER)
        buffer.append(pa.table({"n": range(100_000), "s": [None] * 100_000}, schema=SCHEMA))
        with pytest.raises(StoreError):
            buffer.close()
        for _ in range(20):
            with pytest.raises(StoreError) as caught:
                buffer.flush()
        assert len(traceback.extract_tb(caught.value.__traceback__)) < 20
        failed.append(buffer)
    del caught
    gc.collect()
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("linger", [timedelta.max, timedelta(days=10_000)])
def test_the_linger_time_may_be_unlimited(queue: penstock.Queue, linger: timedelta) -> None:
    with queue.buffer(linger=linger) as buffer:
        buffer.append(rows(1))
    assert numbers(queue.read(0, 0)) == [1]


def test_a_program_that_ends_appends_the_remaining_rows(
    store: penstock.Store, queue: penstock.Queue, store_url: str
) -> None:
    program = """
import datetime, sys
import penstock
queue = penstock.connect(sys.argv[1]).queue("q")
buffer = queue.buffer(linger=datetime.timedelta(days=1))
buffer.append([{"n": 1}])
if len(sys.argv) > 2:
    queue.append = buffer._append = None
"""
    done = subprocess.run(
        [sys.executable, "-c", program, store_url], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert everything(queue) == {0: [1]}
    lost = subprocess.run(
        [sys.executable, "-c", program, store_url, "lose"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "appends of rows that were buffered for queue 'q' failed" in lost.stderr


class Flaky:
    """Producer session whose appends fail at random, before or after the commit."""

    def __init__(self, failures: list[str]) -> None:
        self.rows, self._failures = list[int](), iter(failures)
        self.committed = -1

    def append(self, table: pa.Table, sequence: int | None = None) -> AppendResult:
        assert sequence is not None
        failure = next(self._failures, "none")
        if failure == "before":
            raise StoreError("nothing is appended")
        assert sequence > self.committed
        self.rows += table["n"].to_pylist()
        self.committed = sequence
        if failure == "after":
            raise StoreError("the outcome is unknown")
        return AppendResult({})


@given(
    failures=st.lists(st.sampled_from(["before", "after", "none", "none"]), max_size=6),
    batch_bytes=st.integers(1, 60),
)
def test_a_program_that_repeats_everything_after_each_error_appends_every_row_once(
    failures: list[str], batch_bytes: int
) -> None:
    session = Flaky(failures)
    for _ in range(len(failures) + 1):
        try:
            # The buffer that Producer.buffer returns.
            with NumberedAppendBuffer(
                "q", pa.Table.from_pylist, session.append, session.committed, AT_ONCE, batch_bytes
            ) as buffer:
                for number in range(20):
                    buffer.append([{"n": number}], sequence=number)
        except StoreError:
            continue
        break
    assert session.rows == list(range(20))
