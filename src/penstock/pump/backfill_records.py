"""Progress of a pump's backfills, and requests for backfills, in the pump's stored state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError, PumpNotFoundError
from penstock.instants import now_micros
from penstock.json_text import Json, parse_json, unreadable_record
from penstock.store.records import pumps

if TYPE_CHECKING:
    from penstock.feeds.postgres.key_order import Key
    from penstock.queue.store import Store
    from penstock.store.database import Transaction


@dataclass(frozen=True)
class TableBackfill:
    """The progress of a table's backfill."""

    after: Key | None
    """The key of the last row that was read; None at the beginning."""
    rows: int
    """The number of rows that have been appended."""
    expected: int
    """The approximate number of rows in the table; 0 if unknown."""
    started_at: int
    """The start time, in microseconds since 1970."""
    again: bool
    """Whether the rows are already in the queue."""
    gaps: tuple[Key, ...] = ()
    """Keys up to the last one whose rows must be read again."""

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> TableBackfill:
        after = value["after"]
        return cls(
            None if after is None else _parse_key(after),
            parse_count(value["rows"]),
            parse_count(value["expected"]),
            parse_count(value["started_at"]),
            bool(value["again"]),
            tuple(map(_parse_key, value["gaps"])),
        )

    def has_key_width(self, columns: int) -> bool:
        """Return whether all keys have this number of columns."""
        keys = [*self.gaps, *([] if self.after is None else [self.after])]
        return all(len(key) == columns for key in keys)

    def seconds_left(self, now: int) -> float | None:
        """Return the estimated remaining time; None if unknown."""
        if not self.rows or self.expected < self.rows:
            return None
        return (self.expected - self.rows) / self.rows * max(now - self.started_at, 0) / 1e6


def parse_count(value: object) -> int:
    """Return a count from a stored record; raise ValueError if it is not one."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(value)
    return value


def _parse_key(value: object) -> Key:
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise TypeError(value)
    key = tuple(value)
    "".join(key).encode()
    return key


def backfills_of(name: str, state: Json) -> dict[str, TableBackfill]:
    """Return the backfills in a pump's state, by table."""
    try:
        return {
            str(table): TableBackfill.from_json(value) for table, value in state.get("backfills", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable_record(f"the state of pump {name!r}", error) from None


def request_backfill(store: Store, pump: str, table: str) -> bool:
    """Request that a pump reads all rows of a table again; a reread that is in progress starts over.

    Return False if the pump's first backfill of the table is still in progress.

    Raises
    ------
    PumpNotFoundError
    InvalidInputError
        When the pump does not have the table, or has one queue for all tables.
    """

    def request(tx: Transaction) -> bool:
        record = pumps.find_pump(tx, pump)
        if record is None:
            raise PumpNotFoundError(f"there is no pump {pump!r}: `penstock pump list` lists them", pump=pump)
        state = record.state
        queues = state.get("queues", {})
        if state.get("together") is not None:
            raise InvalidInputError(
                f"pump {pump!r} has one queue for all tables, so it cannot read one table again", pump=pump
            )
        if table not in queues:
            raise InvalidInputError(
                f"pump {pump!r} does not have the table {in_quotes(table)}.{did_you_mean(table, queues)} It "
                f"has {', '.join(sorted(queues)) or 'none yet'}",
                pump=pump,
                table=table,
            )
        if not is_keyed(pump, state, table):
            raise InvalidInputError(
                f"{table} has no primary key, which is required to read its rows again",
                pump=pump,
                table=table,
            )
        before = backfills_of(pump, state).get(table)
        if before is None or before.again:
            requested = TableBackfill(None, 0, 0, now_micros(), again=True)
            state["backfills"] = {**state.get("backfills", {}), table: requested.to_json()}
            pumps.set_pump_state(tx, pump, record.owner, json.dumps(state))
        return before is None or before.again

    return store.database.run(request, idempotent=True)


def is_keyed(pump: str, state: Json, table: str) -> bool:
    """Return whether a table has a primary key in a pump's plan."""
    try:
        tables = parse_json(state["tables"])["tables"]
        return any(
            table_plan["keyed"]
            and f"{table_plan['relation']['schema']}.{table_plan['relation']['table']}" == table
            for table_plan in tables
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable_record(f"the state of pump {pump!r}", error) from None
