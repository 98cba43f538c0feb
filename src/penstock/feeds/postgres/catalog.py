"""The tables of a publication: their columns as Arrow types, and the keys that identify their rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import FeedUnavailableError
from penstock.feeds.contract import ChangeContract
from penstock.feeds.postgres.pgoutput import Column, Relation
from penstock.feeds.postgres.server import Row, Statements
from penstock.feeds.postgres.values import AS_TYPES, arrow_type
from penstock.feeds.protocol import METADATA_FIELDS
from penstock.json_text import Json, parse_json

SEQUENCE, UNCHANGED_COLUMNS, TABLE, KEY = "_commit_sequence", "_unchanged", "_table", "_key"
_FEED_COLUMNS = (
    pa.field(SEQUENCE, pa.int64(), nullable=False),
    pa.field(UNCHANGED_COLUMNS, pa.list_(pa.field("element", pa.string()))),
    *METADATA_FIELDS,
)
_TABLE_AND_KEY = (pa.field(TABLE, pa.string(), nullable=False), pa.field(KEY, pa.string(), nullable=False))
SNAPSHOT_SCHEMA = "penstock_snapshots"
_STORE_TABLES = {"feed_commit", "marked_source", "observed_end", "segment"}
"""Some tables of a Penstock store, by which its schema is recognized."""
_FIRST_USER_TYPE = 16_384
"""Types with a lower object id are built in."""
BaseType = tuple[int, int]
"""A column's type with domains resolved: the object id of the type, and its modifier."""


@dataclass(frozen=True)
class Table:
    """A table of the publication, as a query is planned with it."""

    relation: Relation
    bases: tuple[BaseType, ...]
    """The types of the columns, with domains resolved."""
    key: tuple[str, ...]
    """The columns that identify rows; all columns if there is no key and the replica identity is full."""
    keyed: bool
    """Whether the table has a key, whose columns are never null."""
    filter: str | None = None
    """The publication's row filter."""
    partitioned: bool = False
    read_as: tuple[tuple[str, str], ...] = ()
    """Columns to read as text or double, by name."""

    @classmethod
    def from_json(cls, value: Json) -> Table:
        return cls(
            Relation.from_json(value["relation"]),
            tuple((kind, modifier) for kind, modifier in value["bases"]),
            tuple(value["key"]),
            value["keyed"],
            value["filter"],
            value["partitioned"],
            tuple((name, kind) for name, kind in value["read_as"]),
        )

    @cached_property
    def name(self) -> str:
        return self.relation.name

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        read_as = dict(self.read_as)
        return tuple(
            AS_TYPES[read_as[column.name]] if column.name in read_as else arrow_type(*base)
            for column, base in zip(self.relation.columns, self.bases, strict=True)
        )

    def fields(self) -> list[pa.Field]:
        return [
            pa.field(column.name, kind, nullable=not (self.keyed and column.name in self.key))
            for column, kind in zip(self.relation.columns, self.types, strict=True)
        ]


@dataclass(frozen=True)
class Tables:
    """The tables of a feed, as a query is planned with them."""

    tables: tuple[Table, ...]
    several: bool
    """Whether rows of all tables share one schema, with a struct for each table."""
    changes_rows: bool
    """Whether updates or deletes are published; if not, rows need no key."""
    chosen: bool = False
    """Whether the feed reads named tables, instead of all tables of the publication."""
    domains: Mapping[int, BaseType] = field(default_factory=dict, hash=False)
    """The base types of the domains that columns use."""
    some_columns: bool = False
    """Whether the reader selected columns, so that other columns may be added or dropped."""

    @cached_property
    def by_oid(self) -> dict[int, Table]:
        return {table.relation.oid: table for table in self.tables}

    @cached_property
    def by_name(self) -> dict[str, Table]:
        return {table.name: table for table in self.tables}

    def struct_names(self) -> list[str]:
        """Return the name of each table's struct column: its name, with the schema if that is not unique."""
        plain = [table.relation.table for table in self.tables]
        return [
            name if plain.count(name) == 1 else f"{table.relation.schema}_{name}"
            for name, table in zip(plain, self.tables, strict=True)
        ]

    def columns(self) -> dict[str, Table]:
        """Return the tables by the name of their struct column."""
        return dict(zip(self.struct_names(), self.tables, strict=True))

    def schema(self) -> pa.Schema:
        if not self.several:
            return pa.schema([*self.tables[0].fields(), *_FEED_COLUMNS])
        structs = []
        for name, table in zip(self.struct_names(), self.tables, strict=True):
            fields = [field.with_nullable(True) for field in table.fields()]
            structs.append(pa.field(name, pa.struct(fields)))
        return pa.schema([*_TABLE_AND_KEY, *structs, *_FEED_COLUMNS])

    def selected_columns(self, schema: Iterable[pa.Field]) -> dict[str, Collection[str]]:
        """Return the columns that a read with these fields selects, by table."""
        fields = {field.name: field for field in schema}
        if not self.several:
            return {self.tables[0].name: set(fields)}
        return {
            table.name: {field.name for field in fields[name].type}
            for name, table in self.columns().items()
            if name in fields
        }

    def contract(self) -> ChangeContract | None:
        """Return the contract of the feed; None if the rows of a table cannot be identified."""
        row_id: tuple[str, ...] = (TABLE, KEY) if self.several else self.tables[0].key
        if not row_id or not all(table.key for table in self.tables):
            return None
        return ChangeContract(
            row_id=row_id,
            nullable_row_id=not self.several and not self.tables[0].keyed,
            intermediate_changes=True,
            whole_commits=True,
            sequence=SEQUENCE,
            unchanged=UNCHANGED_COLUMNS,
        )

    def base(self, column: Column) -> BaseType:
        """Return the type of a column with domains resolved."""
        return self.domains.get(column.type, (column.type, column.modifier))

    def _logged_table(self, relation: Relation, now: Table | None) -> Table:
        """Return the table of a logged relation; ``now`` is the same table in the catalog, if it exists."""
        key, keyed = identity_key(relation, now)
        return Table(
            relation,
            tuple(self.base(column) for column in relation.columns),
            key,
            keyed,
            filter=now.filter if now else None,
            partitioned=bool(now and now.partitioned),
        )

    def as_logged(self, relations: Iterable[Relation]) -> Tables:
        """Return the tables as defined in the log, from the relations of unread rows in log order.

        A table has the columns of its first unread row, or those of the catalog if there is no unread row. If
        several tables had the same name one after the other, only the first is read: the query ends before
        rows of the next one.
        """
        first: dict[str | int, Relation] = {}
        for relation in relations:
            table = self.by_oid.get(relation.oid) or self.by_name.get(relation.name)
            if table is None and self.chosen:
                continue
            first.setdefault(table.name if table else relation.oid, relation)
        logged = [
            self._logged_table(first[table.name], table) if table.name in first else table
            for table in self.tables
        ]
        # Tables with unread rows that have been removed from the publication.
        removed = [
            self._logged_table(relation, None) for key, relation in first.items() if isinstance(key, int)
        ]
        tables = sorted([*logged, *removed], key=lambda table: table.name) if removed else logged
        earliest = {relation.name: relation for relation in reversed(first.values())}
        tables = [table for table in tables if earliest.get(table.name, table.relation) == table.relation]
        return replace(self, tables=tuple(tables), several=len(tables) > 1)

    def reading_as(self, server: Statements, types: Mapping[str, str]) -> Tables:
        """Return the tables with columns to read as text or double, named with or without their table."""
        unused = set(types)
        tables = []
        for table in self.tables:
            read_as = []
            for column in table.relation.columns:
                names = (f"{table.name}.{column.name}", f"{table.relation.table}.{column.name}", column.name)
                unused -= set(names)
                kind = next((types[name] for name in names if name in types), None)
                if kind is not None:
                    read_as.append((column.name, kind))
            tables.append(replace(table, read_as=tuple(read_as)))
        if unused:
            raise server.unavailable(
                "COLUMN_UNKNOWN",
                f"types has the column {min(unused)!r}, which no table has: remove or correct it",
                column=min(unused),
            )
        return replace(self, tables=tuple(tables))

    def to_json(self) -> str:
        value = asdict(self) | {"domains": list(self.domains.items())}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Tables:
        value = parse_json(text)
        domains = {oid: (kind, modifier) for oid, (kind, modifier) in value["domains"]}
        tables = tuple(map(Table.from_json, value["tables"]))
        return cls(**{**value, "tables": tables, "domains": domains})


def identity_key(relation: Relation, now: Table | None) -> tuple[tuple[str, ...], bool]:
    """Return the columns that identify a relation's rows, and whether they are a key.

    With replica identity full, only the catalog has the primary key.
    """
    names = relation.names
    if relation.identifying and relation.identity != "f":
        return relation.identifying, True
    # Without a replica identity there are only inserts, so any key can be used.
    if now is not None and now.keyed and set(now.key) <= set(names):
        return now.key, True
    if now is not None and now.key and not now.keyed:
        return names, False
    return relation.identifying, False


def load_tables(server: Statements, publication: str, chosen: Sequence[str] | None) -> Tables:
    """Load the tables of a publication from the catalog: the chosen ones, or all if ``chosen`` is None."""
    rows = server.fetch("publication", publication=publication)
    if not rows:
        raise missing_publication(server, publication)
    tables, domains = published(server, publication)
    if chosen is None:
        require_no_store(server, publication, tables)
    else:
        tables = [_find_table(server, publication, tables, name) for name in chosen]
    if not tables:
        raise server.unavailable(
            "NO_TABLES",
            f"the publication {publication!r} has no tables: alter publication {publication} add table …",
        )
    changes_rows = bool(rows[0].changes_rows)
    for table in tables:
        if changes_rows and not table.key:
            raise server.unavailable(
                "NO_REPLICA_IDENTITY",
                f"no columns identify the rows of {table.name}: add a primary key (a column list of the "
                f"publication has to include its columns), or alter table {table.name} replica identity "
                "full; or publish inserts only",
                table=table.name,
            )
    loaded = Tables(tuple(tables), len(tables) > 1, changes_rows, chosen is not None, domains)
    check_names(server, loaded)
    return loaded


def require_no_store(server: Statements, publication: str, tables: Iterable[Table]) -> None:
    """Refuse the tables of a Penstock store: if a feed's rows are written to it, each write is a change."""
    names_by_schema: dict[str, set[str]] = {}
    for table in tables:
        names_by_schema.setdefault(table.relation.schema, set()).add(table.relation.table)
    schema = next((schema for schema, names in names_by_schema.items() if names >= _STORE_TABLES), None)
    if schema is not None:
        raise server.unavailable(
            "STORE_PUBLISHED",
            f"the publication {publication!r} has the tables of a Penstock store (schema {schema!r}), and "
            "writing rows to a store would cause changes without end: publish other tables only, or name the "
            "tables to read with tables=[…], or keep the store in another database",
            schema=schema,
        )


def _require_distinct_names(server: Statements, tables: Sequence[Table]) -> None:
    """Refuse two tables with equal names, which is possible if a name or a schema has a dot."""
    count = Counter(table.name for table in tables)
    repeated = next((name for name, number in count.items() if number > 1), None)
    if repeated is not None:
        raise server.unavailable(
            "TABLE_NAMES_EQUAL",
            f"the publication has two tables that are both {repeated!r} with their schema, because a name "
            "contains a dot: rename one, or remove it from the publication",
            table=repeated,
        )


def published(server: Statements, publication: str) -> tuple[list[Table], dict[int, BaseType]]:
    """Load the tables of a publication, and the base types of the domains that they use."""
    rows = server.fetch("columns", publication=publication)
    domains = domains_of(server, {row.type for row in rows})
    tables = [_table(list(group), domains) for _, group in groupby(rows, key=lambda row: row.oid)]
    _require_distinct_names(server, tables)
    return tables, domains


def domains_of(server: Statements, types: Collection[int]) -> dict[int, BaseType]:
    """Load the base types of the domains among the given types."""
    oids = sorted(oid for oid in types if oid >= _FIRST_USER_TYPE)
    rows = server.fetch("domains", oids=oids) if oids else ()
    return {row.oid: (row.type, row.modifier) for row in rows}


def missing_publication(server: Statements, publication: str) -> FeedUnavailableError:
    return server.unavailable(
        "PUBLICATION_MISSING",
        f"there is no publication {publication!r} in this database: create publication {publication} for "
        "table …",
        publication=publication,
    )


def _table(rows: Sequence[Row], domains: Mapping[int, BaseType]) -> Table:
    first = rows[0]
    is_full, has_identity = first.identity == "f", first.identity != "n"
    columns = tuple(
        Column(row.name, row.type, row.modifier, is_full or (has_identity and row.key)) for row in rows
    )
    relation = Relation(first.oid, first.schema, first.table, columns, first.identity)
    primary = tuple(row.name for row in rows if row.key) if has_identity else ()
    if len(primary) != first.key_columns:
        # Some key columns are not published, and the others do not identify rows.
        primary = ()
    return Table(
        relation,
        tuple(domains.get(row.type, (row.type, row.modifier)) for row in rows),
        primary or (relation.names if is_full else ()),
        keyed=bool(primary),
        filter=first.rowfilter,
        partitioned=first.kind == "p",
    )


def _find_table(server: Statements, publication: str, tables: Sequence[Table], name: str) -> Table:
    exact = [table for table in tables if table.name == name]
    matches = exact or [table for table in tables if table.relation.table == name]
    if len(matches) == 1:
        return matches[0]
    names = [table.name for table in tables]
    if matches:
        raise server.unavailable(
            "TABLE_AMBIGUOUS",
            f"the table {name!r} exists in several schemas: add its schema, as in {matches[0].name!r}",
        )
    raise server.unavailable(
        "TABLE_NOT_PUBLISHED",
        f"the publication {in_quotes(publication)} does not have the table "
        f"{in_quotes(name)}.{did_you_mean(name, names)} It has {', '.join(names) or 'none'}; to add the "
        f"table, alter publication {publication} add table {name}",
        table=name,
    )


def check_names(server: Statements, tables: Tables) -> None:
    """Refuse tables whose read would have two columns with the same name, ignoring case."""
    names = [name.lower() for name in tables.schema().names]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise server.unavailable(
            "RESERVED_COLUMN",
            f"two columns would be named {duplicate!r}, ignoring case: rename the column of the table",
            column=duplicate,
        )
