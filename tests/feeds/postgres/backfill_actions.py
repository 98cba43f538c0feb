"""What happens to the tables of a history while a pump reads their existing rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

from tests.feeds.postgres.changing_tables import ROWS

if TYPE_CHECKING:
    from tests.feeds.postgres.pump_history import PumpHistory

_KINDS_OF_CHANGES = (
    "rows", "rows", "rows", "transaction", "held_log", "held_log", "parts", "parts", "open", "open", "form",
    "death",
)  # fmt: skip
_ONE_ROW = ROWS[:7]
_MOST_CHUNKS = 8


def interleave(history: PumpHistory, chance: Random) -> None:
    """Read a table in small chunks, and change rows while each is held up between snapshot and append."""
    history.resolve()
    history.run_pump()
    history.control.release()
    history.control.hold()
    history.aim = _new_table(history, chance) if chance.random() < 0.6 else None
    history.aim = history.aim or history.read_again(chance)
    try:
        for _ in range(chance.randint(3, _MOST_CHUNKS)):
            if history.aim is None or not _change_at_a_chunk(history, chance):
                break
    finally:
        history.aim, history.control.holds_log, history.control.meets_parts = None, False, False
    if chance.random() < 0.7:
        history.catch_up()


def publish_while_open(history: PumpHistory, chance: Random) -> None:
    """Publish a table while a transaction is open that has written to it before."""
    history.resolve()
    history.run_pump()
    history.control.release()
    table = history.create_table(chance) if _takes_new_tables(history) else None
    if table is None:
        return
    history.prepare(history.change_of_most_rows(table, chance))
    history.publish(table)
    history.control.await_looks(lambda: history.has_ended() or history.is_read(table))
    history.resolve(chance.choice(("COMMIT", "COMMIT", "ROLLBACK")))


BACKFILL_ACTIONS: Mapping[str, Callable[[PumpHistory, Random], None]] = {
    "interleave": interleave,
    "publish_while_open": publish_while_open,
}


def _takes_new_tables(history: PumpHistory) -> bool:
    return history.policy == "evolve" and history.kind != "chosen"


def _new_table(history: PumpHistory, chance: Random) -> str | None:
    table = history.create_table(chance) if _takes_new_tables(history) else None
    if table is not None:
        history.publish(table)
        history.await_queue(table)
    return table


def _change_at_a_chunk(history: PumpHistory, chance: Random) -> bool:
    """Change rows before or after the next chunk is read; whether there was one."""
    control, what = history.control, chance.choice(_KINDS_OF_CHANGES)
    if what == "held_log":
        control.holds_log = True
        _change_rows(history, chance)
    elif what == "open":
        history.prepare(history.statement(chance.choice(("insert", "update", "delete")), chance))
    chunk = control.await_snapshot(history.has_no_chunk)
    if chunk is None:
        return False
    if what == "held_log":
        # It has rows of which the log says nothing yet.
        control.let_append()
        control.await_reads(history.has_ended)
        control.holds_log = False
        return True
    history.await_log(chunk.position)
    if what == "parts":
        _commit_in_parts(history, chance)
    elif what == "transaction":
        history.rows(chance.choice(("transaction", "large", "subtransactions")), chance)
    elif what == "form":
        history.define(chance.choice(("add", "add_default")), chance)
    elif what == "death":
        control.death = chance.choice(("append", "appended", "chunk", "confirm")), chance.randint(0, 2)
    if what != "parts":
        _change_rows(history, chance)
    if what == "open" and chance.random() < 0.4:
        history.resolve(chance.choice(("COMMIT", "COMMIT", "ROLLBACK")))
    if chance.random() < 0.8:
        history.await_log()
    if what == "open" and history.prepared:
        _end_after_append(history, chance)
    control.let_append()
    return True


def _end_after_append(history: PumpHistory, chance: Random) -> None:
    """End a transaction right after the chunk: its commit is what comes next in the log."""
    history.control.await_reads(history.has_ended)
    history.control.let_append()
    history.control.await_reads(history.has_ended)
    if chance.random() < 0.8:
        history.resolve(chance.choice(("COMMIT", "COMMIT", "ROLLBACK")))


def _change_rows(history: PumpHistory, chance: Random) -> None:
    for _ in range(chance.randint(1, 4)):
        history.rows(chance.choice(_ONE_ROW), chance)
    if history.aim is not None and chance.random() < 0.5:
        history.run(_move_of_last_row(history, history.aim))


def _move_of_last_row(history: PumpHistory, table: str) -> str:
    """Another key for a row that chunks have seldom had yet, without its long text in the log."""
    columns = history.columns(table)
    first = next(iter(columns))
    long = "length(w) > 1000" if columns.get("w") == "text" else "true"
    last = f"SELECT {first} FROM {table} WHERE {long} ORDER BY 1 DESC LIMIT 1"
    return f"UPDATE {table} SET {first} = {history.value(columns[first])} WHERE {first} = ({last})"


def _commit_in_parts(history: PumpHistory, chance: Random) -> None:
    """Have the chunk that is held up arrive between the parts of a transaction."""
    if chance.random() < 0.5:
        history.control.death = "append", chance.randint(1, 2)
    history.control.meets_parts = True
    history.run(*(history.large_statement(chance) for _ in range(30)))
    history.await_log()
