"""Schema changes of tables while a query runs: checks whether logged rows match the planned tables.

The log has the relation that each row was written with. Columns that the query does not read may be added,
dropped or changed, and a narrower type is read as the planned type. Any other change ends the query before
the first row that does not match, with its own error condition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres.catalog import SNAPSHOT_SCHEMA, BaseType, Table, Tables
from penstock.feeds.postgres.pgoutput import Relation, Truncation
from penstock.feeds.postgres.server import START_OVER
from penstock.feeds.postgres.settings import FeedSettings
from penstock.feeds.postgres.values import NUMERIC, digits
from penstock.json_text import Json

_INTEGER_TYPES = (21, 23, 20)
"""smallint, integer and bigint, from the narrowest to the widest."""
_REAL, _DOUBLE = 700, 701
_TEXT, _VARCHAR = 25, 1043
_TIMES = (1083, 1114, 1184, 1266)
"""Times and timestamps, whose modifier is the number of fractional digits of a second."""
_NEVER_LONG = frozenset((16, 18, 20, 21, 23, 26, 700, 701, 790, 1082, 1083, 1114, 1184, 1186, 1266, 2950))
"""Types whose values are never stored outside of their row (TOASTed)."""
_EVOLVABLE = (
    "FEED_UNAVAILABLE.COLUMN_ADDED",
    "FEED_UNAVAILABLE.COLUMN_DROPPED",
    "FEED_UNAVAILABLE.COLUMN_TYPE_CHANGED",
)
_NAMES = {
    16: "boolean", 17: "bytea", 20: "bigint", 21: "smallint", 23: "integer", 25: "text", 26: "oid",
    114: "json", 700: "real", 701: "double precision", 1042: "character", 1043: "character varying",
    1082: "date", 1083: "time", 1114: "timestamp", 1184: "timestamp with time zone", 1186: "interval",
    1266: "time with time zone", 1700: "numeric", 2950: "uuid", 3802: "jsonb",
}  # fmt: skip


@dataclass(frozen=True)
class SchemaChange:
    """A change of a table after which its rows cannot be read with the plan of the query."""

    condition: str
    description: str
    """A clause that describes the change, with the name of the table."""
    advice: str = ""
    """What to do in addition to restarting the query."""
    parameters: Json = field(default_factory=dict)
    remedy: str = ""
    """What to do if no new query can read the rows."""

    def in_stream(self, name: str, version: int) -> FeedUnavailableError:
        """Return the error for a stream that has read all earlier commits."""
        remedy = self.remedy or (
            "All earlier commits have been read: start the query again with a new read_stream, which reads "
            f"the table with its changes{self.advice}"
        )
        return self._error(f"{name}: {self.description}, from commit {version} on. {remedy}", version)

    def in_pump(self, name: str, version: int) -> FeedUnavailableError:
        """Return the error for a pump that has appended all earlier commits."""
        if self.condition == "FEED_UNAVAILABLE.TABLE_ADDED":
            remedy = (
                "Start the pump with schema_changes='evolve' (--schema-changes evolve) to also read the "
                "table, or with 'ignore' to ignore it"
            )
        else:
            remedy = self.remedy or (
                "All earlier commits are in the queues. To read the table with its changes, remove the pump "
                "with `penstock pump remove`, drop the slot, and start again with other queues; or revert "
                "the change of the table, and skip the commits in between with skip=[…]"
            )
        return self._error(f"{name}: {self.description}, from commit {version} on. {remedy}", version)

    def in_recovery(self, name: str) -> FeedUnavailableError:
        """Return the error for a pump that cannot reread the table into its queue."""
        return self._error(
            f"{name}: {self.description}, so the pump cannot recover. Revert the change of the table; or "
            "start over with `penstock pump remove`, a new slot and other queues"
        )

    def before_start(self, name: str) -> FeedUnavailableError:
        """Return the error for a query that has not read any rows yet."""
        return self._error(
            f"{name}: {self.description}, after the query was planned: start it again with a new read_stream"
        )

    def in_one_commit(self, name: str, version: int) -> FeedUnavailableError:
        """Return the error for a stream whose next commit has rows from before and after the change."""
        return self._error(
            f"{name}: {self.description}, within commit {version}, and no query can read its rows from both "
            f"before and after the change. {START_OVER.capitalize()}; or skip the commit with "
            f"skip=[{version}]",
            version,
            condition="FEED_UNAVAILABLE.CHANGED_IN_COMMIT",
        )

    def in_range(self, name: str, first: int, version: int) -> FeedUnavailableError:
        """Return the error for a read of a range, from the range's first commit and that of the change."""
        remedy = self.remedy or (
            f"Read a batch in two ranges: starting_version={first} with ending_version={version - 1}, and "
            f"starting_version={version}. Start a stream again with a new read_stream{self.advice}"
        )
        return self._error(f"{name}: {self.description}, from commit {version} on. {remedy}", version)

    def _error(
        self, message: str, version: int | None = None, condition: str | None = None
    ) -> FeedUnavailableError:
        parameters = self.parameters if version is None else {**self.parameters, "version": version}
        return FeedUnavailableError(message, condition=condition or self.condition, **parameters)


class Fit:
    """Check of whether the rows of logged relations can be read as planned tables.

    ``selected`` has the columns that the query reads, by table. ``accepted`` has tokens (names with object
    ids) of recreated tables that the user accepts in place of the planned ones.
    """

    def __init__(
        self, tables: Tables, selected: dict[str, Collection[str]], accepted: Collection[str] = ()
    ) -> None:
        self._tables, self._selected, self._accepted = tables, selected, accepted

    def reads(self, relation: Relation) -> Table | SchemaChange | None:
        """Return the planned table for reading a relation's rows, or the change that prevents reading them.

        The result is None if the feed does not read the rows.
        """
        table = self.table_of(relation)
        return (self._change(table, relation) or table) if isinstance(table, Table) else table

    def table_of(self, relation: Relation) -> Table | SchemaChange | None:
        """Return the planned table of a relation, without comparing columns."""
        if relation.schema == SNAPSHOT_SCHEMA:
            return None
        table = self._tables.by_oid.get(relation.oid)
        if table is not None:
            return self._renamed(table, relation) or table
        named = self._tables.by_name.get(relation.name)
        if named is not None:
            if self._is_accepted(relation):
                return named
            description = (
                f"{relation.name} was recreated: the earlier table with this name was dropped or renamed"
            )
            return _schema_change("TABLE_RECREATED", relation.name, description)
        if self._tables.chosen:
            return None
        description = (
            f"the publication has a table {relation.name} that was added after the query was planned"
        )
        return _schema_change(
            "TABLE_ADDED", relation.name, description, "; or select the tables to read with tables=[…]"
        )

    def columns_of(self, oid: int, name: str) -> list[str]:
        """Return the columns that are read from a table, which may have been renamed or recreated."""
        table = self._tables.by_oid.get(oid) or self._tables.by_name.get(name)
        return [] if table is None else self._columns_read(table)

    def _change(self, table: Table, relation: Relation) -> SchemaChange | None:
        logged = {column.name: self._tables.base(column) for column in relation.columns}
        return (
            self._other_key(table, relation)
            or self._dropped(table, logged)
            or self._retyped(table, logged)
            or self._exchanged(table, logged)
            or self._added(table, logged)
        )

    def _is_accepted(self, relation: Relation) -> bool:
        token = f"{relation.name}:{relation.oid}"
        return any(accepted == token or accepted.startswith(f"{token}.") for accepted in self._accepted)

    def _renamed(self, table: Table, relation: Relation) -> SchemaChange | None:
        if relation.name == table.name or not (self._tables.several or self._tables.chosen):
            return None
        description = f"{table.name} was renamed to {relation.name}"
        return _schema_change("TABLE_RENAMED", table.name, description)

    def _other_key(self, table: Table, relation: Relation) -> SchemaChange | None:
        if not self._tables.changes_rows:
            return None
        key = relation.identifying
        if not key and table.keyed and relation.identity in "di":
            return _key_missing(table)
        if relation.identity == "f" or not key:
            # The rows have all columns (full identity, or only inserts). They need no key if all columns
            # identify rows. With replica identity nothing, only the catalog has the key.
            key = table.key if set(table.key).issubset(relation.names) else key
        if set(key) == set(table.key):
            return None
        return key_changed(table, key)

    def _dropped(self, table: Table, logged: dict[str, BaseType]) -> SchemaChange | None:
        for name in self._columns_read(table):
            if name not in logged:
                added = _first_added(table, logged)
                replacement = f", and has a new column {added!r}" if added is not None else ""
                description = f"{table.name} no longer has the column {name!r}{replacement}"
                return _schema_change("COLUMN_DROPPED", table.name, description, column=name)
        return None

    def _retyped(self, table: Table, logged: dict[str, BaseType]) -> SchemaChange | None:
        planned = dict(zip(table.relation.names, table.bases, strict=True))
        for name in self._columns_read(table):
            if not can_represent(planned[name], logged[name]):
                before, after = type_name(planned[name]), type_name(logged[name])
                return _schema_change(
                    "COLUMN_TYPE_CHANGED",
                    table.name,
                    f"the column {name!r} of {table.name} changed from {before} to {after}",
                    f". Then {_update(table, {name: logged[name]}, 'the rewritten values')}",
                    column=name,
                )
        return None

    def _exchanged(self, table: Table, logged: Mapping[str, BaseType]) -> SchemaChange | None:
        """Return the change if columns got the names of other columns.

        Columns never change their order, and new columns are last, so a name at another position belongs to
        another column.
        """
        planned = self._columns_read(table)
        current = [name for name in logged if name in planned]
        old_ones = list(takewhile(table.relation.names.__contains__, logged))
        names = [name for name, other in zip(planned, current, strict=True) if name != other]
        names += [name for name in planned if name not in old_ones and name not in names]
        if not names:
            return None
        types = {name: logged[name] for name in names}
        return _schema_change(
            "COLUMN_REPLACED",
            table.name,
            f"the columns {_listed(names)} of {table.name} were replaced by other columns with these names",
            f". Then {_update(table, types, 'their values')}",
            column=names[0],
            columns=names,
        )

    def _added(self, table: Table, logged: dict[str, BaseType]) -> SchemaChange | None:
        reads_all = set(table.relation.names).issubset(self._selected.get(table.name, ()))
        added = _first_added(table, logged)
        if self._tables.some_columns or not reads_all or added is None:
            return None
        return _schema_change(
            "COLUMN_ADDED",
            table.name,
            f"{table.name} has a new column {added!r}",
            ". If the column has a default, older rows have it at the source: set the same default for the "
            f"column of the copy, or {_update(table, {added: logged[added]}, 'the rows')}",
            column=added,
        )

    def _columns_read(self, table: Table) -> list[str]:
        selected = self._selected.get(table.name, ())
        return [
            name
            for name in table.relation.names
            if name in selected or (self._tables.several and name in table.key)
        ]


def update_to_send(name: str, identity: str, types: Mapping[str, BaseType], what: str) -> str:
    """Return the advice to run an update, so that the log has the current values of columns.

    PostgreSQL does not log the values of such an update that are stored outside of their row.
    """
    values = ", ".join(f"{column} = {column}" for column in types)
    advice = f"run update {name} set {values} to send {what}"
    if identity == "f" or all(kind in _NEVER_LONG for kind, _ in types.values()):
        return advice
    return f"{advice}; long values are sent only with replica identity full"


def _update(table: Table, types: Mapping[str, BaseType], what: str) -> str:
    return update_to_send(table.name, table.relation.identity, types, what)


def evolved_table(
    table: Table, relation: Relation, tables: Tables, change: SchemaChange, *, keeps_new: bool
) -> Table | None:
    """Return a planned table with the columns of a logged relation whose columns were added, dropped or
    widened.

    The result is None if the relation has any other change. With ``keeps_new`` it has the new columns and
    wider types; remaining columns keep their planned types.
    """
    if not _may_evolve(table, relation, tables, change):
        return None
    planned = dict(zip(table.relation.names, table.bases, strict=True))
    logged = {column.name: tables.base(column) for column in relation.columns}
    wider = {
        name for name in planned.keys() & logged.keys() if not can_represent(planned[name], logged[name])
    }
    if wider and not keeps_new:
        return None
    if not all(_widens(planned[name], logged[name], key=name in table.key) for name in wider):
        return None
    bases = logged | {name: base for name, base in planned.items() if name not in wider}
    return _with_columns(
        table, relation, bases, [name for name in relation.names if keeps_new or name in planned]
    )


def earlier_table(table: Table, relation: Relation, tables: Tables, change: SchemaChange) -> Table | None:
    """Return a planned table with the columns of an earlier relation, with fewer columns or narrower types.

    The result is None if the relation cannot be an earlier definition of the table.
    """
    if not _may_evolve(table, relation, tables, change):
        return None
    planned = dict(zip(table.relation.names, table.bases, strict=True))
    logged = {column.name: tables.base(column) for column in relation.columns if column.name in planned}
    narrower = {name: base for name, base in logged.items() if not can_represent(planned[name], base)}
    if not all(_widens(base, planned[name], key=name in table.key) for name, base in narrower.items()):
        return None
    return _with_columns(table, relation, planned | narrower, list(logged))


def _may_evolve(table: Table, relation: Relation, tables: Tables, change: SchemaChange) -> bool:
    """Whether a logged relation has the key of a planned table, and common columns in the same order."""
    if change.condition not in _EVOLVABLE or (tables.changes_rows and not table.keyed):
        # Without a key, all columns identify a row, so they must not change.
        return False
    planned = table.relation.names
    common = [name for name in relation.names if name in planned]
    return common == [name for name in planned if name in common] and set(table.key) <= set(common)


def _with_columns(
    table: Table, relation: Relation, bases: Mapping[str, BaseType], names: Sequence[str]
) -> Table:
    """Return a table with the given columns of a relation, and their types."""
    columns = tuple(column for column in relation.columns if column.name in names)
    return replace(
        table,
        relation=replace(relation, columns=columns),
        bases=tuple(bases[column.name] for column in columns),
        read_as=tuple((name, kind) for name, kind in table.read_as if name in relation.names),
    )


def with_later_columns(table: Table, form: Table) -> Table:
    """Return a table with the columns of its later definition, in addition to its own."""
    known, later = (
        {column.name: (column, base) for column, base in zip(each.relation.columns, each.bases, strict=True)}
        for each in (table, form)
    )
    columns, bases = zip(*(known | later).values(), strict=True)
    return replace(table, relation=replace(table.relation, columns=columns), bases=bases)


def _first_added(table: Table, logged: Collection[str]) -> str | None:
    """Return the first logged column that the planned table does not have."""
    return next((name for name in logged if name not in table.relation.names), None)


def key_changed(table: Table, key: Collection[str]) -> SchemaChange:
    """Return the change of a table whose key differs from the planned one."""
    description = (
        f"the rows of {table.name} are identified by {_listed(key)}, no longer by {_listed(table.key)}"
    )
    return _schema_change("KEY_CHANGED", table.name, description, key=list(key))


def _key_missing(table: Table) -> SchemaChange:
    """Return the change of a table that had no key for a while, so that rows may have duplicate keys."""
    description = f"{table.name} has rows that were inserted while it had no key, so keys may have duplicates"
    remedy = f"Add a key to the table, and {START_OVER}"
    return replace(_schema_change("KEY_MISSING", table.name, description), remedy=remedy)


def removed_in_pump(name: str, table: Table) -> FeedUnavailableError:
    """Return the error for a pump if one of its tables was removed from the publication."""
    return FeedUnavailableError(
        f"{name}: {table.name} was dropped, or removed from the publication; all earlier rows are in its "
        "queue. Remove the pump with `penstock pump remove`, drop the slot, and start another pump for the "
        "remaining tables, with other queues",
        condition="FEED_UNAVAILABLE.TABLE_REMOVED",
        table=table.name,
    )


def removed_in_stream(name: str, table: Table) -> FeedUnavailableError:
    """Return the error for a stream if one of its tables was removed from the publication."""
    return FeedUnavailableError(
        f"{name}: {table.name} is no longer in the publication; all earlier rows have been read. Start the "
        "query again with a new read_stream, without the table; or add the table again, and start over with "
        "a new slot, because rows are missing from the log",
        condition="FEED_UNAVAILABLE.TABLE_REMOVED",
        table=table.name,
    )


def partition_key(name: str, table: Table, partition: Relation, version: int) -> FeedUnavailableError:
    """Return the error for a partition whose changes are logged without the key of its table."""
    logged = _listed(partition.identifying)
    return FeedUnavailableError(
        f"{name}: from commit {version} on, the partition {partition.name} has another replica identity: it "
        f"logs {logged}, but rows of {table.name} are identified by {_listed(table.key)}, whose changes it "
        f"does not log. Run alter table {partition.name} replica identity default, or using the index on "
        f"those columns, and {START_OVER}",
        condition="FEED_UNAVAILABLE.KEY_UNKNOWN",
        table=table.name,
        partition=partition.name,
        version=version,
    )


def truncated(settings: FeedSettings, fit: Fit, truncation: Truncation) -> FeedUnavailableError | None:
    """Return the error for a TRUNCATE; None if its tables are not read, or the settings skip it."""
    if settings.truncate == "skip":
        return None
    tables = [relation for relation in truncation.relations if isinstance(fit.table_of(relation), Table)]
    names = ", ".join(relation.name for relation in tables)
    if not names:
        return None
    return FeedUnavailableError(
        f"{settings.name}: TRUNCATE emptied {names} in commit {truncation.version}, without deletes in the "
        f"log. {START_OVER.capitalize()}; or continue with "
        'truncate="skip" if the copy may keep the rows',
        condition="FEED_UNAVAILABLE.TRUNCATED",
        tables=names,
        version=truncation.version,
    )


def _schema_change(
    condition: str, table: str, description: str, advice: str = "", **parameters: object
) -> SchemaChange:
    return SchemaChange(f"FEED_UNAVAILABLE.{condition}", description, advice, {"table": table, **parameters})


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


def can_represent(planned: BaseType, logged: BaseType) -> bool:
    """Whether a planned type can represent all values of a logged type, and the change rewrote no values.

    A change to fewer digits rounds existing values, which are not in the log, so this returns False for it.
    """
    if planned == logged:
        return True
    (kind, modifier), (other, other_modifier) = planned, logged
    if kind in _INTEGER_TYPES and other in _INTEGER_TYPES:
        return _INTEGER_TYPES.index(other) <= _INTEGER_TYPES.index(kind)
    if kind in (_TEXT, _VARCHAR) and other in (_TEXT, _VARCHAR):
        return _is_as_long(modifier, other_modifier)
    if kind == other and kind in _TIMES:
        return _is_as_long(modifier, other_modifier)
    if kind == other == NUMERIC and modifier >= 4 and other_modifier >= 4:
        (precision, scale), (other_precision, other_scale) = map(digits, (modifier, other_modifier))
        return scale == other_scale and other_precision <= precision
    return False


def _widens(planned: BaseType, logged: BaseType, *, key: bool) -> bool:
    """Whether a logged type can represent all values of a planned type, and the change kept them equal.

    With ``key``, the text of the values has to stay the same too, because a backfill identifies rows by it.
    """
    (kind, modifier), (other, other_modifier) = planned, logged
    if kind == other == NUMERIC and modifier >= 4 and other_modifier >= 4:
        (precision, scale), (other_precision, other_scale) = map(digits, (modifier, other_modifier))
        keeps_text = scale == other_scale or not key
        return keeps_text and other_scale >= scale and other_precision - other_scale >= precision - scale
    if kind in _INTEGER_TYPES and other in _INTEGER_TYPES:
        return can_represent(logged, planned)
    return (kind, other) == (_REAL, _DOUBLE) and not key


def is_as_wide(now: BaseType, planned: BaseType) -> bool:
    """Whether a column's type is the planned one, or changed from it without changing values."""
    return can_represent(planned, now) or _widens(planned, now, key=False)


def _is_as_long(modifier: int, other: int) -> bool:
    # In Arrow there is one type of text, and times always have six fractional digits.
    return other < 0 or 0 <= modifier <= other


def type_name(base: BaseType) -> str:
    kind, modifier = base
    name = _NAMES.get(kind, f"the type with object id {kind}")
    if kind == NUMERIC and modifier >= 4:
        precision, scale = digits(modifier)
        return f"{name}({precision}, {scale})"
    if kind in (_VARCHAR, 1042) and modifier >= 4:
        return f"{name}({modifier - 4})"
    if kind in _TIMES and modifier >= 0:
        return f"{name}({modifier})"
    return name
