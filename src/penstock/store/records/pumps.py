"""Pumps: how far each has brought the changes of a server's log into queues, and which process runs it.

The transaction that appends rows also moves the pump's position from before them to after them. So a process
that repeats rows, or has lost the pump to another process, finds another position or owner and appends
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ProducerFencedError, PumpNotFoundError, StoreError
from penstock.json_text import Json, parse_record
from penstock.store.database import Row, Transaction

ALIVE_SECONDS = 6.0
"""How long after its last heartbeat a pump is considered dead."""


@dataclass(frozen=True)
class PumpPosition:
    """How far a pump has got."""

    version: int
    """The last commit all of whose rows are appended."""
    timestamp: int
    """The time before which all commits are appended, in microseconds since 1970; never falls."""
    part_version: int = 0
    """The commit after ``version`` if some of its rows are appended; otherwise 0."""
    part_rows: int = 0
    """How many rows of ``part_version`` are appended."""


@dataclass(frozen=True)
class PumpRecord:
    """A pump's record in the store."""

    name: str
    owner: str
    """The process that runs it, or ran it last; empty if that process stopped normally."""
    epoch: int
    """How many processes have run it."""
    alive_at: int
    """The last heartbeat, in microseconds since 1970 by the database's clock."""
    position: PumpPosition
    text: str
    """Its state as JSON."""

    @property
    def state(self) -> Json:
        """What the pump reads and how, as the pump has written it; empty before its first start.

        Raises
        ------
        StoreError
            When the stored state is not a JSON object.
        """
        state: Json = parse_record(self.text, f"the state of pump {self.name!r}", dict)
        return state

    def is_alive(self, now: int) -> bool:
        """Whether a process appears to run it, by its last heartbeat."""
        # A heartbeat in the future dates from before the clock was set back.
        return bool(self.owner) and abs(now - self.alive_at) < ALIVE_SECONDS * 1_000_000

    def is_copying(self, queue: str) -> bool:
        """Whether a queue does not yet have the existing rows of its table, because the pump is still copying
        them: for the first time, or again after a recovery.
        """
        queues = self._part("queues")
        if any(queues.get(table) == queue for table in self._part("recoveries")):
            return True
        running = [each for table, each in self._part("backfills").items() if queues.get(table) == queue]
        return not all(isinstance(each, dict) and each.get("again") is True for each in running)

    def appends_to(self, queue: str) -> bool:
        """Whether the pump appends to a queue."""
        return queue in self._part("queues").values()

    def _part(self, name: str) -> Json:
        """Return a part of the state by name; empty if the state is not one that a pump has written."""
        try:
            part = self.state.get(name)
        except StoreError:
            part = None
        return part if isinstance(part, dict) else {}


def pump_of(tx: Transaction, queue: str) -> PumpRecord | None:
    """Return the pump that appends to a queue."""
    return next((record for record in list_pumps(tx) if record.appends_to(queue)), None)


def find_pump(tx: Transaction, name: str) -> PumpRecord | None:
    """Return a pump or None; a write transaction locks it, since its state is replaced as a whole."""
    row = tx.one("lock_pump" if tx.write else "find_pump", name=name)
    return None if row is None else _record(row)


def list_pumps(tx: Transaction) -> list[PumpRecord]:
    return [_record(row) for row in tx.all("list_pumps")]


def create_pump(tx: Transaction, name: str, position: PumpPosition, state: str) -> None:
    """Insert a pump that no process runs yet, unless it exists."""
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
    """Move a pump's position, which locks the pump until the transaction ends.

    Return False if the position is ``after`` already: an attempt with an unknown outcome has appended the
    rows.

    Raises
    ------
    ProducerFencedError
        When another process runs the pump.
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
    """Return a pump; refuse it if another process runs it."""
    record = find_pump(tx, name)
    if record is None:
        raise pump_removed_error(name)
    if record.owner != owner:
        raise pump_fenced_error(name)
    return record


def send_heartbeat(tx: Transaction, name: str, owner: str) -> bool:
    """Send a heartbeat; return False if another process runs the pump, or none does."""
    return bool(tx.run("beat_pump", name=name, owner=owner, now=tx.now()))


def set_pump_state(tx: Transaction, name: str, owner: str, state: str) -> None:
    """Store the state that a pump needs to resume."""
    if not tx.run("set_pump_state", name=name, owner=owner, state=state):
        require_owned(tx, name, owner)


def release_pump(tx: Transaction, name: str, owner: str) -> None:
    """Let another process run the pump immediately."""
    tx.run("release_pump", name=name, owner=owner)


def delete_pump(tx: Transaction, name: str) -> None:
    tx.run("delete_pump", name=name)


def pump_removed_error(name: str) -> PumpNotFoundError:
    """Return the error for a pump that was removed from the store."""
    return PumpNotFoundError(f"the pump {name!r} was removed from the store", pump=name)


def pump_fenced_error(name: str) -> ProducerFencedError:
    """Return the error for a process that no longer runs the pump."""
    return ProducerFencedError(
        f"another process has taken over the pump {name!r}, so this one appends nothing more. Nothing is "
        "lost or repeated: let it end",
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
