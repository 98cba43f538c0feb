"""The state of a publication: its tables, why they are part of it, and their definitions.

A query stores the state with its position in the checkpoint. The module ``unlogged`` detects changes between
two states that are not in the log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from reprlib import repr as limited
from typing import TypeVar

from penstock.errors import CheckpointMismatchError
from penstock.feeds.postgres.catalog import Table, Tables, missing_publication
from penstock.feeds.postgres.server import START_OVER, Row, Statements
from penstock.json_text import Json

T = TypeVar("T")
_MAX_COLUMNS = 1_600

Columns = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class PrimaryKey:
    """The primary key of a table, and its replica identity."""

    identity: str
    """The first letter of the replica identity: default, index, full or nothing."""
    constraint: int
    """The object id of the key's constraint, which never changes; 0 without a key."""
    columns: tuple[int, ...]
    """The numbers of the key columns."""


@dataclass(frozen=True)
class PublicationState:
    """A publication and its tables at one point in time."""

    transaction: int
    """The server's next transaction id; objects that it or later transactions create are newer."""
    publication: str
    """The publication's object id, the transaction that last altered it, and the operations it publishes."""
    tables: Mapping[str, str]
    """By name: the table's object id, and why it is part of the publication."""
    partitions: Mapping[str, Mapping[int, str]]
    """By table that is published under its own name: its leaf partitions, each with a stamp that changes when
    it is attached."""
    columns: Mapping[str, Columns]
    """By table and column: the number, which is never reused, the type and the modifier."""
    widths: Mapping[str, int]
    """By table: the highest column number that was ever used."""
    keys: Mapping[str, PrimaryKey]
    stamps: Mapping[str, str]
    """By table: a value that changes when the table is altered."""
    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By table: planned columns that were dropped, with their numbers; 0 if the number is unknown."""
    timeline: int = 0
    """The server's timeline; 0 if unknown."""

    def to_json(self) -> Json:
        """Return the part of the state that a checkpoint stores."""
        dropped = {name: dict(columns) for name, columns in self.dropped.items()}
        return ({"dropped": dropped} if dropped else {}) | {
            "transaction": self.transaction,
            "timeline": self.timeline,
            "publication": self.publication,
            "tables": dict(self.tables),
            "partitions": {
                name: {str(oid): stamp for oid, stamp in partitions.items()}
                for name, partitions in self.partitions.items()
            },
            "columns": {name: dict(columns) for name, columns in self.columns.items()},
            "widths": dict(self.widths),
            "keys": {
                name: [key.identity, key.constraint, list(key.columns)] for name, key in self.keys.items()
            },
        }

    @classmethod
    def from_json(cls, value: Json) -> PublicationState:
        """Return the state from a checkpoint; raise an error of a lookup or a value if it is malformed."""
        state = cls(
            _integer(value["transaction"]),
            _text(value["publication"]),
            {name: _text(entry) for name, entry in value["tables"].items()},
            {
                name: {int(oid): _text(stamp) for oid, stamp in partitions.items()}
                for name, partitions in value["partitions"].items()
            },
            {name: _columns(columns) for name, columns in value["columns"].items()},
            {name: _column_number(width) for name, width in value["widths"].items()},
            {
                name: PrimaryKey(_text(identity), _integer(constraint), tuple(map(_column_number, columns)))
                for name, (identity, constraint, columns) in value["keys"].items()
            },
            {},
            {
                name: {column: _column_number(number) for column, number in columns.items()}
                for name, columns in value.get("dropped", {}).items()
            },
            _integer(value.get("timeline", 0)),
        )
        state.oids()
        if not state.tables.keys() == state.columns.keys() == state.widths.keys() == state.keys.keys():
            raise ValueError(value)
        return state

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the tables by object id."""
        return {oid_of(entry): name for name, entry in self.tables.items()}

    def oids(self) -> set[int]:
        """Return the object ids of the tables and their partitions."""
        return set(self.names).union(*self.partitions.values())

    def definitions(self) -> tuple[object, ...]:
        """Return values that change if a table or the publication is altered, or a standby is promoted."""
        return self.publication, self.tables, self.partitions, self.stamps, self.timeline

    def columns_and_keys(self) -> tuple[object, ...]:
        return self.columns, self.widths, self.keys

    def with_dropped_columns(self, earlier: PublicationState) -> PublicationState:
        """Return the state with the numbers of dropped columns, which only an earlier state has.

        A later column with the name of a dropped one is a different column, unless it has the same number.
        """
        dropped = dict(self.dropped)
        for earlier_name, name in same_tables(earlier, self):
            numbers = {column: number for column, (number, *_) in earlier.columns[earlier_name].items()}
            numbers |= earlier.dropped.get(earlier_name, {})
            if name in dropped:
                dropped[name] = {column: numbers.get(column, 0) for column in dropped[name]}
        return replace(self, dropped=dropped, timeline=self.timeline or earlier.timeline)

    def with_tables(self, names: Collection[str], now: PublicationState) -> PublicationState:
        """Return the state with the given tables replaced by those of a later state."""

        def merged(before: Mapping[str, T], after: Mapping[str, T]) -> dict[str, T]:
            return {**before, **{name: after[name] for name in names if name in after}}

        return replace(
            self,
            tables=merged(self.tables, now.tables),
            partitions=merged(self.partitions, now.partitions),
            columns=merged(self.columns, now.columns),
            widths=merged(self.widths, now.widths),
            keys=merged(self.keys, now.keys),
            stamps=merged(self.stamps, now.stamps),
        )

    def primary_key(self, name: str) -> set[str]:
        """Return the names of the columns of a table's primary key."""
        numbers = self.keys[name].columns
        return {column for column, (number, *_) in self.columns[name].items() if number in numbers}


@dataclass(frozen=True)
class StoredState:
    """The state of a publication that a checkpoint stores with a version."""

    newest: PublicationState
    since: int
    """The end of the log when ``newest`` was loaded; later rows were written in this or a later state."""
    earlier: PublicationState
    """The last state that was loaded at or before the version."""

    def to_json(self) -> Json:
        if self.newest.columns_and_keys() == self.earlier.columns_and_keys():
            return self.newest.to_json()
        return self.newest.to_json() | {"since": self.since, "earlier": self.earlier.to_json()}

    @classmethod
    def from_json(cls, value: object) -> StoredState:
        """Return the state from a checkpoint, and check it, because the file may have been edited."""
        try:
            if not isinstance(value, dict):
                raise TypeError(value)
            newest = PublicationState.from_json(value)
            if "earlier" not in value:
                return cls(newest, 0, newest)
            return cls(newest, _integer(value["since"]), PublicationState.from_json(value["earlier"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointMismatchError(
                f"the checkpoint has the publication's state {limited(value)}, which Penstock cannot have "
                "written: restore the checkpoint from a copy, or start over with a new slot, a new "
                "checkpoint and an empty sink",
                condition="CHECKPOINT_MISMATCH.MALFORMED",
            ) from None


def oid_of(entry: str) -> int:
    """Return the object id in a table's entry of :attr:`PublicationState.tables`."""
    return int(entry.partition(".")[0])


def same_tables(before: PublicationState, now: PublicationState) -> Iterator[tuple[str, str]]:
    """Yield the earlier and the current name of each table that is in both states."""
    for oid, name in now.names.items():
        if oid in before.names:
            yield before.names[oid], name


def removed_tables(tables: Tables, state: PublicationState) -> list[Table]:
    """Return the planned tables that were removed from the publication."""
    return [
        table
        for table in tables.tables
        if table.relation.oid not in state.names and table.name not in state.tables
    ]


def state_of(server: Statements, publication: str, tables: Tables) -> PublicationState:
    """Load the current state of a publication, or of the feed's named tables if it has any."""
    (transaction,) = server.fetch("transaction")
    publications = server.fetch("publication", publication=publication)
    if not publications:
        raise missing_publication(server, publication)
    rows = server.fetch("published_tables", publication=publication)
    if tables.chosen:
        rows = [row for row in rows if row.oid in tables.by_oid or row.name in tables.by_name]
    _require_logged(server, rows)
    return PublicationState(
        transaction.next,
        publications[0].state,
        {row.name: row.entry for row in rows},
        {
            row.name: {int(oid): stamp for oid, stamp in row.partitions.items()}
            for row in rows
            if row.partitions is not None
        },
        {row.name: _columns(row.columns or {}) for row in rows},
        {row.name: row.width for row in rows},
        {row.name: PrimaryKey(row.identity, row.key or 0, tuple(row.key_columns or ())) for row in rows},
        {row.name: row.stamp for row in rows},
        _dropped(rows, tables),
        transaction.timeline,
    )


def _dropped(rows: Sequence[Row], tables: Tables) -> dict[str, dict[str, int]]:
    """Return the planned columns that were dropped; a plan may belong to earlier rows in the log."""
    dropped = {}
    for row in rows:
        table = tables.by_oid.get(row.oid) or tables.by_name.get(row.name)
        columns = () if table is None else table.relation.names
        missing = {column: 0 for column in columns if column not in (row.columns or {})}
        if missing:
            dropped[row.name] = missing
    return dropped


def _require_logged(server: Statements, rows: Sequence[Row]) -> None:
    for row in rows:
        for partition in row.unlogged:
            raise server.unavailable(
                "PARTITION_UNLOGGED",
                f"the partition {partition} is UNLOGGED, so its changes are not in the log: alter table "
                f"{partition} set logged, and {START_OVER}",
                table=row.name,
                partition=partition,
            )


def _columns(columns: Mapping[str, Sequence[int]]) -> Columns:
    return {
        name: (_column_number(number), _integer(kind), _integer(modifier))
        for name, (number, kind, modifier) in columns.items()
    }


def _column_number(value: object) -> int:
    number = _integer(value)
    if not 0 <= number <= _MAX_COLUMNS:
        raise ValueError(value)
    return number


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(value)
    return value
