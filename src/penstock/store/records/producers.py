"""Producer sessions: an epoch that fences the previous holder, and a sequence number that identifies
repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ProducerFencedError, QueueNotFoundError
from penstock.store.database import Transaction
from penstock.store.records.catalog import QueueRecord


@dataclass(frozen=True)
class ProducerSession:
    queue_id: int
    session: str
    epoch: int
    sequence: int
    """The last sequence number that was appended; -1 before the first."""


def open_session(tx: Transaction, queue: QueueRecord, session: str) -> ProducerSession:
    row = tx.one("open_producer", queue_id=queue.queue_id, session=session)
    return ProducerSession(queue.queue_id, session, row.epoch, row.sequence)


def lock_session(tx: Transaction, session: ProducerSession) -> int:
    """Lock the session and return its last sequence number.

    Raises
    ------
    ProducerFencedError
        When the session has been opened again.
    """
    row = tx.one("lock_producer", queue_id=session.queue_id, session=session.session, epoch=session.epoch)
    if row is None and session.session not in (
        row.session for row in tx.all("list_producers", queue_id=session.queue_id)
    ):
        raise QueueNotFoundError(
            f"the queue of producer session {session.session!r} was dropped", session=session.session
        )
    if row is None:
        raise ProducerFencedError(
            f"producer session {session.session!r} was opened again by another producer, so this one may no "
            "longer append: stop it, or open the session again to take it over",
            session=session.session,
            epoch=session.epoch,
        )
    return int(row.sequence)


def set_sequence(tx: Transaction, session: ProducerSession, sequence: int) -> None:
    tx.run("set_sequence", queue_id=session.queue_id, session=session.session, sequence=sequence)
