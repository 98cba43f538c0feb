"""How a process that follows a slot reads the rows of each table, also when its columns come and go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.arrow.schema import is_wider
from penstock.feeds.postgres.backfill import Backfill
from penstock.feeds.postgres.catalog import Table, Tables, check_names, domains_of
from penstock.feeds.postgres.key_order import KeyOrder
from penstock.feeds.postgres.lookahead import logs_other_key
from penstock.feeds.postgres.pgoutput import BEGIN, RELATION, Changes, Column, Decoder, Relation, Truncation
from penstock.feeds.postgres.publication import PublicationState, state_of
from penstock.feeds.postgres.rows import RowReader
from penstock.feeds.postgres.schema_changes import (
    Fit,
    SchemaChange,
    earlier_form,
    evolved,
    is_as_wide,
    partition_key,
    with_columns,
)
from penstock.feeds.postgres.server import Server
from penstock.feeds.postgres.settings import FeedSettings

REFUSE = "refuse"
EVOLVE = "evolve"
IGNORE = "ignore"
CHANGES = (REFUSE, EVOLVE, IGNORE)
"""What to do when columns are added or dropped, or tables are added: see ``Pump``."""
ALL = ""
"""Stands for all tables where their rows come in one form."""


def tables_by_queue(tables: Tables, together: bool) -> dict[str, Tables]:
    """Return how the rows of each table are read; those of all of them under ALL if they come in one form."""
    if together:
        return {ALL: tables}
    chosen = tables.chosen or len(tables.tables) > 1
    return {
        table.name: replace(tables, tables=(table,), several=False, chosen=chosen) for table in tables.tables
    }


def _are_as_wide(now: pa.Schema, before: pa.Schema) -> bool:
    """Whether the columns of both schemas have the same types, or wider ones by now."""
    types = {field.name: field.type for field in before}
    changed = [field for field in now if types.get(field.name, field.type) != field.type]
    return all(is_wider(field.type, types[field.name]) for field in changed)


def _with_form(tables: Tables, table: Table, form: Table) -> tuple[Table, ...]:
    """Return tables, one of them in a later form."""
    return tuple(each if each is not table else with_columns(table, form) for each in tables.tables)


class _Reading(NamedTuple):
    """How the rows of one form of a table are read."""

    name: str
    """The table's; ALL if all come in one form."""
    reader: RowReader
    is_older: bool = False
    """Whether that is the form of rows from before the table was planned."""


@dataclass(frozen=True)
class Kept:
    """The readers at one moment, to return to."""

    tables: Tables
    readers: Mapping[str, RowReader]
    readings: Mapping[Relation, _Reading | None]
    places: Sequence[tuple[RowReader, tuple[int, int]]]
    held: Sequence[tuple[Backfill, Any]]


class TableReaders:
    """Readers of the rows of some tables; not thread-safe.

    Parameters
    ----------
    tables
        How the tables are read.
    state
        The last known state of the publication.
    together
        Whether the rows of all tables come in one form, rather than each table's in its own.
    changes
        One of CHANGES.
    backfills
        Backfills that are not complete, by table.
    left_out
        Tables that are not read as long as their definitions have these stamps, by object id.
    """

    def __init__(
        self,
        settings: FeedSettings,
        server: Server,
        tables: Tables,
        state: PublicationState,
        *,
        together: bool,
        changes: str,
        backfills: Mapping[str, Backfill] | None = None,
        left_out: Mapping[int, str] | None = None,
    ) -> None:
        self._left_out = left_out or {}
        self._backfills = backfills or {}
        self._settings, self._server, self.state = settings, server, state
        self._together, self._changes = together, changes
        self._use(tables)
        self._readers: dict[str, RowReader] = {}
        self._readings: dict[Relation, _Reading | None] = {}
        self._before: tuple[int, Tables] = (0, tables)
        """The last commit in which a table got another form, and how the tables were read before it."""
        self.has_evolved = False
        """Whether tables have got columns that the state of the publication may not have."""

    def _use(self, tables: Tables) -> None:
        self.tables = tables
        """How the tables are read, with the columns that they have got."""
        columns = {table.name: table.relation.names for table in tables.tables}
        self._fit = Fit(tables, {**columns}, self._settings.accept or ())

    @property
    def names(self) -> list[str]:
        """Under which the rows come: the tables', or ALL."""
        return list(tables_by_queue(self.tables, self._together))

    @property
    def ignores_new_tables(self) -> bool:
        """Whether tables that the publication gets are left out."""
        return self._changes == IGNORE

    @property
    def follows_new_tables(self) -> bool:
        """Whether tables that the publication gets are read too."""
        return self._changes == EVOLVE and not self._together and not self.tables.chosen

    def has_new_tables(self, now: PublicationState) -> bool:
        """Whether the publication has tables that are to be read too."""
        return self.follows_new_tables and any(
            # A table without columns has no rows to read.
            now.columns[name] and self._left_out.get(oid) != now.stamps[name]
            for name, oid in self.new_tables(now).items()
        )

    def new_tables(self, now: PublicationState) -> dict[str, int]:
        """Return the object ids, by name, of the tables of the publication that are not read so far."""
        known = self.tables
        return {
            name: oid
            for oid, name in now.names.items()
            if oid not in known.by_oid and name not in known.by_name
        }

    def tables_before(self, version: int) -> Tables:
        """Return how the tables are read at the start of the last commit, to read it once more."""
        changed, before = self._before
        return before if changed == version else self.tables

    def begin(self, part_version: int, part_rows: int) -> None:
        """Begin to read, after some rows of a commit; 0 and 0 for a whole one."""
        self._readings = {}
        plans = tables_by_queue(self.tables, self._together)
        self._readers = {name: self._reader(plan) for name, plan in plans.items()}
        if part_rows:
            for reader in self._readers.values():
                reader.resume_after(part_version, part_rows - 1)

    def _reader(self, plan: Tables) -> RowReader:
        (table, *_) = plan.tables
        sieve = None if self._together else self._backfills.get(table.name)
        return RowReader(self._settings, plan, plan.schema(), 0, from_log=True, sieve=sieve)

    def keep(self) -> Kept:
        readings = [reading.reader for reading in self._readings.values() if reading is not None]
        places = [(reader, reader.place) for reader in [*self._readers.values(), *readings]]
        held = [(backfill, backfill.place()) for backfill in self._backfills.values()]
        return Kept(self.tables, dict(self._readers), dict(self._readings), places, held)

    def return_to(self, kept: Kept) -> None:
        """Forget what was read since."""
        self._use(kept.tables)
        self._readers, self._readings = dict(kept.readers), dict(kept.readings)
        for reader, place in kept.places:
            reader.resume_after(*place)
        for backfill, held in kept.held:
            backfill.return_to(held)

    def columns_read(self, now: PublicationState) -> dict[str, Collection[str]]:
        """Return the columns that are read, by the current name of their table."""
        return {name: self._fit.columns_of(oid, name) for oid, name in now.names.items()}

    def report_invalid(self) -> None:
        """Log how many values were replaced since the last time."""
        for reader in self._readers.values():
            reader.report_invalid()

    def decode(self, decoder: Decoder, messages: Sequence[bytes]) -> dict[str, list[pa.RecordBatch]]:
        """Return the rows of messages by table.

        Raises
        ------
        FeedUnavailableError
            When rows cannot be read; its parameter ``version`` is the first such commit, if that is known.
        """
        self._require_partition_keys(decoder.version, messages)
        found: dict[str, list[pa.RecordBatch]] = {}
        for part in decoder.decode(messages):
            if isinstance(part, Truncation):
                for reader in self._readers.values():
                    reader.check_truncation(part)
                continue
            mine: dict[str, tuple[RowReader, list[Changes]]] = {}
            for changes in part:
                reading = self._readings[changes.relation]
                assert reading is not None
                mine.setdefault(reading.name, (reading.reader, []))[1].append(changes)
            for name, (reader, of_reader) in mine.items():
                rows = reader.rows_of(of_reader)
                if rows is not None and rows.num_rows:
                    found.setdefault(name, []).append(rows)
        return found

    def wants(self, relation: Relation, version: int) -> bool:
        """Whether a relation's rows are read; raises if they do not fit."""
        known = self._readings.get(relation)
        if relation not in self._readings or (known is not None and known.is_older):
            reading = self._reading(relation, version)
            # A form that comes once more after another one is another change.
            others = {each: its for each, its in self._readings.items() if each.oid != relation.oid}
            self._readings = {**others, relation: reading}
        return self._readings[relation] is not None

    def _reading(self, relation: Relation, version: int) -> _Reading | None:
        table = self._fit.reads(relation)
        if table is None:
            return None
        if isinstance(table, SchemaChange):
            if table.condition == "FEED_UNAVAILABLE.TABLE_ADDED":
                if self.ignores_new_tables:
                    return None
                if self.follows_new_tables:
                    # All of its rows are read later; the next check finds it.
                    self.has_evolved = True
                    return None
            return self._evolved(relation, version, table)
        name = ALL if self._together else table.name
        self._readers[name].wants(relation, version)
        return _Reading(name, self._readers[name])

    def _evolved(self, relation: Relation, version: int, change: SchemaChange) -> _Reading:
        """Return how rows are read whose table has got or lost columns; raise if that is to be refused."""
        table, refused = self._fit.table_of(relation), change.in_pump(self._settings.name, version)
        if self._changes == REFUSE or self._together or not isinstance(table, Table):
            raise refused
        domains = domains_of(self._server, {column.type for column in relation.columns})
        tables = replace(self.tables, domains={**self.tables.domains, **domains})
        form = evolved(table, relation, tables, change, keeps_new=self._changes == EVOLVE)
        if is_older := form is None and self._is_unread(table):
            form = earlier_form(table, relation, tables, change)
        if form is None or (not is_older and self._renames(table, relation)):
            raise refused
        chosen = self.tables.chosen or len(self.tables.tables) > 1
        plan = replace(tables, tables=(form,), several=False, chosen=chosen, some_columns=True)
        check_names(self._server, plan)
        reader, before = self._reader(plan), self._readers[form.name]
        wide, narrow = (before, reader) if is_older else (reader, before)
        if not _are_as_wide(wide.schema, narrow.schema):
            raise refused
        reader.resume_after(*before.place)
        reader.wants(relation, version)
        if not is_older:
            self._keep_form(version, replace(tables, tables=_with_form(self.tables, table, form)), form)
            self._readers[form.name] = reader
        return _Reading(form.name, reader, is_older)

    def _keep_form(self, version: int, tables: Tables, form: Table) -> None:
        """Read a table in another form from a commit on."""
        if form.name in self._backfills:
            # The key may have got a wider type, as which its values are compared from now on.
            self._backfills[form.name].order = KeyOrder.of(self._server, form)
        if version != self._before[0]:
            self._before = version, self.tables
        self._use(tables)
        self.has_evolved = True

    def _is_unread(self, table: Table) -> bool:
        """Whether all rows of a table will be read as they are now, with the planned types or wider ones.

        Then the log may still have rows from before it was planned, with narrower types or fewer columns.
        """
        backfill = self._backfills.get(table.name)
        if backfill is None or backfill.after is not None or backfill.is_complete:
            return False
        now = state_of(self._server, self._settings.publication, self.tables)
        columns = now.columns.get(now.names.get(table.relation.oid, ""), {})
        return all(
            is_as_wide(self.tables.base(Column(name, *columns[name][1:])), base)
            for name, base in zip(table.relation.names, table.bases, strict=True)
            if name in columns
        )

    def _renames(self, table: Table, relation: Relation) -> bool:
        """Whether a column that is gone has, or may have had, another name: its values would be lost."""
        gone = [column for column in table.relation.names if column not in relation.names]
        if not gone:
            return False
        now = state_of(self._server, self._settings.publication, self.tables).remembering(self.state)
        name = now.names.get(relation.oid)
        if name is None:
            # The table is gone, or another one with its name.
            return False
        current = {column: number for column, (number, *_) in now.columns[name].items()}
        names = {number: column for column, number in current.items()}
        numbers = {**current, **now.dropped.get(name, {})}
        if any(not numbers.get(each) or names.get(numbers[each], each) != each for each in gone):
            # A number that is not known is 0.
            return True
        new = [column for column in relation.names if column not in table.relation.names]
        # Both were dropped since then, and may have been one.
        return any(each not in current for each in gone) and any(each not in current for each in new)

    def _require_partition_keys(self, version: int, messages: Sequence[bytes]) -> None:
        """Refuse partitions that log other key columns than their table has."""
        if not (self.tables.changes_rows and any(table.partitioned for table in self.tables.tables)):
            return
        for message in messages:
            if message[0] == BEGIN:
                version = int.from_bytes(message[1:9], "big")
            if message[0] != RELATION:
                continue
            partition = Relation.of(message)
            for row in self._server.fetch("partition_roots", oids=[partition.oid]):
                table = self.tables.by_oid.get(row.root)
                if table is not None and table.partitioned and logs_other_key(partition, table):
                    raise partition_key(self._settings.name, table, partition, version)
