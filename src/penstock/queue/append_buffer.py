"""Gather the rows of many small appends into a few large ones, limited by size and time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

import pyarrow as pa

from penstock.arguments import require
from penstock.errors import InvalidInputError, condition_of
from penstock.queue.appends import AppendResult, Rows, check_sequence
from penstock.redaction import redacted_message

log = logging.getLogger("penstock.queue")

LINGER = timedelta(milliseconds=250)
BATCH_BYTES = 8 << 20
_MAX_FULL_BATCHES = 2
"""``append`` blocks while there are this many full batches."""


def _running_future() -> Future[AppendResult]:
    """Return a future that cannot be cancelled, since its rows are appended together with other rows."""
    future: Future[AppendResult] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class _Batch:
    """Rows that one append will contain."""

    due: float
    tables: list[pa.Table] = field(default_factory=list)
    bytes: int = 0
    sequence: int = 0
    """The highest sequence number of the rows; 0 if they have none."""
    future: Future[AppendResult] = field(default_factory=_running_future)


class AppendBuffer:
    """A buffer in front of a queue; get one from ``Queue.buffer``.

    A background thread appends one batch at a time, in the order in which rows were buffered. Rows are
    durable once the future that :meth:`append` returned has a result. If the process is killed, rows in the
    buffer are lost. If the program exits without calling :meth:`close`, the remaining rows are appended.

    Callbacks of the futures run in that thread. They must not call :meth:`flush` or :meth:`close`. If
    :meth:`append` would have to wait there, it raises InvalidInputError.

    After an error, the buffer appends nothing more, so that no later rows overtake the failed ones. It logs
    the error, the futures of all rows in the buffer fail with it, and further calls raise it. As a context
    manager, the buffer appends the remaining rows when the block ends, even if the block raised an exception.
    """

    def __init__(
        self,
        name: str,
        check: Callable[[Rows], pa.Table],
        append: Callable[[pa.Table, int], AppendResult],
        linger: timedelta,
        batch_bytes: int,
    ) -> None:
        require("linger", linger, timedelta, "a timedelta")
        require("batch_bytes", batch_bytes, int, "a whole number of bytes")
        if linger < timedelta(0) or batch_bytes < 1:
            raise InvalidInputError(
                f"a buffer has a linger of at least 0 and batches of at least 1 byte, not {linger!r} and "
                f"{batch_bytes!r}"
            )
        self._name, self._check, self._append = name, check, append
        self._linger, self._batch_bytes = linger.total_seconds(), batch_bytes
        self._condition = threading.Condition()
        self._current_batch: _Batch | None = None
        self._full_batches: deque[_Batch] = deque()
        """The full batches, including the one that the thread is appending."""
        self._last_future: Future[AppendResult] | None = None
        self._closed = False
        self._is_finished = False
        """Whether the thread will append no more rows."""
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._process = os.getpid()
        # A daemon thread, which the function below ends: the program would wait for ever for any other
        # thread.
        self._thread = threading.Thread(target=self._run, name=f"penstock appends to {name}", daemon=True)
        atexit.register(self._close_at_exit)
        self._thread.start()

    def append(self, rows: Rows) -> Future[AppendResult]:
        """Buffer rows, and return the future of the append that they will be part of.

        Blocks while two batches are waiting to be appended, or being appended.

        Parameters
        ----------
        rows
            A table, a batch, or dicts, as for ``Queue.append``. They are checked immediately.

        Raises
        ------
        SchemaMismatchError
            When a row does not fit; no rows of this call are buffered.
        InvalidInputError
            When the buffer is closed, or a forked child process makes the call.
        """
        self._refuse_other_process()
        return self._add(self._check(rows), lambda: 0)

    def flush(self) -> None:
        """Append all rows in the buffer, and wait until they are appended."""
        self._refuse_other_process()
        self._refuse_own_thread()
        with self._condition:
            self._require_open()
            self._finish_batch()
            last = self._last_future
        if last is not None:
            last.result()

    def close(self) -> None:
        """Append all rows in the buffer, then stop the thread. A second call does nothing."""
        self._finish()
        self._raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._finish()
        # If the block raised an error, that error is more useful. It may even be the same error.
        if kind is None:
            self._raise_error()

    def _add(self, table: pa.Table, next_sequence: Callable[[], int]) -> Future[AppendResult]:
        """Buffer rows with a sequence number. ``next_sequence`` is called once the buffer has room for
        them.
        """
        with self._condition:
            if len(self._full_batches) >= _MAX_FULL_BATCHES:
                self._refuse_own_thread()
            self._condition.wait_for(lambda: self._has_ended() or len(self._full_batches) < _MAX_FULL_BATCHES)
            self._require_open()
            sequence = next_sequence()
            batch = self._current_batch
            if batch is not None and batch.tables[0].schema != table.schema:
                # The queue has new columns, so these rows need another batch.
                self._finish_batch()
                batch = None
            if batch is None:
                batch = self._current_batch = _Batch(time.monotonic() + self._linger)
                self._condition.notify_all()
            batch.tables.append(table)
            batch.bytes += table.nbytes
            batch.sequence = sequence
            if batch.bytes >= self._batch_bytes:
                self._finish_batch()
            return batch.future

    def _finish(self) -> None:
        self._refuse_other_process()
        self._refuse_own_thread()
        with self._condition:
            self._finish_batch()
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process:
            # The thread has logged the error already.
            self._finish()

    def _finish_batch(self) -> None:
        """Hand the current batch to the thread."""
        if self._current_batch is not None:
            self._full_batches.append(self._current_batch)
            self._last_future = self._current_batch.future
            self._current_batch = None
            self._condition.notify_all()

    @property
    def is_over(self) -> bool:
        """Return whether the buffer will append no more rows."""
        return self._is_finished

    @property
    def has_failed(self) -> bool:
        """Return whether an append failed, in which case it is unknown which rows were appended."""
        return self._error is not None

    def _has_ended(self) -> bool:
        return self._closed or self._error is not None

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidInputError(
                f"this call is in a callback of a future, and would wait for ever for the thread that "
                f"appends to queue {self._name!r}: make it in another thread"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            # Many calls may raise this error: reset its traceback each time.
            raise self._error.with_traceback(self._trace)

    def _require_open(self) -> None:
        self._raise_error()
        if self._closed:
            raise InvalidInputError(f"the buffer of queue {self._name!r} is closed: open another one")

    def _refuse_other_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"this buffer of queue {self._name!r} belongs to the process that this one was forked "
                "from: open another one here"
            )

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                result = self._append(pa.concat_tables(batch.tables), batch.sequence)
                with self._condition:
                    self._full_batches.popleft()
                    self._condition.notify_all()
                batch.future.set_result(result)
        except BaseException as error:  # all waiting callers must get it
            self._fail(error)
        finally:
            self._is_finished = True
            # Otherwise the buffer would stay in memory as long as the program runs.
            atexit.unregister(self._close_at_exit)

    def _next_batch(self) -> _Batch | None:
        """Wait for a batch that is full or due; return None if the buffer is closed and empty."""
        with self._condition:
            while not self._full_batches and not self._closed:
                if self._current_batch is None:
                    self._condition.wait()
                elif (seconds_left := self._current_batch.due - time.monotonic()) > 0:
                    self._condition.wait(min(seconds_left, threading.TIMEOUT_MAX))
                else:
                    self._finish_batch()
            return self._full_batches[0] if self._full_batches else None

    def _fail(self, error: BaseException) -> None:
        # The frames would keep the rows in memory.
        traceback.clear_frames(error.__traceback__)
        with self._condition:
            self._finish_batch()
            self._error, self._trace = error, error.__traceback__
            failed = list(self._full_batches)
            self._full_batches.clear()
            self._condition.notify_all()
        log.error(
            "appends of rows that were buffered for queue %r failed: %s",
            self._name,
            redacted_message(error),
            extra={"action": "buffer_failed", "queue": self._name, "error": condition_of(error)},
        )
        for batch in failed:
            batch.tables.clear()
            batch.future.set_exception(error)


class NumberedAppendBuffer(AppendBuffer):
    """A buffer that appends through a producer session; get one from ``Producer.buffer``.

    Each batch is appended atomically, with the highest sequence number in it. After an error, open another
    buffer. The session's ``sequence`` is then the last number that the store has, and you must send rows with
    higher numbers again.
    """

    def __init__(
        self,
        name: str,
        check: Callable[[Rows], pa.Table],
        append: Callable[[pa.Table, int], AppendResult],
        sequence: int,
        linger: timedelta,
        batch_bytes: int,
    ) -> None:
        super().__init__(name, check, append, linger, batch_bytes)
        self._stored_sequence = self._last_sequence = sequence
        self.skipped = 0
        """The number of calls that were skipped because the store already had their rows."""

    def append(self, rows: Rows, sequence: int | None = None) -> Future[AppendResult]:
        """Buffer rows exactly once, and return the future of the append that they will be part of.

        Blocks while two batches are waiting to be appended, or being appended.

        Parameters
        ----------
        rows
            A table, a batch, or dicts, as for ``Queue.append``. They are checked immediately.
        sequence
            A number above that of the previous call; by default that number plus 1. Pass your own numbers if
            you may have to repeat rows. The buffer skips calls whose number is at most the session's
            ``sequence`` at the time the buffer was opened, because the store already has their rows.

        Raises
        ------
        SchemaMismatchError
            When a row does not fit; no rows of this call are buffered.
        InvalidInputError
            When the number is not above that of the previous call, the buffer is closed, or a forked child
            process makes the call.
        """
        self._refuse_other_process()
        table = self._check(rows)
        if sequence is not None:
            check_sequence(sequence)
            if sequence <= self._stored_sequence:
                return self._skip()

        def next_sequence() -> int:
            assigned = self._last_sequence + 1 if sequence is None else sequence
            check_sequence(assigned)
            if assigned <= self._last_sequence:
                raise InvalidInputError(
                    f"the sequence number {assigned} is not above {self._last_sequence}, which was buffered "
                    "before it"
                )
            self._last_sequence = assigned
            return assigned

        return self._add(table, next_sequence)

    def _skip(self) -> Future[AppendResult]:
        with self._condition:
            self._require_open()
            self.skipped += 1
        future = _running_future()
        future.set_result(AppendResult({}, skipped=True))
        return future
