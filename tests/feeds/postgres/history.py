"""A history of tables that change, the stream that reads them, and the copy that follows it.

An operator does what the stream's errors and the documentation say. At every moment the copy is what the
source was at the stream's position, and in the end it is what the source is; or the stream has ended by name
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.catalog import Tables
from tests.feeds.postgres.changing_tables import plain
from tests.feeds.postgres.mended_tables import MendedTables
from tests.support.postgres_source import Row, Stream

READS = ("drain", "drain", "drain", "restart", "die_logged", "die_written")
STARTS_AGAIN = {
    "COLUMN_ADDED",
    "COLUMN_DROPPED",
    "COLUMN_TYPE_CHANGED",
    "KEY_CHANGED",
    "TABLE_ADDED",
    "TABLE_REMOVED",
}
STARTS_OVER = {
    "TABLE_RECREATED", "TABLE_NOT_COPIED", "TABLE_PUBLISHED_AGAIN", "TABLE_RENAMED", "PARTITION_ATTACHED",
    "PARTITION_DETACHED",
    "PUBLICATION_CHANGED", "TRUNCATED", "KEY_UNKNOWN", "CHANGED_IN_COMMIT",
    "KEY_MISSING", "KEY_REPLACED", "PARTITION_ATTACHED_AGAIN", "PARTITION_UNLOGGED",
}  # fmt: skip
MENDED_AT_THE_SOURCE = {"NO_REPLICA_IDENTITY", "TABLE_NOT_PUBLISHED", "NO_TABLES"}
_MOST_STOPS = 60
UNKNOWN = "not told yet"
"""What the copy has in a column that its rows came without."""


@dataclass
class Table:
    """A table as the stream's plan has it."""

    columns: dict[str, Any]
    key: tuple[str, ...]


@dataclass
class History(MendedTables):
    """One history, its stream and its copy."""

    stream: Stream = field(default_factory=Stream)
    copy: dict[str, dict[tuple[object, ...], Row]] = field(default_factory=dict)
    plan: dict[str, Table] = field(default_factory=dict)
    written_by: dict[str, Table] | None = None
    """The plan of the last micro-batch that was written and not committed."""
    applied: int = 0
    last_stop: tuple[str, Any, int] | None = None
    stops: list[str] = field(default_factory=list)
    since: dict[str, int] = field(default_factory=dict)
    """For tables that joined the plan later: from which moment on the copy has to be like them."""
    options: dict[str, object] = field(default_factory=dict)
    """What the stream is started with, to get past values that do not fit."""

    # The stream.

    def feed(self, **options: object) -> PostgresFeed:
        chosen = {"tables": ("t",)} if self.kind == "chosen" else {}
        return self.source.feed(snapshot="initial", **chosen, **options)

    def start(self, **options: object) -> None:
        """Start the stream, on what the copy has."""
        self.stream.start(self.feed(**self.options, **options))
        tables = Tables.from_json(self.stream.plan).tables
        # The name of a single table does not matter: its first unread rows may have been logged with another.
        plan = {
            (table.name if len(tables) > 1 or self.kind == "leaves" else self.table): Table(
                {column.name: kind for column, kind in zip(table.relation.columns, table.types, strict=True)},
                table.key,
            )
            for table in tables
        }
        # Rows that all of their columns identify may be equal: that is no copy to compare.
        keyless = over = any(
            not table.key or (len(table.key) == len(table.relation.columns) > 1 and not table.keyed)
            for table in tables
        )
        for name, table in plan.items():
            old = self.plan.get(name)
            if old is None or (old.columns == table.columns and old.key == table.key):
                continue
            known = [
                {column: row.get(column, UNKNOWN) for column in table.columns}
                for row in self.copy.get(name, {}).values()
            ]
            self.copy[name] = {tuple(row[column] for column in table.key): row for row in known}
            retyped = any(table.columns[column] != old.columns.get(column) for column in table.key)
            # A key column that was added later has no value in rows from before.
            unknown = any(UNKNOWN in key for key in self.copy[name])
            over |= retyped or unknown or len(self.copy[name]) < len(known)
            self.altered |= {
                column for column, kind in table.columns.items() if kind != old.columns.get(column, kind)
            }
        if self.plan:
            self.since |= dict.fromkeys(plan.keys() - self.plan.keys(), len(self.moments) - 1)
        self.copy = {name: rows for name, rows in self.copy.items() if name in plan}
        self.plan = plan
        if keyless:
            self.give_key()
        if over:
            self.start_over()

    def start_over(self) -> None:
        """With a new slot, a new checkpoint and an empty copy."""
        self.log.append("-- start over")
        # The new slot waits for it.
        self.resolve()
        # A publication that leaves out changes is refused only when it is altered.
        self.publish_everything()
        self.source.drop_slot()
        self.stream.end()
        self.stream, self.copy, self.plan, self.applied = Stream(), {}, {}, 0
        self.written_by = None
        self.moments, self.altered, self.replaced = [], set(), set()
        self.unlogged, self.last_stop = None, None
        self.options, self.since = {}, {}
        self.note()
        self.start()

    def apply(self) -> None:
        """Play the micro-batches that are committed onto the copy."""
        for number in range(self.applied, self.stream.committed):
            for row in self.stream.batches[number]:
                self.play(row)
        self.applied = self.stream.committed

    def play(self, row: Row) -> None:
        if "_table" in row:
            name = row["_table"]
            struct = name.partition(".")[2]
            assert all(row[each] is None for each in ("t", "u") if each in row and each != struct), row
            values = row[struct]
        else:
            (name,) = self.plan
            values = {column: row[column] for column in self.plan[name].columns}
        table, copy = self.plan[name], self.copy.setdefault(name, {})
        values = {column: plain(value) for column, value in values.items()}
        key = tuple(values[column] for column in table.key)
        assert None not in key, f"a row without its key: {row}"
        if not self.columns(name):
            # Of a table that came and went, what it held before it was published was never told.
            copy.pop(key, None)
            if row["_change_type"] != "delete":
                copy[key] = values
            return
        if row["_change_type"] == "insert":
            assert key not in copy, f"inserted twice: {row}"
            copy[key] = values
        elif row["_change_type"] == "delete":
            assert copy.pop(key, None) is not None, f"deleted twice: {row}"
        else:
            assert key in copy, f"updated, and not there: {row}"
            if row["_change_type"] == "update_preimage":
                self.same(copy[key], values)
            else:
                copy[key] = values

    def same(self, one: Row, other: Row) -> None:
        """Compare columns whose values were logged."""
        names = {name for name in one.keys() & other.keys() if one[name] is not UNKNOWN} - self.altered
        assert {name: repr(one[name]) for name in names} == {name: repr(other[name]) for name in names}

    def compare(
        self, *, at_the_end: bool = False, everything: bool = False, without: AbstractSet[str] = frozenset()
    ) -> None:
        """The copy is what the source was at the stream's position, or is now where the stream has come to
        the end; but for columns ``without`` a comparison."""
        position = self.stream.offsets[self.stream.committed - 1]["to"] + 1 if self.stream.committed else 0
        known = [
            number
            for number, moment in enumerate(self.moments)
            if at_the_end or everything or moment.position <= position
        ]
        if not known or (self.unlogged is not None and known[-1] >= self.unlogged):
            assert not everything
            return
        # Of a column that was replaced and is gone again, nothing is left to tell by.
        without = without | (self.replaced - self.columns(self.table).keys())
        moment = self.moments[known[-1]]
        for name, rows in moment.rows.items():
            if name not in self.plan or known[-1] < self.since.get(name, 0):
                # Nothing has told of a new partition that no row has come to.
                assert not everything or (self.kind == "leaves" and not rows), name
                continue
            names = [
                column
                for column in self.plan[name].columns
                if everything or (column not in self.altered | without and all(column in row for row in rows))
            ]
            if everything:
                assert all(set(row) == set(names) for row in rows), (rows[:1], names)
            copy, key = list(self.copy.get(name, {}).values()), self.plan[name].key
            if not set(key) <= set(names):
                # Nothing says which row of the source a row is: columns that all rows have been told.
                names = [column for column in names if not any(row[column] is UNKNOWN for row in copy)]
                key = ()
            copy = [{column: row[column] for column in names} for row in copy]
            assert told_of(rows, copy, key, names) == sorted(map(repr, copy)), (name, names)
            assert not everything or not any(UNKNOWN in row.values() for row in copy), (name, copy)

    def read(self, what: str) -> None:
        if what == "restart":
            self.started(lambda: self.start())
        elif what == "drain":
            self.drain()
        else:
            try:
                self.stream.step(die=what.removeprefix("die_"))
            except FeedUnavailableError as error:
                self.stopped(error)
                return
            self.log.append(f"-- {what}")
            if what == "die_written":
                self.written_by = self.plan
            stream, plan = self.stream, self.plan
            # Rows that an earlier plan has written may have other columns.
            written = dict(stream.batches) if self.written_by == plan else {}
            if (
                self.started(lambda: self.start())
                and self.plan == plan
                and self.drain()
                and self.stream is stream
            ):
                for each, rows in written.items():
                    assert self.stream.batches.get(each, rows) == rows, (
                        "a micro-batch that is repeated has other rows"
                    )

    def drain(self) -> bool:
        """Read all that there is; whether it did."""
        self.log.append("-- read")
        try:
            self.stream.drain()
        except FeedUnavailableError as error:
            self.stopped(error)
            return False
        self.apply()
        self.compare(at_the_end=True)
        return True

    def started(self, start: Any) -> bool:
        try:
            start()
        except FeedUnavailableError as error:
            self.stopped(error)
            return False
        return True

    def stopped(self, error: FeedUnavailableError) -> None:
        """Do what the error says."""
        self.apply()
        condition = error.condition.removeprefix("FEED_UNAVAILABLE.")
        self.log.append(f"-- {error}")
        self.stops.append(condition)
        assert len(self.stops) < _MOST_STOPS, f"the stream never starts: {self.stops[-9:]}"
        # Values of columns that were replaced are not in the log.
        self.altered |= set(error.parameters.get("columns", ()))
        if condition == "COLUMN_TYPE_CHANGED":
            # Its name may be another column's by now, whose values the error's advice has sent.
            self.altered.add(error.parameters["column"])
        self.compare(without=frozenset() if condition == "COLUMN_REPLACED" else self.replaced)
        about = error.parameters.get("version"), error.parameters.get("table")
        place = condition, about, len(self.stream.offsets)
        if condition == "VALUE":
            self.get_past(error)
            return
        # A column that has another type by now is read as that.
        self.options = {}
        if condition == "COLUMN_UNKNOWN":
            self.started(self.start)
        elif condition == "TABLE_REMOVED" and "accept" in error.parameters:
            # It had rows that are not read yet, and the log may lack others of it.
            self.started(self.start_over)
        elif condition in STARTS_AGAIN or (
            condition == "COLUMN_REPLACED" and "accept" not in error.parameters
        ):
            assert place != self.last_stop, f"starting again fails the same way: {error}"
            self.last_stop = place
            self.started(lambda: self.start())
        elif condition == "COLUMN_REPLACED":
            # What the rows have in it is another column's until they are sent again.
            self.altered |= {
                each.rpartition(":")[0].rpartition(".")[2] for each in error.parameters["accept"]
            }
            self.started(lambda: self.start(accept=error.parameters["accept"]))
            self.touch()
            self.drain_once()
        elif condition in STARTS_OVER:
            if condition in ("PUBLICATION_CHANGED", "KEY_UNKNOWN"):
                # The source may leave out what the copy needs.
                self.mend()
            elif condition == "PARTITION_UNLOGGED":
                self.run(f"ALTER TABLE {error.parameters['partition']} SET LOGGED")
            self.started(self.start_over)
        else:
            assert condition in MENDED_AT_THE_SOURCE, error
            self.mend()
            self.started(self.start_over)

    def get_past(self, error: FeedUnavailableError) -> None:
        """Go on behind a value that does not fit, in one of the three ways."""
        version, column = error.parameters["version"], error.parameters["column"]
        way = version % 3
        assert "NaN" in error.message, error
        assert version not in self.options.get("skip", ()), f"the commit was not left out: {error}"
        self.altered.add(column)
        if way == 0 and "skip=" in error.message:
            self.options |= {"skip": [*self.options.get("skip", ()), version]}
            if self.started(self.start):
                # The copy lacks what was left out, and what comes next may be of that.
                try:
                    self.stream.step()
                except FeedUnavailableError as later:
                    if later.parameters.get("version") == version:
                        raise AssertionError("the commit was not left out") from later
                self.started(self.start_over)
        elif way == 1:
            assert "invalid_values" not in self.options, error
            self.options |= {"invalid_values": "null"}
            self.started(self.start)
        else:
            types = self.options.get("types", {})
            assert f"{error.parameters['table']}.{column}" not in types, error
            self.options |= {"types": types | {f"{error.parameters['table']}.{column}": "text"}}
            self.started(self.start)

    def drain_once(self) -> None:
        try:
            self.stream.drain()
        except FeedUnavailableError as error:
            self.log.append(f"-- {error}")
            self.apply()
            self.started(self.start_over)
            return
        self.apply()

    def end(self) -> None:
        """What the stream has told in the end is all that there is."""
        self.mend()
        self.clear_nan()
        for _ in range(12):
            if not self.drain():
                continue
            self.touch()
            number = len(self.stops)
            if self.drain() and len(self.stops) == number:
                break
        else:
            raise AssertionError(f"the stream never comes to its end: {self.stops}")
        self.altered, self.unlogged = set(), None
        self.compare(everything=True)


def told_of(rows: Sequence[Row], copy: Sequence[Row], key: Sequence[str], names: Sequence[str]) -> list[str]:
    """The rows of the source as the copy has to have them, without what it was not told yet."""
    copied = {tuple(row[name] for name in key): row for row in copy} if key else {}
    found = []
    for row in rows:
        mine = copied.get(tuple(row[name] for name in key), {}) if key else {}
        found.append({name: UNKNOWN if mine.get(name) is UNKNOWN else row[name] for name in names})
    return sorted(map(repr, found))
