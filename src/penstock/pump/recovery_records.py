"""Requests for recoveries of a pump, and their progress, in the pump's stored state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.errors import InvalidInputError, PumpNotFoundError
from penstock.instants import now_micros
from penstock.json_text import Json, unreadable_record
from penstock.pump.backfill_records import is_keyed, parse_count
from penstock.store.records import pumps

if TYPE_CHECKING:
    from penstock.queue.store import Store
    from penstock.store.database import Transaction

_REQUEST = "recovery_request"


@dataclass(frozen=True)
class RecoveryRequest:
    """A request to recover a pump."""

    asked_at: int
    """The time of the request, in microseconds since 1970."""
    force: bool
    """Whether to recover even if the pump can resume; also set when a recovery has begun."""
    server: str | None = None
    """The system identifier of the server that has replaced the pump's server; None if it is the same."""

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
            return cls(parse_count(value["asked_at"]), bool(value["force"]), server)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise unreadable_record(f"the state of pump {name!r}", error) from None

    def store_in(self, state: Json) -> None:
        state[_REQUEST] = asdict(self)

    @staticmethod
    def remove(state: Json) -> None:
        state.pop(_REQUEST, None)


@dataclass(frozen=True)
class TableRecovery:
    """The recovery of one table, whose queue may still have rows that the table does not have."""

    upto: int
    """The last commit from before the recovery.

    When all rows have been reread, a row whose last change is not after this commit was deleted.
    """
    is_read: bool
    """Whether all rows have been reread."""

    def to_json(self) -> Json:
        return asdict(self)


def recoveries_of(name: str, state: Json) -> dict[str, TableRecovery]:
    """Return the incomplete recoveries in a pump's state, by table."""
    try:
        return {
            str(table): TableRecovery(parse_count(value["upto"]), bool(value["is_read"]))
            for table, value in state.get("recoveries", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable_record(f"the state of pump {name!r}", error) from None


def mark_as_read(state: Json, table: str) -> None:
    """Record that all rows of a table have been reread."""
    recovery = state.get("recoveries", {}).get(table)
    if recovery is not None:
        recovery["is_read"] = True


def mark_as_recovered(state: Json, table: str) -> None:
    """Record that the recovery of a table is complete."""
    state.get("recoveries", {}).pop(table, None)


def request_recovery(store: Store, pump: str, *, force: bool = False, server: str | None = None) -> None:
    """Request that a pump recovers when it runs next: it creates a new slot, and reads all rows again.

    Parameters
    ----------
    force
        Whether to recover even if the pump can resume.
    server
        The system identifier of the server that has replaced the pump's server. Rows that the new server does
        not have are deleted in all copies, so the pump reads from another server only if it is named here.

    Raises
    ------
    PumpNotFoundError
    InvalidInputError
        When the pump has one queue for all tables, or a table without a primary key.
    """

    def request(tx: Transaction) -> None:
        record = pumps.find_pump(tx, pump)
        if record is None:
            raise PumpNotFoundError(f"there is no pump {pump!r}: `penstock pump list` lists them", pump=pump)
        state = record.state
        _require_recoverable(pump, state)
        before = RecoveryRequest.of(pump, state)
        new_force = force or (before is not None and before.force)
        new_server = server if server is not None or before is None else before.server
        RecoveryRequest(now_micros(), new_force, new_server).store_in(state)
        pumps.set_pump_state(tx, pump, record.owner, json.dumps(state))

    store.database.run(request, idempotent=True)


def _require_recoverable(pump: str, state: Json) -> None:
    if not state:
        raise InvalidInputError(f"pump {pump!r} has not copied any rows yet: run it first", pump=pump)
    start_over = "start over: `penstock pump remove`, a new slot and other queues"
    if state.get("together") is not None:
        raise InvalidInputError(
            f"pump {pump!r} has one queue for all tables, so it cannot read them again: {start_over}",
            pump=pump,
        )
    for table in state.get("queues", {}):
        if not is_keyed(pump, state, table):
            raise InvalidInputError(
                f"{table} has no primary key, which is required to read its rows again: {start_over}",
                pump=pump,
                table=table,
            )
