"""Pumps: how far each pump has appended the changes of a server's log to queues, and which process runs it.

The transaction that appends rows also moves the pump's position from before the rows to after them. So a
process that repeats rows, or that another process has replaced, finds a different position or owner and
appends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ProducerFencedError, PumpNotFoundError, StoreError
from penstock.json_text import Json, parse_record
from penstock.store.database import Row, Transaction

ALIVE_SECONDS = 6.0
"""A pump is considered dead if its last heartbeat is older than this, in seconds."""


@dataclass(frozen=True)
class PumpPosition:
    """The position of a pump in the server's log."""

    version: int
    """The last commit whose rows have all been appended."""
    timestamp: int
    """All commits before this time have been appended. In microseconds since 1970; it never decreases."""
    part_version: int = 0
    """The commit after ``version`` if some of its rows have been appended; otherwise 0."""
    part_rows: int = 0
    """How many rows of ``part_version`` have been appended."""


@dataclass(frozen=True)
class PumpRecord:
    """A pump's record in the store."""

    name: str
    owner: str
    """The process that runs the pump, or ran it last. Empty if that process stopped normally."""
    epoch: int
    """The number of processes that have run the pump so far."""
    alive_at: int
    """The last heartbeat, in microseconds since 1970 by the database's clock."""
    position: PumpPosition
    text: str
    """The pump's state, as JSON."""

    @property
    def state(self) -> Json:
        """Return what the pump reads and how, as stored by the pump itself; empty before its first start.

        Raises
        ------
        StoreError
            If the stored state is not a JSON object.
        """
        state: Json = parse_record(self.text, f"the state of pump {self.name!r}", dict)
        return state

    def is_alive(self, now: int) -> bool:
        """Return whether a process appears to run the pump, judging by its last heartbeat."""
        # A heartbeat is in the future if the clock was set back after it.
        return bool(self.owner) and abs(now - self.alive_at) < ALIVE_SECONDS * 1_000_000

    def is_copying(self, queue: str) -> bool:
        """Return whether the pump is still copying the existing rows of a queue's table, for the first time
        or again after a recovery.
        """
        queues = self._part("queues")
        if any(queues.get(table) == queue for table in self._part("recoveries")):
            return True
        running = [each for table, each in self._part("backfills").items() if queues.get(table) == queue]
        return not all(isinstance(each, dict) and each.get("again") is True for each in running)

    def appends_to(self, queue: str) -> bool:
        """Return whether the pump appends to a queue."""
        return queue in self._part("queues").values()

    def _part(self, name: str) -> Json:
        """Return a part of the state by name; empty if no pump has written the state."""
        try:
            part = self.state.get(name)
        except StoreError:
            part = None
        return part if isinstance(part, dict) else {}


def pump_of(tx: Transaction, queue: str) -> PumpRecord | None:
    """Return the pump that appends to a queue; None if there is none."""
    return next((record for record in list_pumps(tx) if record.appends_to(queue)), None)


def find_pump(tx: Transaction, name: str) -> PumpRecord | None:
    """Return a pump or None. A write transaction locks it, since updates replace its state as a whole."""
    row = tx.one("lock_pump" if tx.write else "find_pump", name=name)
    return None if row is None else _record(row)


def list_pumps(tx: Transaction) -> list[PumpRecord]:
    return [_record(row) for row in tx.all("list_pumps")]


def create_pump(tx: Transaction, name: str, position: PumpPosition, state: str) -> None:
    """Insert a pump that no process runs yet, unless it exists already."""
    tx.run(
        "insert_pump",
        name=name,
        version=position.version,
        timestamp=position.timestamp,
        state=state,
    )


def acquire_pump(tx: Transaction, record: PumpRecord, owner: str) -> bool:
    """Make a process the owner of a pump; return False if another process became the owner first."""
    return bool(tx.run("own_pump", name=record.name, owner=owner, epoch=record.epoch, now=tx.now()))


def move_pump(tx: Transaction, name: str, owner: str, before: PumpPosition, after: PumpPosition) -> bool:
    """Move a pump's position. This locks the pump until the transaction ends.

    Return False if the position is ``after`` already: an earlier attempt with an unknown outcome has appended
    the rows.

    Raises
    ------
    ProducerFencedError
        If another process runs the pump.
    """
    moved = tx.run(
        "move_pump",
        name=name,
        owner=owner,
        now=tx.now(),
        old_version=before.version,
        old_rows=before.part_rows,
        version=after.version,
        timestamp=after.timestamp,
        part_version=after.part_version,
        part_rows=after.part_rows,
    )
    if moved:
        return True
    record = require_owned(tx, name, owner)
    if record.position == after:
        return False
    raise pump_fenced_error(name)


def require_owned(tx: Transaction, name: str, owner: str) -> PumpRecord:
    """Return a pump; raise an error if another process runs it."""
    record = find_pump(tx, name)
    if record is None:
        raise pump_removed_error(name)
    if record.owner != owner:
        raise pump_fenced_error(name)
    return record


def send_heartbeat(tx: Transaction, name: str, owner: str) -> bool:
    """Record a heartbeat; return False if another process or none runs the pump."""
    return bool(tx.run("beat_pump", name=name, owner=owner, now=tx.now()))


def set_pump_state(tx: Transaction, name: str, owner: str, state: str) -> None:
    """Store the state that a pump needs to resume."""
    if not tx.run("set_pump_state", name=name, owner=owner, state=state):
        require_owned(tx, name, owner)


def release_pump(tx: Transaction, name: str, owner: str) -> None:
    """Release a pump, so that another process can run it immediately."""
    tx.run("release_pump", name=name, owner=owner)


def delete_pump(tx: Transaction, name: str) -> None:
    tx.run("delete_pump", name=name)


def pump_removed_error(name: str) -> PumpNotFoundError:
    """Return the error for a pump that was removed from the store."""
    return PumpNotFoundError(f"the pump {name!r} was removed from the store", pump=name)


def pump_fenced_error(name: str) -> ProducerFencedError:
    """Return the error for a process that no longer runs the pump."""
    return ProducerFencedError(
        f"another process has taken over the pump {name!r}, so this process appends no more rows. No rows "
        "are lost or repeated: let this process end",
        pump=name,
    )


def _record(row: Row) -> PumpRecord:
    return PumpRecord(
        row.name,
        row.owner,
        row.epoch,
        row.alive_at,
        PumpPosition(row.version, row.timestamp, row.part_version, row.part_rows),
        row.state,
    )
