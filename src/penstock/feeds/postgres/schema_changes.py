"""Whether the rows of a relation can be read by the tables that a query is planned with.

Each row of the log comes with the relation that it was written with. What fits is carried: a column that the query does not
read may come, go or change, and a type that holds no more values than the planned one is read as that. Anything else ends the
reading before the first row that does not fit, by a condition of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import FeedUnavailable
from penstock.feeds.postgres.catalog import BaseType, Table, Tables
from penstock.feeds.postgres.pgoutput import Relation

_WHOLE_NUMBERS = (21, 23, 20)
"""smallint, integer and bigint: each holds what those before it hold."""
_TEXT, _VARCHAR, _NUMERIC = 25, 1043, 1700
_TIMES = (1083, 1114, 1184, 1266)
"""Times and timestamps, whose modifier is the number of digits of a second."""
_NAMES = {
    16: "boolean", 17: "bytea", 20: "bigint", 21: "smallint", 23: "integer", 25: "text", 26: "oid", 114: "json", 700: "real",
    701: "double precision", 1042: "character", 1043: "character varying", 1082: "date", 1083: "time", 1114: "timestamp",
    1184: "timestamp with time zone", 1186: "interval", 1266: "time with time zone", 1700: "numeric", 2950: "uuid", 3802: "jsonb",
}  # fmt: skip


@dataclass(frozen=True)
class SchemaChange:
    """Why the rows of a relation cannot be read as the query is planned."""

    condition: str
    what: str
    """A clause: the table and what it is now."""
    advice: str = ""
    """What to do besides starting again."""
    parameters: dict[str, Any] = field(default_factory=dict)

    def in_stream(self, name: str, version: int) -> FeedUnavailable:
        """The error of a stream that has read all that was committed before."""
        return self._error(
            f"{name}: {self.what}, from commit {version} on. All commits before it are read: start the query again with a new "
            f"read_stream, which reads the table as it is from there on{self.advice}",
            version,
        )

    def before_start(self, name: str) -> FeedUnavailable:
        """The error of a query that has not read anything."""
        return FeedUnavailable(
            f"{name}: {self.what}, since the query was planned: start it again with a new read_stream",
            condition=self.condition,
            **self.parameters,
        )

    def in_one_commit(self, name: str, version: int) -> FeedUnavailable:
        """The error of a stream whose next commit has rows from before and after the change."""
        return FeedUnavailable(
            f"{name}: {self.what}, within commit {version}, which has rows from before and after that: no query reads both. Start "
            f"over with a new slot, a new checkpoint and an empty sink; or leave the commit out, skip=[{version}], where the copy "
            "may lack its rows",
            condition="FEED_UNAVAILABLE.CHANGED_IN_COMMIT",
            **self.parameters,
            version=version,
        )

    def in_range(self, name: str, first: int, version: int) -> FeedUnavailable:
        """The error of a range that begins with one commit, and has such rows from another one on."""
        return self._error(
            f"{name}: {self.what}, from commit {version} on. A batch reads it in two ranges: starting_version={first} with "
            f"ending_version={version - 1}, and starting_version={version}. A stream is started again with a new "
            f"read_stream{self.advice}",
            version,
        )

    def _error(self, message: str, version: int) -> FeedUnavailable:
        return FeedUnavailable(message, condition=self.condition, **self.parameters, version=version)


class Fit:
    """Which relations are read by some tables.

    Parameters
    ----------
    tables
        As the query is planned.
    selected
        The columns of the tables that it reads, by table.
    accepted
        Tables that took the place of others with their names, as the user knows: names with object ids.
    """

    def __init__(
        self, tables: Tables, selected: dict[str, Collection[str]], accepted: Collection[str] = ()
    ) -> None:
        self._tables, self._selected, self._accepted = tables, selected, accepted

    def table_of(self, relation: Relation) -> Table | SchemaChange | None:
        """The planned table that a relation's rows are of; None where they are not of the feed."""
        for table in self._tables.tables:
            if table.relation.oid == relation.oid:
                return self._renamed(table, relation) or table
        named = next((table for table in self._tables.tables if table.name == relation.name), None)
        if named is not None:
            return named if self._is_accepted(relation) else _recreated(relation)
        return None if self._tables.chosen else _added(relation)

    def columns(self) -> dict[str, list[str]]:
        """The columns that are read, by table."""
        return {table.name: self._of_interest(table) for table in self._tables.tables}

    def change(self, table: Table, relation: Relation) -> SchemaChange | None:
        """What keeps a relation's rows from being read as the table is planned; None where they can be."""
        there = {column.name: self._tables.base(column) for column in relation.columns}
        return (
            self._other_key(table, relation)
            or self._missing(table, there)
            or self._retyped(table, there)
            or self._exchanged(table, there)
            or self._more(table, there)
        )

    def _is_accepted(self, relation: Relation) -> bool:
        mine = f"{relation.name}:{relation.oid}"
        return any(each == mine or each.startswith(f"{mine}.") for each in self._accepted)

    def _renamed(self, table: Table, relation: Relation) -> SchemaChange | None:
        if relation.name == table.name or not (self._tables.several or self._tables.chosen):
            return None
        return SchemaChange(
            condition="FEED_UNAVAILABLE.TABLE_RENAMED",
            what=f"{table.name} is called {relation.name}",
            parameters={"table": table.name},
        )

    def _other_key(self, table: Table, relation: Relation) -> SchemaChange | None:
        if not self._tables.changes_rows:
            return None
        key = tuple(column.name for column in relation.columns if column.key)
        if relation.identity == "f" or not key:
            # Rows with all columns, or inserts alone, which have them too.
            key = table.key if set(table.key) <= {column.name for column in relation.columns} else key
        if set(key) == set(table.key):
            return None
        return key_changed(table, key)

    def _missing(self, table: Table, there: dict[str, BaseType]) -> SchemaChange | None:
        known = {column.name for column in table.relation.columns}
        for name in self._of_interest(table):
            if name not in there:
                new = next((each for each in there if each not in known), None)
                but = f", and a new one {new!r}" if new is not None else ""
                return SchemaChange(
                    condition="FEED_UNAVAILABLE.COLUMN_DROPPED",
                    what=f"{table.name} has no column {name!r} any more{but}",
                    parameters={"table": table.name, "column": name},
                )
        return None

    def _retyped(self, table: Table, there: dict[str, BaseType]) -> SchemaChange | None:
        planned = dict(zip((column.name for column in table.relation.columns), table.bases, strict=True))
        for name in self._of_interest(table):
            if not holds(planned[name], there[name]):
                return SchemaChange(
                    condition="FEED_UNAVAILABLE.COLUMN_TYPE_CHANGED",
                    what=f"the column {name!r} of {table.name} is {type_name(there[name])}, it was {type_name(planned[name])}",
                    advice=f". Then update {table.name} set {name} = {name} sends the values that the change has rewritten",
                    parameters={"table": table.name, "column": name},
                )
        return None

    def _exchanged(self, table: Table, there: Collection[str]) -> SchemaChange | None:
        """Columns keep their places as long as they are: names in another order are those of other columns."""
        planned = self._of_interest(table)
        now = [name for name in there if name in planned]
        if now == planned:
            return None
        names = [name for name, other in zip(planned, now, strict=True) if name != other]
        values = ", ".join(f"{name} = {name}" for name in names)
        return SchemaChange(
            condition="FEED_UNAVAILABLE.COLUMN_REPLACED",
            what=f"the columns {_listed(names)} of {table.name} are others than before",
            advice=f". Then update {table.name} set {values} sends their values",
            parameters={"table": table.name, "column": names[0]},
        )

    def _more(self, table: Table, there: dict[str, BaseType]) -> SchemaChange | None:
        if self._tables.some_columns or not self._reads_all(table):
            return None
        known = {column.name for column in table.relation.columns}
        new = next((name for name in there if name not in known), None)
        if new is None:
            return None
        return SchemaChange(
            condition="FEED_UNAVAILABLE.COLUMN_ADDED",
            what=f"{table.name} has a new column {new!r}",
            advice=f". If the column has a default, rows from before have it at the source: give it to the copy's column too, or have them "
            f"sent by update {table.name} set {new} = {new}",
            parameters={"table": table.name, "column": new},
        )

    def _of_interest(self, table: Table) -> list[str]:
        selected = self._selected.get(table.name, ())
        return [
            column.name
            for column in table.relation.columns
            if column.name in selected or (self._tables.several and column.name in table.key)
        ]

    def _reads_all(self, table: Table) -> bool:
        selected = self._selected.get(table.name, ())
        return all(column.name in selected for column in table.relation.columns)


def key_changed(table: Table, key: Collection[str]) -> SchemaChange:
    """Rows that are identified by other columns than those of the plan."""
    return SchemaChange(
        condition="FEED_UNAVAILABLE.KEY_CHANGED",
        what=f"the rows of {table.name} are identified by {_listed(key)}, and were by {_listed(table.key)}",
        parameters={"table": table.name, "key": list(key)},
    )


def table_removed(name: str, table: Table) -> FeedUnavailable:
    """The error of a stream one of whose tables has left the publication."""
    return FeedUnavailable(
        f"{name}: {table.name} is no longer in the publication; all that was written before is read. Start the query again with a "
        "new read_stream, which does without it; or add it again, and start over with a new slot, since rows were not logged",
        condition="FEED_UNAVAILABLE.TABLE_REMOVED",
        table=table.name,
    )


def _added(relation: Relation) -> SchemaChange:
    return SchemaChange(
        condition="FEED_UNAVAILABLE.TABLE_ADDED",
        what=f"the publication has a table {relation.name} that the query does not know",
        advice="; or name the tables that it wants, with tables=[…]",
        parameters={"table": relation.name},
    )


def _recreated(relation: Relation) -> SchemaChange:
    return SchemaChange(
        condition="FEED_UNAVAILABLE.TABLE_RECREATED",
        what=f"{relation.name} is another table: the one of that name was dropped, or renamed",
        parameters={"table": relation.name},
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


def holds(planned: BaseType, found: BaseType) -> bool:
    """Whether a planned type holds all values of another one as they are, and its change has not rewritten any.

    A type with fewer digits is not held: values that were there before have been rounded, and the log does not have them.
    """
    if planned == found:
        return True
    (kind, modifier), (other, other_modifier) = planned, found
    if kind in _WHOLE_NUMBERS and other in _WHOLE_NUMBERS:
        return _WHOLE_NUMBERS.index(other) <= _WHOLE_NUMBERS.index(kind)
    if kind in (_TEXT, _VARCHAR) and other in (_TEXT, _VARCHAR):
        return _no_less(modifier, other_modifier)
    if kind == other and kind in _TIMES:
        return _no_less(modifier, other_modifier)
    if kind == other == _NUMERIC and modifier >= 4 and other_modifier >= 4:
        return _scale(modifier) == _scale(other_modifier) and _precision(other_modifier) <= _precision(
            modifier
        )
    return False


def _no_less(modifier: int, other: int) -> bool:
    # Text is text in Arrow, and times have six digits, whatever their limit.
    return other < 0 or 0 <= modifier <= other


def _scale(modifier: int) -> int:
    return (modifier - 4) & 0x7FF


def _precision(modifier: int) -> int:
    return (modifier - 4) >> 16


def type_name(base: BaseType) -> str:
    """A type as SQL writes it."""
    kind, modifier = base
    name = _NAMES.get(kind, f"the type with object id {kind}")
    if kind == _NUMERIC and modifier >= 4:
        scale = _scale(modifier)
        return f"{name}({_precision(modifier)}, {scale - 0x800 if scale >= 0x400 else scale})"
    if kind in (_VARCHAR, 1042) and modifier >= 4:
        return f"{name}({modifier - 4})"
    if kind in _TIMES and modifier >= 0:
        return f"{name}({modifier})"
    return name
