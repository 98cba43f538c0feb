"""Readers of the rows of each table, for a process that follows a slot, across changes of its columns."""

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
    earlier_table,
    evolved_table,
    is_as_wide,
    partition_key,
    with_later_columns,
)
from penstock.feeds.postgres.server import Server
from penstock.feeds.postgres.settings import FeedSettings

REFUSE = "refuse"
EVOLVE = "evolve"
IGNORE = "ignore"
CHANGES = (REFUSE, EVOLVE, IGNORE)
"""What to do when columns are added or dropped, or tables are added: see ``Pump``."""
ALL = ""
"""Name for the rows of all tables, if they share one schema."""


def tables_by_queue(tables: Tables, together: bool) -> dict[str, Tables]:
    """Return the plan for reading each table, or one plan for ALL if the tables share one schema."""
    if together:
        return {ALL: tables}
    chosen = tables.chosen or len(tables.tables) > 1
    return {
        table.name: replace(tables, tables=(table,), several=False, chosen=chosen) for table in tables.tables
    }


def _are_as_wide(now: pa.Schema, before: pa.Schema) -> bool:
    """Whether columns in both schemas have the same types as before, or wider types."""
    types = {field.name: field.type for field in before}
    changed = [field for field in now if types.get(field.name, field.type) != field.type]
    return all(is_wider(field.type, types[field.name]) for field in changed)


def _with_changed_table(tables: Tables, table: Table, form: Table) -> tuple[Table, ...]:
    """Return the tables, one of them with the columns of a later definition."""
    return tuple(each if each is not table else with_later_columns(table, form) for each in tables.tables)


class _RelationReader(NamedTuple):
    """The reader for the rows of one relation, which is a table with certain columns."""

    name: str
    """The name of the table; ALL if all tables share one schema."""
    reader: RowReader
    is_older: bool = False
    """Whether the relation has the columns of rows from before the table was planned."""


@dataclass(frozen=True)
class SavedReaders:
    """A saved state of the readers, for :meth:`TableReaders.restore`."""

    tables: Tables
    readers: Mapping[str, RowReader]
    relation_readers: Mapping[Relation, _RelationReader | None]
    places: Sequence[tuple[RowReader, tuple[int, int]]]
    backfill_states: Sequence[tuple[Backfill, Any]]


class TableReaders:
    """Readers of the rows of tables; not thread-safe.

    Parameters
    ----------
    tables
        The tables as they are read.
    state
        The last known state of the publication.
    together
        Whether the rows of all tables share one schema, instead of one schema for each table.
    changes
        One of CHANGES.
    backfills
        Incomplete backfills by table.
    left_out
        Tables to ignore, by object id, as long as their definitions have these stamps.
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
        self._relation_readers: dict[Relation, _RelationReader | None] = {}
        self._before: tuple[int, Tables] = (0, tables)
        """The last commit in which a table's columns changed, and the tables as they were read before."""
        self.has_evolved = False
        """Whether tables have changed since the state of the publication was loaded."""

    def _use(self, tables: Tables) -> None:
        self.tables = tables
        """The tables as they are read, including columns that were added."""
        columns = {table.name: table.relation.names for table in tables.tables}
        self._fit = Fit(tables, {**columns}, self._settings.accept or ())

    @property
    def names(self) -> list[str]:
        """The names under which rows are returned: those of the tables, or ALL."""
        return list(tables_by_queue(self.tables, self._together))

    @property
    def ignores_new_tables(self) -> bool:
        """Whether tables that are added to the publication are ignored."""
        return self._changes == IGNORE

    @property
    def follows_new_tables(self) -> bool:
        """Whether tables that are added to the publication are also read."""
        return self._changes == EVOLVE and not self._together and not self.tables.chosen

    def has_new_tables(self, now: PublicationState) -> bool:
        """Whether the publication has new tables that have to be read."""
        return self.follows_new_tables and any(
            # A table without columns has no rows to read.
            now.columns[name] and self._left_out.get(oid) != now.stamps[name]
            for name, oid in self.new_tables(now).items()
        )

    def new_tables(self, now: PublicationState) -> dict[str, int]:
        """Return the object ids, by name, of the publication's tables that are not read yet."""
        known = self.tables
        return {
            name: oid
            for oid, name in now.names.items()
            if oid not in known.by_oid and name not in known.by_name
        }

    def tables_before(self, version: int) -> Tables:
        """Return the tables as they were read at the start of a commit, for reading it again."""
        changed, before = self._before
        return before if changed == version else self.tables

    def begin(self, part_version: int, part_rows: int) -> None:
        """Begin reading after ``part_rows`` rows of a commit; 0 and 0 to begin with a whole commit."""
        self._relation_readers = {}
        plans = tables_by_queue(self.tables, self._together)
        self._readers = {name: self._reader(plan) for name, plan in plans.items()}
        if part_rows:
            for reader in self._readers.values():
                reader.resume_after(part_version, part_rows - 1)

    def _reader(self, plan: Tables) -> RowReader:
        (table, *_) = plan.tables
        holder = None if self._together else self._backfills.get(table.name)
        return RowReader(self._settings, plan, plan.schema(), 0, from_log=True, holder=holder)

    def save(self) -> SavedReaders:
        relation_readers = [
            relation_reader.reader
            for relation_reader in self._relation_readers.values()
            if relation_reader is not None
        ]
        places = [(reader, reader.place) for reader in [*self._readers.values(), *relation_readers]]
        backfill_states = [(backfill, backfill.saved_state()) for backfill in self._backfills.values()]
        return SavedReaders(
            self.tables, dict(self._readers), dict(self._relation_readers), places, backfill_states
        )

    def restore(self, saved: SavedReaders) -> None:
        """Return to a saved state, and discard everything that was read since."""
        self._use(saved.tables)
        self._readers, self._relation_readers = dict(saved.readers), dict(saved.relation_readers)
        for reader, place in saved.places:
            reader.resume_after(*place)
        for backfill, state in saved.backfill_states:
            backfill.restore(state)

    def columns_read(self, now: PublicationState) -> dict[str, Collection[str]]:
        """Return the columns that are read, by the current name of the table."""
        return {name: self._fit.columns_of(oid, name) for oid, name in now.names.items()}

    def report_invalid(self) -> None:
        """Log the number of values that were replaced with NULL since the last call."""
        for reader in self._readers.values():
            reader.report_invalid()

    def decode(self, decoder: Decoder, messages: Sequence[bytes]) -> dict[str, list[pa.RecordBatch]]:
        """Return the rows of messages by table.

        Raises
        ------
        FeedUnavailableError
            When rows cannot be read. Its parameter ``version`` is the first such commit, if known.
        """
        self._require_partition_keys(decoder.version, messages)
        rows_by_table: dict[str, list[pa.RecordBatch]] = {}
        for part in decoder.decode(messages):
            if isinstance(part, Truncation):
                for reader in self._readers.values():
                    reader.check_truncation(part)
                continue
            changes_by_table: dict[str, tuple[RowReader, list[Changes]]] = {}
            for changes in part:
                relation_reader = self._relation_readers[changes.relation]
                assert relation_reader is not None
                changes_by_table.setdefault(relation_reader.name, (relation_reader.reader, []))[1].append(
                    changes
                )
            for name, (reader, reader_changes) in changes_by_table.items():
                rows = reader.rows_of(reader_changes)
                if rows is not None and rows.num_rows:
                    rows_by_table.setdefault(name, []).append(rows)
        return rows_by_table

    def wants(self, relation: Relation, version: int) -> bool:
        """Whether the rows of a relation are read; raise if they do not match the plan."""
        known = self._relation_readers.get(relation)
        if relation not in self._relation_readers or (known is not None and known.is_older):
            relation_reader = self._relation_reader(relation, version)
            # If a table returns to earlier columns later, that is a new change, so keep only its current
            # relation.
            others = {
                other: reader for other, reader in self._relation_readers.items() if other.oid != relation.oid
            }
            self._relation_readers = {**others, relation: relation_reader}
        return self._relation_readers[relation] is not None

    def _relation_reader(self, relation: Relation, version: int) -> _RelationReader | None:
        table = self._fit.reads(relation)
        if table is None:
            return None
        if isinstance(table, SchemaChange):
            if table.condition == "FEED_UNAVAILABLE.TABLE_ADDED":
                if self.ignores_new_tables:
                    return None
                if self.follows_new_tables:
                    # The next check finds the table, and a backfill reads all of its rows.
                    self.has_evolved = True
                    return None
            return self._evolved_reader(relation, version, table)
        name = ALL if self._together else table.name
        self._readers[name].wants(relation, version)
        return _RelationReader(name, self._readers[name])

    def _evolved_reader(self, relation: Relation, version: int, change: SchemaChange) -> _RelationReader:
        """Return the reader for a table with changed columns; raise if the change has to be refused."""
        table, refused = self._fit.table_of(relation), change.in_pump(self._settings.name, version)
        if self._changes == REFUSE or self._together or not isinstance(table, Table):
            raise refused
        domains = domains_of(self._server, {column.type for column in relation.columns})
        tables = replace(self.tables, domains={**self.tables.domains, **domains})
        form = evolved_table(table, relation, tables, change, keeps_new=self._changes == EVOLVE)
        if is_older := form is None and self._is_unread(table):
            form = earlier_table(table, relation, tables, change)
        if form is None or (not is_older and self._renames(table, relation)):
            raise refused
        chosen = self.tables.chosen or len(self.tables.tables) > 1
        plan = replace(tables, tables=(form,), several=False, chosen=chosen, some_columns=True)
        check_names(self._server, plan)
        reader, before = self._reader(plan), self._readers[form.name]
        wider, narrower = (before, reader) if is_older else (reader, before)
        if not _are_as_wide(wider.schema, narrower.schema):
            raise refused
        reader.resume_after(*before.place)
        reader.wants(relation, version)
        if not is_older:
            self._use_form(
                version, replace(tables, tables=_with_changed_table(self.tables, table, form)), form
            )
            self._readers[form.name] = reader
        return _RelationReader(form.name, reader, is_older)

    def _use_form(self, version: int, tables: Tables, form: Table) -> None:
        """Read a table with its changed columns from a commit on."""
        if form.name in self._backfills:
            # The key may have a wider type now, which changes how its values are compared.
            self._backfills[form.name].order = KeyOrder.of(self._server, form)
        if version != self._before[0]:
            self._before = version, self.tables
        self._use(tables)
        self.has_evolved = True

    def _is_unread(self, table: Table) -> bool:
        """Whether a backfill will read all rows of a table, with the planned types or wider ones.

        Then rows in the log may be from before the plan, with narrower types or fewer columns.
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
        """Whether a missing column was, or may have been, renamed, so that its values would be lost."""
        missing = [column for column in table.relation.names if column not in relation.names]
        if not missing:
            return False
        now = state_of(self._server, self._settings.publication, self.tables).with_dropped_columns(self.state)
        name = now.names.get(relation.oid)
        if name is None:
            # The table was dropped, or another table has its name.
            return False
        current = {column: number for column, (number, *_) in now.columns[name].items()}
        names = {number: column for column, number in current.items()}
        numbers = {**current, **now.dropped.get(name, {})}
        if any(not numbers.get(each) or names.get(numbers[each], each) != each for each in missing):
            # The number is 0 if it is unknown.
            return True
        new = [column for column in relation.names if column not in table.relation.names]
        # A missing and a new column were both dropped later, and may have been the same column.
        return any(each not in current for each in missing) and any(each not in current for each in new)

    def _require_partition_keys(self, version: int, messages: Sequence[bytes]) -> None:
        """Refuse partitions that do not log the key columns of their table."""
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
