"""A history of tables that change, and the pumps that bring their changes into queues.

Pumps are stopped, die and take one another over. After each commit in the queues, their rows make the tables
that the source had then; in the end they make the source's tables, or the pump has ended by name before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import penstock
from penstock.errors import (
    FeedUnavailableError,
    InvalidInputError,
    ProducerFencedError,
    SchemaMismatchError,
    condition_of,
)
from penstock.feeds.postgres import PostgresFeed
from penstock.pump.backfill_records import request_backfill
from penstock.queue.store import Store
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpRecord
from tests.feeds.postgres.aimed_tables import AimedTables
from tests.feeds.postgres.backfill_actions import BACKFILL_ACTIONS
from tests.feeds.postgres.history import MENDED_AT_THE_SOURCE, STARTS_AGAIN, STARTS_OVER
from tests.feeds.postgres.pump_control import DEATHS, Dies, RunningPump
from tests.feeds.postgres.queue_tables import played, read_tables, require_whole_commits
from tests.support.postgres_source import Row
from tests.support.waiting import wait_until

POLICIES = ("evolve", "evolve", "evolve", "ignore", "refuse")
PUMP_ACTIONS = (
    "catch_up", "catch_up", "run", "stop", "die", "die", "die", "second", "hold", "chunks", "chunks",
    "hold_log", "again", "cut", "lose_replies", "other_policy",
)  # fmt: skip
NEW_TABLES = ("add_table", "add_table", "add_table", "publish_again")
ENDS = (
    STARTS_AGAIN
    | STARTS_OVER
    | MENDED_AT_THE_SOURCE
    | {"COLUMN_REPLACED", "CHANGED_IN_BACKFILL", "PARTLY_PUBLISHED", "COLUMN_UNKNOWN"}
)
"""What may end a pump."""
_CARRIED = {"add", "add_default", "add_table", "publish_again"}
_LEAST_RECORD = 17
"""A commit takes more bytes of the log than a position without rows may be behind its end."""
_MOST_STOPS = 40


@dataclass
class PumpHistory(AimedTables):
    """One history, its pumps and their queues."""

    store_url: str = ""
    policy: str = "evolve"
    partitions: int = 1
    running: RunningPump | None = None
    generation: int = 0
    """How often the pump was removed, to start over with other queues."""
    stops: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    """Columns that were dropped or renamed since then."""
    is_backfilled: bool = False
    """Whether tables have been backfilled since then."""
    first_tables: set[str] = field(default_factory=set)
    """Those that the pump has copied at its start."""

    # The pump.

    @property
    def name(self) -> str:
        return f"p{self.generation}"

    def feed(self) -> PostgresFeed:
        chosen = {"tables": ("t",)} if self.kind == "chosen" else {}
        return self.source.feed(snapshot="initial", invalid_values="null", **chosen)

    def new_pump(self) -> RunningPump:
        return RunningPump(
            penstock.Pump(
                self.feed(),
                self.store_url,
                schema_changes=self.policy,
                prefix=f"g{self.generation}.",
                partitions=self.partitions,
                name=self.name,
            )
        )

    def record(self, store: Store) -> PumpRecord | None:
        return store.database.run(lambda tx: pumps.find_pump(tx, self.name), write=False)

    def stored(self) -> PumpRecord | None:
        with penstock.connect(self.store_url) as store:
            return self.record(store)

    def run_pump(self) -> RunningPump:
        """Run a pump, unless one runs; one that has ended by name is removed and started over."""
        running = self.running
        if running is None:
            running = self.running = self.new_pump()
        elif running.has_ended:
            self.ended(running)
            return self.run_pump()
        return running

    def ended(self, running: RunningPump) -> None:
        """Look at what has ended a pump, and do what its error says."""
        self.running, failure = None, running.failure
        assert failure is not None, "a pump that nobody stopped has ended"
        if isinstance(failure, Dies):
            self.log.append(f"-- the pump has died: {failure}")
            return
        if not isinstance(failure, FeedUnavailableError | SchemaMismatchError):
            raise failure
        condition = str(condition_of(failure)).rpartition(".")[2]
        self.log.append(f"-- {failure}")
        self.stops.append(condition)
        assert len(self.stops) < _MOST_STOPS, f"the pump never starts: {self.stops[-9:]}"
        if isinstance(failure, FeedUnavailableError) and condition not in ENDS:
            raise failure
        if self.is_carried():
            raise AssertionError(f"the pump ended for no reason: {self.changes}") from failure
        self.verify()
        self.start_over(mends=self.stops[-3:-2] == [condition] or condition in _MENDED)

    def is_carried(self) -> bool:
        """Whether the pump has to carry all changes of definitions since its queues were created."""
        # A table that a publication of its schema names too counts as published again.
        if self.policy == "refuse" or self.kind == "schema":
            return not self.changes
        return self.changes <= _CARRIED or self.changes == {"drop"}

    def start_over(self, *, mends: bool = False) -> None:
        """With a new pump, a new slot and empty queues."""
        self.stop()
        self.log.append("-- start over")
        # The new slot waits for it.
        self.resolve()
        if mends:
            self.mend()
            self.run(f"ALTER TABLE {self.source.name}.t1 SET LOGGED")
        self.give_key()
        self.publish_everything()
        self.source.drop_slot()
        self.generation += 1
        self.moments, self.altered, self.replaced, self.gone = [], set(), set(), set()
        self.unlogged, self.changes, self.is_backfilled = None, set(), False
        self.control.death, self.control.lost_replies = None, 0
        self.note()
        self.begin()

    def begin(self) -> None:
        """Start the first pump of its queues, and wait until it has planned them."""
        running = self.run_pump()
        wait_until(lambda: running.has_ended or self._is_planned(), 60, "the plan", interval=0.01)
        if running.has_ended:
            # What was changed before may prevent a start.
            self.changes.add("start")
            self.run_pump()
            return
        record = self.stored()
        assert record is not None
        self.first_tables = set(record.state["queues"])

    def _is_planned(self) -> bool:
        record = self.stored()
        return record is not None and bool(record.state)

    def stop(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            self.control.release()
            running.stop()
            if running.failure is not None:
                self.ended(running)

    def has_ended(self) -> bool:
        return self.running is None or self.running.has_ended

    def has_no_chunk(self) -> bool:
        """Whether no chunk comes: the pump has ended, or all rows of its tables are there."""
        record = self.stored()
        return self.has_ended() or record is None or not record.state.get("backfills")

    def is_read(self, table: str) -> bool:
        """Whether all rows of a table are there."""
        record = self.stored()
        state = {} if record is None else record.state
        return table in state.get("queues", ()) and table not in state.get("backfills", ())

    def await_queue(self, table: str) -> None:
        """Wait until a table has a queue, or the pump has ended."""

        def is_there() -> bool:
            record = self.stored()
            return self.has_ended() or (record is not None and table in record.state.get("queues", ()))

        wait_until(is_there, 30, f"the queue of {table}", interval=0.01)

    def flush_log(self) -> None:
        """Commit a message: the server itself takes a while until it flushes a chunk's place in the log."""
        self.source.run("SELECT pg_logical_emit_message(true, '', '')")

    def await_log(self, position: int | None = None) -> None:
        """Wait until the pump has read what was committed last, or what comes before a position."""
        self.flush_log()
        (end,) = self.source.rows("SELECT pg_current_wal_flush_lsn() - '0/0'")[0]
        self.control.await_log(position or int(end), self.has_ended)

    # What happens to it.

    def act(self, what: str, chance: Random) -> None:
        self.log.append(f"-- {what}")
        if what in BACKFILL_ACTIONS:
            BACKFILL_ACTIONS[what](self, chance)
        else:
            getattr(self, f"_{what}")(chance)

    def _run(self, chance: Random) -> None:
        self.run_pump()

    def _stop(self, chance: Random) -> None:
        self.stop()
        self.verify()

    def _die(self, chance: Random) -> None:
        self.run_pump()
        self.control.death = chance.choice(DEATHS), chance.randint(0, 5)

    def _change_unseen(self, chance: Random) -> None:
        """Change tables in ways that the log does not show, while no pump runs."""
        self.stop()
        self.define(chance.choice(("recreate", "leave_and_return", "attach_again")), chance)

    def _hold(self, chance: Random) -> None:
        self.control.hold()

    def _hold_log(self, chance: Random) -> None:
        self.control.holds_log = not self.control.holds_log

    def _chunks(self, chance: Random) -> None:
        self.run_pump()
        self.control.release(chance.randint(1, 3))

    def _lose_replies(self, chance: Random) -> None:
        self.control.lost_replies = chance.randint(1, 5)

    def _again(self, chance: Random) -> None:
        self.run_pump()
        self.read_again(chance)

    def read_again(self, chance: Random) -> str | None:
        """Ask for a table that is there already; return its name."""
        record = self.stored()
        tables = sorted(record.state.get("queues", ())) if record is not None else []
        if not tables:
            return None
        table = chance.choice(tables)
        with penstock.connect(self.store_url) as store:
            try:
                request_backfill(store, self.name, table)
            except InvalidInputError:
                return None
        return table

    def _cut(self, chance: Random) -> None:
        self.source.run(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
            f"WHERE slot_name = '{self.source.name}' AND active_pid IS NOT NULL"
        )

    def _other_policy(self, chance: Random) -> None:
        """Restart with another policy. What was left out until then is read from then on."""
        self.stop()
        self.policy = chance.choice(POLICIES)
        self.altered |= {column for table in self.tables() for column in self.columns(table)} - {"id", "code"}
        self.changes.add("other_policy")

    def _second(self, chance: Random) -> None:
        """Have a second pump take over from one that is suspended, and wakes when it has lost the pump."""
        first = self.run_pump()
        wait_until(lambda: first.has_ended or first.pump.status().active, 60, "the first pump")
        self.control.suspend(first)
        try:
            second = self.new_pump()
            wait_until(lambda: second.has_ended or second.pump.status().active, 60, "the second pump")
        finally:
            self.control.resume()
        self.running = second
        wait_until(lambda: first.has_ended, 60, "the end of the first pump")
        if not isinstance(first.failure, ProducerFencedError | Dies | FeedUnavailableError):
            raise first.failure or AssertionError("a pump that was taken over has not noticed")

    def _catch_up(self, chance: Random) -> None:
        self.catch_up()

    def catch_up(self, *, everything: bool = False) -> bool:
        """Wait until the pump has everything that there is, and compare it; whether it came to that."""
        self.resolve()
        self.control.death = None
        self.control.release()
        (end,) = self.source.rows("SELECT pg_current_wal_flush_lsn() - '0/0'")[0]
        number, running = self.generation, self.run_pump()
        if number != self.generation:
            return False
        looks = self.control.comparisons
        with penstock.connect(self.store_url) as store:

            def is_done() -> bool:
                self.flush_log()
                return running.has_ended or (
                    self.control.comparisons >= looks + 3 and self._has_all(store, int(end))
                )

            wait_until(is_done, 30, "the pump to catch up", interval=0.01)
        if running.has_ended:
            dies = isinstance(running.failure, Dies)
            self.run_pump()
            return self.catch_up(everything=everything) if dies else False
        self.verify(at_the_end=True, everything=everything)
        return True

    def _has_all(self, store: Store, end: int) -> bool:
        record = self.record(store)
        if record is None or record.position.part_rows or record.state.get("backfills"):
            return False
        return record.position.version >= end - _LEAST_RECORD

    # What its queues have.

    def define(self, what: str, chance: Random) -> None:
        before = self._all_columns()
        number = len(self.log)
        if what == "add_table":
            self.add_table(chance)
        else:
            super().define(what, chance)
        if len(self.log) == number:
            return
        self.changes.add(what)
        now = self._all_columns()
        new, gone = ({column for _, column in each} for each in (now - before, before - now))
        self.replaced |= new & self.gone
        self.gone |= gone
        self.altered |= self.replaced | (new if what == "add_default" else set())

    def _all_columns(self) -> set[tuple[str, str]]:
        return {(table, column) for table in self.tables() for column in self.columns(table)}

    def add_table(self, chance: Random) -> None:
        """Create a table with rows, and publish it at once or later."""
        table = self.create_table(chance, is_published=chance.random() < 0.2)
        if table is None:
            return
        if chance.random() < 0.3:
            # A transaction that has written before the table is published.
            self.prepare(self.change_of_most_rows(table, chance))
        if chance.random() < 0.8:
            self.publish(table)

    def verify(self, *, at_the_end: bool = False, everything: bool = False) -> None:
        """After each commit, the rows in the queues make what the source had then.

        ``at_the_end`` says that the pump has everything, and ``everything`` that all values are logged.
        """
        record = self.stored()
        if record is None or not record.state:
            return
        queues = record.state["queues"]
        self.is_backfilled |= bool(queues.keys() - self.first_tables)
        tables = read_tables(self.store_url, queues, ordered=self.partitions == 1)
        # Of an update a row may be left out that only a partition has logged.
        if not self.is_backfilled and "identity_of_partition" not in self.changes:
            require_whole_commits(tables)
        states: dict[str, dict[object, Row]] = {name: {} for name in tables}
        unchecked = self.altered | self.gone | self.replaced
        for version in played(tables, unchecked):
            if not everything:
                states = {name: dict(table.state) for name, table in tables.items()}
                self._compare_at(version, states, {name: table.columns for name, table in tables.items()})
        if at_the_end or everything:
            states = {name: table.state for name, table in tables.items()}
            self._compare_now(states, {name: table.columns for name, table in tables.items()}, everything)

    def _compare_at(
        self, version: int, states: dict[str, dict[object, Row]], columns: dict[str, Sequence[str]]
    ) -> None:
        """A commit is of one of two moments: of the last one before its position, or of the one after."""
        last = max((n for n, moment in enumerate(self.moments) if moment.position <= version), default=-1)
        if last < 0 or (self.unlogged is not None and last + 1 >= self.unlogged):
            return
        for name in states.keys() & self._tables_at(version):
            candidates = [
                moment.rows.get(name) for moment in self.moments[last : last + 2] if name in moment.rows
            ]
            copy, altered = states[name], self.altered | self.replaced
            found = [self._differs(rows or [], copy, columns[name], altered) for rows in candidates]
            assert not found or None in found, (version, name, found)

    def _tables_at(self, version: int) -> set[str]:
        """The tables that have all of their rows after a commit."""
        ended = self.control.completed.items()
        return self.first_tables | {
            table for (pump, table), last in ended if pump == self.name and last <= version
        }

    def _compare_now(
        self, states: dict[str, dict[object, Row]], columns: dict[str, Sequence[str]], everything: bool
    ) -> None:
        altered = set() if everything else self.altered | self.replaced
        for name, rows in self.held().items():
            if name not in states:
                assert self._may_lack(name, rows, everything), f"{name} has no queue"
                continue
            if everything and self.policy != "ignore":
                missing = set(rows[0] if rows else ()) - set(columns[name])
                assert not missing, f"{name} lacks {missing}"
            found = self._differs(rows, states[name], columns[name], altered)
            assert found is None, (name, found)
        if everything:
            self.unlogged = None

    def _may_lack(self, name: str, rows: Sequence[Row], everything: bool) -> bool:
        if self.policy == "ignore" or self.kind == "chosen":
            return True
        if self.policy == "refuse":
            return not rows or not everything
        return not self.source.rows(
            f"SELECT 1 FROM pg_constraint WHERE conrelid = to_regclass('{name}') AND contype = 'p'"
        )

    def _differs(
        self, rows: Sequence[Row], copy: dict[object, Row], columns: Sequence[str], without: set[str]
    ) -> str | None:
        """What differs between a table's rows and a copy of them."""
        names = [name for name in columns if name not in without and all(name in row for row in rows)]
        mine = sorted(repr([_valid(row[name]) for name in names]) for row in rows)
        its = sorted(repr([_valid(row[name]) for name in names]) for row in copy.values())
        if mine == its:
            return None
        missing = [row for row in mine if row not in its]
        more = [row for row in its if row not in mine]
        return f"{names}: the copy lacks {missing[:4]} and has {more[:4]} ({len(mine)}, {len(its)})"[:2000]

    def end(self) -> None:
        """In the end the queues have all that there is."""
        self.mend()
        self.changes.add("mend")
        self.clear_nan()
        for _ in range(12):
            if not self.catch_up():
                continue
            self.touch()
            self.changes.add("touch")
            number = self.generation
            if self.catch_up() and number == self.generation and self.catch_up(everything=True):
                break
        else:
            raise AssertionError(f"the pump never comes to its end: {self.stops}")
        self.stop()


_MENDED = MENDED_AT_THE_SOURCE | {
    "PUBLICATION_CHANGED",
    "KEY_UNKNOWN",
    "PARTITION_UNLOGGED",
    "PARTLY_PUBLISHED",
}


def _valid(value: object) -> object:
    """A value as a queue has it that cannot hold NaN."""
    return None if value == "NaN" else value
