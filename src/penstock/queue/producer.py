"""Producer sessions: appends that a program can safely repeat."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import timedelta

from penstock.errors import InvalidInputError, ProducerFencedError, QueueNotFoundError
from penstock.queue.append_buffer import BATCH_BYTES, LINGER, NumberedAppendBuffer
from penstock.queue.appends import AppendResult, Rows, check_sequence
from penstock.queue.checks import refuse_feed
from penstock.queue.queue import Queue
from penstock.store.database import Database, Row, Transaction
from penstock.store.forks import ForkSafeLock
from penstock.store.log.partition_log import Appended
from penstock.store.records.catalog import within_limits

log = logging.getLogger("penstock.queue")


class Producer:
    """A session that appends to one queue. Get one from ``Store.producer``.

    Opening a session raises its epoch. From then on, programs that opened it earlier are refused.
    """

    def __init__(self, database: Database, queue: Queue, session: str) -> None:
        self._database = database
        self._queue = queue
        self._keys = {"queue_id": queue.record.queue_id, "session": session}
        # The epoch is not unique: if the store was restored from a backup, a later session may get the same
        # one.
        self._owner = str(uuid.uuid4())
        self._session = session
        row = database.run(self._open_session)
        self._epoch: int = row.epoch
        # A buffer's thread may hold the lock while another thread forks the process.
        self._lock = ForkSafeLock()
        self._buffer: NumberedAppendBuffer | None = None
        self.sequence: int = row.sequence
        """The last sequence number that was appended; -1 if there is none."""
        self.skipped = 0
        """The number of appends that were skipped because they were repeats."""
        log.info(
            "producer session %r is opened on queue %r",
            session,
            queue.name,
            extra={"action": "session_opened", "session": session, "queue": queue.name, "epoch": self.epoch},
        )

    @property
    def epoch(self) -> int:
        """The number of times that the session has been opened."""
        return self._epoch

    def append(
        self, rows: Rows, sequence: int | None = None, *, partition: int | None = None
    ) -> AppendResult:
        """Append rows exactly once, however often you repeat the call.

        Parameters
        ----------
        rows
            A table, a batch, or dicts.
        sequence
            A number above the last one, with gaps allowed; by default the last one plus 1. A call with a
            number that is not above the last one is a repeat, and its rows are skipped. After an error, first
            repeat the same rows, since they may have been appended.
        partition
            The partition; by default the partition of each row's key, or any one if the queue has no key.

        Raises
        ------
        ProducerFencedError
            When another program has opened the session since.
        """
        # Otherwise two threads could take the same number, and the rows of one would be skipped as repeats.
        with self._lock:
            self._refuse_open_buffer()
            if self._buffer is not None and self._buffer.has_failed:
                self.sequence = self._stored_sequence()
            self._buffer = None
            return self._append(rows, self.sequence + 1 if sequence is None else sequence, partition)

    def buffer(self, *, linger: timedelta = LINGER, batch_bytes: int = BATCH_BYTES) -> NumberedAppendBuffer:
        """Return a buffer that gathers rows and appends them together, exactly once.

        While the buffer is open, :meth:`append` is refused. Opening a buffer sets ``sequence`` to the last
        number in the store. So after an error with an unknown outcome, open another buffer, and send the rows
        with higher numbers again.

        Parameters
        ----------
        linger
            The longest time that the first row of a batch waits for more rows; by default 250 ms.
        batch_bytes
            A batch is appended as soon as its rows reach this many bytes, uncompressed; by default 8 MiB.

        Raises
        ------
        InvalidInputError
            When the session has another open buffer, or the queue holds a change feed.
        ProducerFencedError
            When another program has opened the session since.
        """
        refuse_feed(self._queue.record)
        with self._lock:
            self._refuse_open_buffer()
            self.sequence = self._stored_sequence()
            self._buffer = NumberedAppendBuffer(
                self._queue.name,
                self._queue.rows_to_append,
                self._append_buffered,
                self.sequence,
                linger,
                batch_bytes,
            )
            return self._buffer

    def _append_buffered(self, rows: Rows, number: int) -> AppendResult:
        with self._lock:
            return self._append(rows, number, None)

    def _refuse_open_buffer(self) -> None:
        if self._buffer is not None and not self._buffer.is_over:
            raise InvalidInputError(
                f"producer session {self._session!r} has an open buffer, which numbers the appends: append "
                "through the buffer, or close it first"
            )

    def _append(self, rows: Rows, number: int, partition: int | None) -> AppendResult:
        check_sequence(number)
        repeated = False

        def append_once(tx: Transaction, append: Callable[[], Appended]) -> Appended:
            nonlocal repeated
            repeated = number <= self._locked_sequence(tx)
            if repeated:
                return Appended()
            tx.run("set_sequence", sequence=number, **self._keys)
            return append()

        refuse_feed(self._queue.record)
        appended = self._queue.append_with(rows, partition, hook=append_once, idempotent=True)
        self.sequence = max(self.sequence, number)
        self.skipped += repeated
        if repeated:
            log.info(
                "an append of producer session %r to queue %r was committed before, and is skipped",
                self._session,
                self._queue.name,
                extra={
                    "action": "append_skipped",
                    "session": self._session,
                    "queue": self._queue.name,
                    "sequence": number,
                },
            )
        return AppendResult(appended.ranges, skipped=repeated)

    def _open_session(self, tx: Transaction) -> Row:
        with within_limits(f"producer session {self._session!r} of queue {self._queue.name!r}"):
            row: Row = tx.one("open_producer", owner=self._owner, **self._keys)
        return row

    def _stored_sequence(self) -> int:
        """Return the last sequence number in the store. This waits for any append with an unknown outcome
        that is still in flight.
        """
        return self._database.run(self._locked_sequence, idempotent=True)

    def _locked_sequence(self, tx: Transaction) -> int:
        """Lock the session, and return its last sequence number."""
        row = tx.one("lock_producer", epoch=self._epoch, owner=self._owner, **self._keys)
        if row is not None:
            return int(row.sequence)
        sessions = tx.all("list_producers", queue_id=self._keys["queue_id"])
        if self._session not in (other.session for other in sessions):
            raise QueueNotFoundError(
                f"the queue of producer session {self._session!r} was dropped", session=self._session
            )
        raise ProducerFencedError(
            f"another program has opened producer session {self._session!r} since, so this producer can no "
            "longer append: stop this program, or open the session again to take it over",
            session=self._session,
            epoch=self._epoch,
        )
