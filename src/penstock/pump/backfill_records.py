"""The state of a pump's backfills in its store, and requests for them."""

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
    """When it began, in microseconds since 1970."""
    again: bool
    """Whether the rows were in the queue before."""
    gaps: tuple[Key, ...] = ()
    """Keys before the last one whose rows are to be read again."""

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> TableBackfill:
        after = value["after"]
        return cls(
            None if after is None else _key(after),
            count(value["rows"]),
            count(value["expected"]),
            count(value["started_at"]),
            bool(value["again"]),
            tuple(map(_key, value["gaps"])),
        )

    def has_keys_of(self, columns: int) -> bool:
        """Whether its keys have this number of columns."""
        keys = [*self.gaps, *([] if self.after is None else [self.after])]
        return all(len(key) == columns for key in keys)

    def seconds_left(self, now: int) -> float | None:
        """Return the approximate time that is left; None if unknown."""
        if not self.rows or self.expected < self.rows:
            return None
        return (self.expected - self.rows) / self.rows * max(now - self.started_at, 0) / 1e6


def count(value: object) -> int:
    """Return a count from a stored record; raise ValueError if it is not one."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(value)
    return value


def _key(value: object) -> Key:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
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


def ask_for_backfill(store: Store, pump: str, table: str) -> bool:
    """Ask a pump to read all rows of a table again. If it is already doing so, it starts over.

    Return False if the pump is reading them for the first time.

    Raises
    ------
    PumpNotFoundError
    InvalidInputError
        When the pump does not have the table, or one queue for all tables.
    """

    def ask(tx: Transaction) -> bool:
        record = pumps.find_pump(tx, pump)
        if record is None:
            raise PumpNotFoundError(f"there is no pump {pump!r}: `penstock pump list` lists them", pump=pump)
        state = record.state
        queues = state.get("queues", {})
        if state.get("together") is not None:
            raise InvalidInputError(
                f"pump {pump!r} has one queue for all tables, and cannot read one of them again", pump=pump
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
                f"{table} has no primary key, by which its rows could be read again",
                pump=pump,
                table=table,
            )
        before = backfills_of(pump, state).get(table)
        if before is None or before.again:
            asked = TableBackfill(None, 0, 0, now_micros(), again=True)
            state["backfills"] = {**state.get("backfills", {}), table: asked.to_json()}
            pumps.set_pump_state(tx, pump, record.owner, json.dumps(state))
        return before is None or before.again

    return store.database.run(ask, idempotent=True)


def is_keyed(pump: str, state: Json, table: str) -> bool:
    """Whether a pump's plan has a primary key for a table."""
    try:
        tables = parse_json(state["tables"])["tables"]
        return any(
            each["keyed"] and f"{each['relation']['schema']}.{each['relation']['table']}" == table
            for each in tables
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable_record(f"the state of pump {pump!r}", error) from None
