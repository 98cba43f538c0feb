"""What a store keeps of the tables whose rows a pump reads beside the log."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError, PumpNotFoundError
from penstock.instants import now_micros
from penstock.json_text import Json, unreadable_record
from penstock.store.records import pumps

if TYPE_CHECKING:
    from penstock.feeds.postgres.key_order import Key
    from penstock.queue.store import Store
    from penstock.store.database import Transaction


@dataclass(frozen=True)
class TableBackfill:
    """How far the rows of a table are read that are read beside the log."""

    after: Key | None
    """The key of the last row; None at the beginning."""
    rows: int
    """How many have been appended."""
    expected: int
    """About how many there are, 0 if that is not known."""
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
            None if after is None else tuple(map(str, after)),
            int(value["rows"]),
            int(value["expected"]),
            int(value["started_at"]),
            bool(value["again"]),
            tuple(tuple(map(str, key)) for key in value["gaps"]),
        )

    def seconds_left(self, now: int) -> float | None:
        """Return about how long it takes from now on; None if that is not known."""
        if not self.rows or self.expected < self.rows:
            return None
        return (self.expected - self.rows) / self.rows * max(now - self.started_at, 0) / 1e6


def backfills_of(name: str, state: Json) -> dict[str, TableBackfill]:
    """Return the tables whose rows a pump reads beside the log, from its state."""
    try:
        return {
            str(table): TableBackfill.from_json(value) for table, value in state.get("backfills", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable_record(f"the state of pump {name!r}", error) from None


def ask_for_backfill(store: Store, pump: str, table: str) -> None:
    """Ask a pump to read all rows of one of its tables again, from the first one on if it does so already.

    Raises
    ------
    PumpNotFoundError
    InvalidInputError
        When the pump does not have the table, or one queue for all tables.
    """

    def ask(tx: Transaction) -> None:
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
        before = backfills_of(pump, state).get(table)
        if before is None or before.again:
            asked = TableBackfill(None, 0, 0, now_micros(), again=True)
            state["backfills"] = {**state.get("backfills", {}), table: asked.to_json()}
            pumps.set_pump_state(tx, pump, record.owner, json.dumps(state))

    store.database.run(ask, idempotent=True)
