"""Requests for recoveries of a pump, and their progress, in the pump's state in the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.errors import InvalidInputError, PumpNotFoundError
from penstock.instants import now_micros
from penstock.json_text import Json, unreadable_record
from penstock.pump.backfill_records import count, is_keyed
from penstock.store.records import pumps

if TYPE_CHECKING:
    from penstock.queue.store import Store
    from penstock.store.database import Transaction

_REQUEST = "recovery_request"


@dataclass(frozen=True)
class RecoveryRequest:
    """A request that a pump recovers."""

    asked_at: int
    """The time of the request, in microseconds since 1970."""
    force: bool
    """Whether the pump recovers even if it can resume; also set once a recovery has begun."""
    server: str | None = None
    """The system identifier of another server that has taken the place of the pump's; None if none has."""

    @classmethod
    def of(cls, name: str, state: Json) -> RecoveryRequest | None:
        """Return the request in a pump's state; None if there is none."""
        value = state.get(_REQUEST)
        if value is None:
            return None
        try:
            server = value.get("server")
            if not isinstance(server, str | None):
                raise TypeError(server)
            return cls(count(value["asked_at"]), bool(value["force"]), server)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise unreadable_record(f"the state of pump {name!r}", error) from None

    def enter(self, state: Json) -> None:
        state[_REQUEST] = asdict(self)

    @staticmethod
    def remove(state: Json) -> None:
        state.pop(_REQUEST, None)


@dataclass(frozen=True)
class TableRecovery:
    """A table of a recovered pump whose queue may still have rows that the table does not have."""

    upto: int
    """The last commit from before the recovery. A row that the queue has from then, and that has not come
    again since all rows were read, was deleted.
    """
    is_read: bool
    """Whether all rows have been read again."""

    def to_json(self) -> Json:
        return asdict(self)


def recoveries_of(name: str, state: Json) -> dict[str, TableRecovery]:
    """Return the recoveries in a pump's state that are not complete, by table."""
    try:
        return {
            str(table): TableRecovery(count(value["upto"]), bool(value["is_read"]))
            for table, value in state.get("recoveries", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable_record(f"the state of pump {name!r}", error) from None


def note_read(state: Json, table: str) -> None:
    """Note that all rows of a table have been read again."""
    recovery = state.get("recoveries", {}).get(table)
    if recovery is not None:
        recovery["is_read"] = True


def note_recovered(state: Json, table: str) -> None:
    """Note that the recovery of a table is complete."""
    state.get("recoveries", {}).pop(table, None)


def ask_for_recovery(store: Store, pump: str, *, force: bool = False, server: str | None = None) -> None:
    """Ask a pump to recover when it runs next: to create a new slot, and to read all rows again.

    Parameters
    ----------
    force
        Whether it recovers even if it can resume.
    server
        The system identifier of the server that has taken the place of the one that the pump has read from.
        Rows that it does not have are deleted in all copies, so the pump reads from no other server unless
        that is named.

    Raises
    ------
    PumpNotFoundError
    InvalidInputError
        When the pump has one queue for all tables, or a table without a primary key.
    """

    def ask(tx: Transaction) -> None:
        record = pumps.find_pump(tx, pump)
        if record is None:
            raise PumpNotFoundError(f"there is no pump {pump!r}: `penstock pump list` lists them", pump=pump)
        state = record.state
        _require_recoverable(pump, state)
        before = RecoveryRequest.of(pump, state)
        force_too = force or (before is not None and before.force)
        named = server if server is not None or before is None else before.server
        RecoveryRequest(now_micros(), force_too, named).enter(state)
        pumps.set_pump_state(tx, pump, record.owner, json.dumps(state))

    store.database.run(ask, idempotent=True)


def _require_recoverable(pump: str, state: Json) -> None:
    if not state:
        raise InvalidInputError(f"pump {pump!r} has not copied any row yet: run it", pump=pump)
    start_over = "start over: `penstock pump remove`, a new slot and other queues"
    if state.get("together") is not None:
        raise InvalidInputError(
            f"pump {pump!r} has one queue for all tables, and cannot read them again: {start_over}", pump=pump
        )
    for table in state.get("queues", {}):
        if not is_keyed(pump, state, table):
            raise InvalidInputError(
                f"{table} has no primary key, by which its rows could be read again: {start_over}",
                pump=pump,
                table=table,
            )
