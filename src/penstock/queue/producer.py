"""A producer session: appends that may be repeated without harm."""

from __future__ import annotations

import logging
import threading

from penstock.errors import InvalidInput
from penstock.queue.queue import AppendResult, Queue, Rows
from penstock.store.database import Database, Transaction
from penstock.store.records import producers

log = logging.getLogger("penstock.queue")


class Producer:
    """One session's right to append to one queue; get one from ``Store.producer``.

    Opening a session raises its epoch: whoever held it before is refused from then on.
    """

    def __init__(self, database: Database, queue: Queue, session: str) -> None:
        self._database = database
        self._queue = queue
        self._session = database.run(lambda tx: producers.open_session(tx, queue.record, session))
        self._turn = threading.Lock()
        self.sequence = self._session.sequence
        """The last sequence number that was appended; -1 before the first."""
        self.skipped = 0
        """How many appends were repeats."""
        log.info(
            "producer session %r is opened on queue %r",
            session,
            queue.name,
            extra={"action": "session_opened", "session": session, "queue": queue.name, "epoch": self.epoch},
        )

    @property
    def epoch(self) -> int:
        """How often the session has been opened."""
        return self._session.epoch

    def append(
        self, rows: Rows, sequence: int | None = None, *, partition: int | None = None
    ) -> AppendResult:
        """Append rows once, however often it is tried.

        Parameters
        ----------
        rows
            A table, a batch, or dicts.
        sequence
            Ascending, gaps allowed; the one behind the last by default. One that is not above the last was appended
            before and is skipped. After an error repeat the same rows first: it may have happened all the same.
        partition
            As for ``Queue.append``.

        Raises
        ------
        ProducerFenced
            When the session has been opened again by somebody else.
        """
        # Without it two threads could take the same number, and one's rows would pass for a repeat of the other's.
        with self._turn:
            return self._append(rows, self.sequence + 1 if sequence is None else sequence, partition)

    def _append(self, rows: Rows, number: int, partition: int | None) -> AppendResult:
        if type(number) is not int or not 0 <= number < 2**63:
            raise InvalidInput(f"a sequence number is a whole number from 0, not {number!r}")
        repeated = False

        def first(tx: Transaction) -> bool:
            nonlocal repeated
            repeated = number <= producers.lock_session(tx, self._session)
            if not repeated:
                producers.set_sequence(tx, self._session, number)
            return not repeated

        appended = self._queue.append_with(rows, partition, first=first, idempotent=True)
        self.sequence = max(self.sequence, number)
        self.skipped += repeated
        if repeated:
            log.info(
                "an append of producer session %r to queue %r was in already, and is skipped",
                self._session.session,
                self._queue.name,
                extra={
                    "action": "append_skipped",
                    "session": self._session.session,
                    "queue": self._queue.name,
                    "sequence": number,
                },
            )
        return AppendResult(appended.ranges, skipped=repeated)
