"""Tables of a real PostgreSQL whose rows and definitions are changed at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from typing import Any
from uuid import UUID

import numpy as np
import psycopg

from tests.support.postgres_source import Row, Source

KINDS = ("one", "chosen", "several", "partitioned", "leaves", "schema", "filtered")
"""``partitioned`` is published under the name of the root, ``leaves`` under those of the partitions, and of
``filtered`` some rows and columns are published."""
TYPES = (
    "int", "bigint", "smallint", "text", "varchar(20)", "varchar(30)", "numeric(10, 2)", "numeric(10, 3)",
    "numeric(8, 2)", "numeric",
    "real", "double precision", "timestamp", "timestamp(0)", "timestamptz", "boolean", "uuid",
)  # fmt: skip
NAMES = ("v", "w", "x")
FLOAT4 = 700
"""The object id of ``real``, whose values the driver reads as the nearest double precision."""
COLUMNS = "id int not null, code int not null, v int, w text, PRIMARY KEY (id)"
ROWS = (
    "insert", "insert", "insert", "update", "update", "update_key", "delete", "transaction",
    "prepare", "resolve",
)  # fmt: skip
LARGE_ROWS = ("large", "large", "subtransactions", "subtransactions", "rolled_back")
"""What is done to rows in transactions of many statements, with texts that are too long for their rows."""
DEFINITIONS = (
    "add", "add_default", "drop", "rename", "retype", "exchange", "replace", "identity", "key",
    "rename_key", "truncate", "recreate",
    "rename_table", "unpublish", "publish_again", "leave_and_return", "publish_flags", "second_table",
    "drop_second",
    "partition", "attach", "detach",
    "identity_of_partition",
    "no_key", "attach_again", "unlogged_partition", "move_away",
)  # fmt: skip


@dataclass
class Moment:
    """What the published tables held at a position of the log."""

    position: int
    rows: dict[str, list[Row]]


@dataclass
class ChangingTables:
    """The tables of one history, and what they held at each moment."""

    source: Source
    kind: str
    log: list[str] = field(default_factory=list)
    numbers: int = 0
    moments: list[Moment] = field(default_factory=list)
    altered: set[str] = field(default_factory=set)
    """Columns whose values may have changed without being logged, since all rows were sent."""
    replaced: set[str] = field(default_factory=set)
    """Columns that were replaced, which the stream reports unless something else stops it first."""
    prepared: bool = False
    """Whether there is a prepared transaction."""
    unlogged: int | None = None
    """From which moment on rows may have come or gone without being logged."""
    form: str = COLUMNS
    """The columns of the table that is there at the beginning."""
    others: tuple[str, ...] = ("u",)
    """The names of tables that may come and go."""

    @property
    def table(self) -> str:
        return f"{self.source.name}.t"

    @property
    def partitioned(self) -> bool:
        return self.kind in ("partitioned", "leaves")

    def make(self) -> None:
        name = self.source.name
        # A prepared transaction keeps its locks.
        self.source.run("SET lock_timeout = '100ms'")
        self.source.run(
            f"CREATE TABLE {name}.t ({self.form})" + (" PARTITION BY RANGE (id)" if self.partitioned else "")
        )
        if self.partitioned:
            self.source.run(
                f"CREATE TABLE {name}.t1 PARTITION OF {name}.t FOR VALUES FROM (0) TO (40)",
                f"CREATE UNIQUE INDEX t1_code ON {name}.t1 (code)",
                f"ALTER PUBLICATION {name} SET (publish_via_partition_root = {self.kind == 'partitioned'})",
            )
        else:
            self.source.run(f"ALTER TABLE {name}.t ADD CONSTRAINT t_code UNIQUE (code)")
        if self.kind == "schema":
            self.source.run(f"ALTER PUBLICATION {name} SET TABLES IN SCHEMA {name}")
        elif self.kind == "filtered":
            self.source.run(f"ALTER PUBLICATION {name} ADD TABLE {name}.t (id, code, v) WHERE (id < 50)")
        else:
            self.source.run(f"ALTER PUBLICATION {name} ADD TABLE {name}.t")
        if self.kind == "several":
            self.source.run(
                f"CREATE TABLE {name}.u (n int primary key, v int)",
                f"ALTER PUBLICATION {name} ADD TABLE {name}.u",
            )

    def run(self, *statements: str) -> bool:
        """Run statements in one transaction; whether the server took them."""
        try:
            with self.source.connection.transaction():
                self.source.run(*statements)
        except psycopg.Error:
            return False
        self.log += [*statements]
        self.note()
        return True

    def note(self) -> None:
        (row,) = self.source.rows("SELECT pg_current_wal_flush_lsn() - '0/0'")
        self.moments.append(Moment(int(row[0]), self.held()))

    def held(self) -> dict[str, list[Row]]:
        """What the published tables hold now."""
        tables = self.source.rows(
            "SELECT schemaname || '.' || tablename, to_jsonb(p) -> 'attnames', to_jsonb(p) ->> 'rowfilter'"
            f" FROM pg_publication_tables AS p WHERE pubname = '{self.source.name}' ORDER BY 1"
        )
        found = {}
        for table, names, condition in tables:
            if self.kind == "chosen" and table != self.table:
                continue
            selected = f"SELECT {', '.join(names or '*')} FROM {table} WHERE {condition or 'true'}"
            cursor = self.source.connection.execute(selected.encode())
            columns = {column.name: column.type_code for column in cursor.description or ()}
            found[table] = [
                {
                    name: plain(value if kind != FLOAT4 or value is None else float(np.float32(value)))
                    for (name, kind), value in zip(columns.items(), row, strict=True)
                }
                for row in cursor.fetchall()
            ]
        return found

    def columns(self, table: str) -> dict[str, str]:
        rows = self.source.rows(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            f" WHERE attrelid = to_regclass('{table}') AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        )
        return dict(rows)

    def tables(self) -> list[str]:
        others = [f"{self.source.name}.{name}" for name in self.others]
        return [self.table, *(name for name in others if self.columns(name))]

    def any_table(self, chance: Random) -> str:
        """A table to change."""
        return chance.choice(self.tables())

    # Rows.

    def some_rows(self, table: str, first: str, most: int, chance: Random) -> str:
        """A condition for some rows of a table that follow one another."""
        begin = f"(SELECT (count(*) * {chance.choice((0, 0, chance.random()))})::int FROM {table})"
        chosen = f"SELECT {first} FROM {table} ORDER BY 1 OFFSET {begin} LIMIT {chance.randint(1, most)}"
        return f"{first} IN ({chosen})"

    def value(self, kind: str) -> str:
        """A literal of a type, with what it can hold: digits, zeros in front, fractions of seconds."""
        self.numbers += 1
        number = self.numbers % 90
        if kind.startswith("timestamp"):
            return f"'2026-01-01 00:00:{number % 60:02}.{number:02}3456'::timestamp"
        if kind == "boolean":
            return str(number % 2 == 0)
        if kind.startswith("numeric(") and number % 11 == 0:
            return "'NaN'"
        if kind.startswith("numeric"):
            return f"{number}.{number:02}5"
        if kind == "double precision":
            return f"{number}.123456789"
        if kind == "real":
            return f"{number}.135"
        if kind == "uuid":
            return f"'00000000-0000-0000-0000-{number:012}'"
        if kind.endswith(".size"):
            return f"'{('small', 'large', 'huge')[number % 3]}'"
        if kind.startswith(("text", "character")):
            return f"'{'00' * (number % 3 == 0)}{number}'"
        return str(number)

    def statement(self, what: str, chance: Random) -> str:
        table = self.any_table(chance)
        columns = self.columns(table)
        first = next(iter(columns), "id")
        where = "WHERE " + self.some_rows(table, first, 1 if what == "update_key" else 3, chance)
        others = [name for name in columns if name not in ("id", "code", "n", "number")] or [first]
        if what == "insert":
            values = {name: self.value(kind) for name, kind in columns.items()}
            for name in others:
                if chance.random() < 0.2:
                    values[name] = "NULL"
            names, parameters = ", ".join(values), ", ".join(values.values())
            return f"INSERT INTO {table} ({names}) VALUES ({parameters}) ON CONFLICT DO NOTHING"
        if what == "delete":
            return f"DELETE FROM {table} {where}"
        name = chance.choice(others if what == "update" else list(columns) or [first])
        return f"UPDATE {table} SET {name} = {self.value(columns.get(name, 'int'))} {where}"

    def large_statement(self, chance: Random) -> str:
        """A statement of a transaction of many, some of which write texts that are kept out of line."""
        what = chance.choice(("insert", "insert", "update", "update", "update_key", "delete", "long"))
        if what != "long":
            return self.statement(what, chance)
        table = self.any_table(chance)
        columns = self.columns(table)
        texts = [name for name in columns if name in NAMES and columns[name] == "text"]
        if not texts:
            return self.statement("insert", chance)
        first, long = next(iter(columns)), self.long_text()
        where = self.some_rows(table, first, 1, chance)
        return f"UPDATE {table} SET {chance.choice(texts)} = {long} WHERE {where}"

    def rows(self, what: str, chance: Random) -> None:
        if what == "transaction":
            self.run(
                *(self.statement(chance.choice(("insert", "update", "delete")), chance) for _ in range(3))
            )
        elif what == "prepare":
            self.prepare(self.statement(chance.choice(("insert", "update", "delete")), chance))
        elif what in LARGE_ROWS:
            self.large(what, chance)
        elif what == "resolve":
            self.resolve(chance.choice(("COMMIT", "COMMIT", "ROLLBACK")))
        else:
            self.run(self.statement(what, chance))

    def long_text(self) -> str:
        """A text that is kept out of line: updates of other columns do not log it."""
        self.numbers += 1
        numbers = f"generate_series({self.numbers}, {self.numbers + 90}) AS n"
        return f"(SELECT string_agg(md5(n::text), '') FROM {numbers})"

    def large(self, what: str, chance: Random) -> None:
        """Commit a transaction of many statements, some of which are undone, or roll it back."""
        statements = [
            self.large_statement(chance)
            for _ in range(chance.randint(*((9, 40) if what == "large" else (2, 9))))
        ]
        if what == "subtransactions":
            for name in ("a", "b"):
                begin, end = sorted(chance.sample(range(len(statements) + 1), 2))
                how = chance.choice(("ROLLBACK TO", "ROLLBACK TO", "RELEASE"))
                statements.insert(end, f"{how} {name}")
                statements.insert(begin, f"SAVEPOINT {name}")
        if what == "rolled_back":
            statements.append("SELECT 1 / 0")
        self.run(*statements)

    def prepare(self, statement: str) -> None:
        """Prepare a transaction with a statement, unless there is one already."""
        if self.prepared:
            return
        try:
            self.source.run("BEGIN", statement, f"PREPARE TRANSACTION '{self.source.name}'")
        except psycopg.Error:
            self.source.run("ROLLBACK")
            return
        self.prepared = True
        self.log += ["BEGIN", statement, "PREPARE TRANSACTION"]

    def resolve(self, how: str = "COMMIT") -> None:
        """End the prepared transaction, if there is one."""
        if self.prepared:
            self.source.run(f"{how} PREPARED '{self.source.name}'")
            self.prepared = False
            self.log.append(f"{how} PREPARED")
            self.note()

    # Definitions.

    def define(self, what: str, chance: Random) -> None:
        """Change a definition, in a transaction of its own or in one with rows."""
        name, table = self.source.name, self.any_table(chance)
        columns = self.columns(table)
        spare = [each for each in NAMES if each not in columns]
        own = [each for each in columns if each in NAMES]
        column, new = (chance.choice(each) if each else "none" for each in (own, spare))
        statements, altered, unlogged = [], set(), False
        if what == "add":
            statements = [f"ALTER TABLE {table} ADD {new} {chance.choice(TYPES)}"]
        elif what == "add_default":
            statements = [f"ALTER TABLE {table} ADD {new} int DEFAULT {chance.randint(1, 9)}"]
        elif what == "drop":
            statements = [f"ALTER TABLE {table} DROP {column}"]
        elif what == "rename":
            statements = [f"ALTER TABLE {table} RENAME {column} TO {new}"]
        elif what == "retype":
            kind = chance.choice(TYPES)
            using = chance.choice((f"{column}::text::{kind}", f"{column}::{kind}", "NULL"))
            statements, altered = [f"ALTER TABLE {table} ALTER {column} TYPE {kind} USING {using}"], {column}
        elif what == "exchange" and len(own) > 1:
            statements = [
                f"ALTER TABLE {table} RENAME {own[0]} TO z",
                f"ALTER TABLE {table} RENAME {own[1]} TO {own[0]}",
                f"ALTER TABLE {table} RENAME z TO {own[1]}",
            ]
            # There and back again leaves rows from in between with the other's values, until they are sent
            # again.
            altered = {own[0], own[1]}
        elif what == "replace":
            kind = columns.get(column, "int")
            statements = [f"ALTER TABLE {table} DROP {column}", f"ALTER TABLE {table} ADD {column} {kind}"]
        elif what == "identity":
            identity = chance.choice(("FULL", "DEFAULT", "USING INDEX t_code"))
            statements = [f"ALTER TABLE {table} REPLICA IDENTITY {identity}"]
        elif what == "key":
            key = chance.choice(("id", "code", "id, code", "number"))
            statements = [
                f"ALTER TABLE {name}.t DROP CONSTRAINT t_pkey",
                f"ALTER TABLE {name}.t ADD CONSTRAINT t_pkey PRIMARY KEY ({key})",
            ]
        elif what == "rename_key":
            old, other = ("id", "number") if "id" in columns else ("number", "id")
            statements, altered = [f"ALTER TABLE {name}.t RENAME {old} TO {other}"], {old, other}
        elif what == "truncate":
            statements, unlogged = [f"TRUNCATE {table}"], True
        elif what == "recreate":
            statements = [f"CREATE TABLE {name}.other (LIKE {table} INCLUDING ALL)"]
            if self.partitioned:
                return
            statements += [
                f"DROP TABLE {table}",
                f"ALTER TABLE {name}.other RENAME TO {table.partition('.')[2]}",
                f"ALTER PUBLICATION {name} ADD TABLE {table}",
            ]
            unlogged = True
        elif what == "rename_table":
            statements = [f"ALTER TABLE {name}.u RENAME TO u2", f"ALTER TABLE {name}.u2 RENAME TO u"]
            if chance.random() < 0.3:
                statements = [f"ALTER TABLE {name}.u RENAME TO {chance.choice(('other_name', 'q'))}"]
            unlogged = True
        elif what == "unpublish":
            statements, unlogged = [f"ALTER PUBLICATION {name} DROP TABLE {table}"], True
        elif what == "publish_again":
            statements, unlogged = [f"ALTER PUBLICATION {name} ADD TABLE {table}"], True
        elif what == "leave_and_return":
            statements = [
                f"ALTER PUBLICATION {name} DROP TABLE {table}",
                chance.choice((self.insert(table, columns), f"DELETE FROM {table}")),
                f"ALTER PUBLICATION {name} ADD TABLE {table}",
            ]
            unlogged = True
        elif what == "publish_flags":
            flags = chance.choice(("insert, update, delete, truncate", "insert, update", "insert, delete"))
            statements, unlogged = [f"ALTER PUBLICATION {name} SET (publish = '{flags}')"], True
        elif what == "second_table":
            statements = [
                f"CREATE TABLE {name}.u (n int primary key, v int)",
                f"INSERT INTO {name}.u VALUES (1, 1)",
                f"ALTER PUBLICATION {name} ADD TABLE {name}.u",
            ]
            unlogged = True
        elif what == "drop_second":
            statements, unlogged = [f"DROP TABLE {name}.u"], True
        elif self.partitioned and what == "partition":
            low = chance.choice((40, 50, 60))
            statements = [
                f"CREATE TABLE {name}.t{low} PARTITION OF {name}.t FOR VALUES FROM ({low}) TO ({low + 10})"
            ]
        elif self.partitioned and what == "attach":
            low = chance.choice((70, 80))
            made = self.run(
                f"CREATE TABLE {name}.t{low} (LIKE {name}.t INCLUDING ALL)",
                *(
                    [
                        (
                            f"INSERT INTO {name}.t{low} ({', '.join(columns)}) VALUES "
                            f"({', '.join(self.at(low, columns))})"
                        )
                    ]
                    if chance.random() < 0.7
                    else []
                ),
            )
            if made:
                statements = [
                    (
                        f"ALTER TABLE {name}.t ATTACH PARTITION {name}.t{low} FOR VALUES FROM ({low}) TO "
                        f"({low + 10})"
                    )
                ]
                unlogged = True
        elif self.partitioned and what == "detach":
            there = self.source.rows(
                f"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = '{name}.t'::regclass "
                "ORDER BY 1"
            )
            partition = chance.choice([each for (each,) in there] or [f"{name}.t1"])
            statements = chance.choice(
                ([f"ALTER TABLE {name}.t DETACH PARTITION {partition}"], [f"DROP TABLE {partition}"])
            )
            unlogged = True
        elif self.partitioned and what == "identity_of_partition":
            identity = chance.choice(("FULL", "DEFAULT", "NOTHING", "USING INDEX t1_code"))
            statements = [f"ALTER TABLE {name}.t1 REPLICA IDENTITY {identity}"]
        elif not self.partitioned and what == "no_key":
            self.without_key(chance)
        elif self.partitioned and what == "attach_again":
            statements = [
                f"ALTER TABLE {name}.t DETACH PARTITION {name}.t1",
                chance.choice((self.insert(f"{name}.t1", columns), f"DELETE FROM {name}.t1")),
                f"ALTER TABLE {name}.t ATTACH PARTITION {name}.t1 FOR VALUES FROM (0) TO (40)",
            ]
            unlogged = True
        elif self.partitioned and what == "unlogged_partition":
            statements, unlogged = [f"ALTER TABLE {name}.t1 SET UNLOGGED"], True
        elif self.kind == "schema" and what == "move_away":
            statements = [
                f"CREATE SCHEMA {name}_o",
                f"ALTER TABLE {table} SET SCHEMA {name}_o",
                self.insert(table.replace(".", "_o."), columns),
                f"ALTER TABLE {table.replace('.', '_o.')} SET SCHEMA {name}",
                f"DROP SCHEMA {name}_o",
            ]
            unlogged = True
        if not statements:
            return
        if chance.random() < 0.25:
            # Rows in the transaction that changes the definition, from before and after the change.
            statements = [
                self.statement("insert", chance),
                *statements,
                f"UPDATE {table} SET {column} = {column}"
                if what in ("retype", "add_default")
                else self.statement("delete", chance),
            ]
        before = len(self.moments)
        if self.run(*statements):
            self.altered |= altered
            self.replaced |= {column} if what == "replace" else set()
            if unlogged and self.unlogged is None:
                self.unlogged = before

    def without_key(self, chance: Random) -> None:
        """Drop the primary key, write rows of which some may have the same one, and create it again."""
        table, columns = self.table, self.columns(self.table)
        definition = self.key()
        if definition is None:
            return
        first = next(iter(columns))
        again = self.insert(table, columns, **{first: f"(SELECT min({first}) FROM {table})"})
        moves = [
            f"ALTER TABLE {table} DROP CONSTRAINT t_pkey",
            chance.choice((again, self.insert(table, columns))),
            self.without_twins(),
        ]
        if chance.random() < 0.5:
            moves.insert(2, f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        moves.append(f"ALTER TABLE {table} ADD CONSTRAINT t_pkey {definition}")
        if chance.random() < 0.5:
            moves.append(f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT")
        for move in moves:
            self.run(move)

    def key(self) -> str | None:
        """The primary key of the table."""
        found = self.source.rows(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint"
            f" WHERE conrelid = to_regclass('{self.table}') AND contype = 'p'"
        )
        return str(found[0][0]) if found else None

    def without_twins(self) -> str:
        table, first = self.table, next(iter(self.columns(self.table)))
        return f"DELETE FROM {table} AS a USING {table} AS b WHERE a.{first} = b.{first} AND a.ctid < b.ctid"

    def give_key(self) -> None:
        """Give the table a primary key if it has none."""
        if self.key() is None:
            self.run(f"ALTER TABLE {self.table} REPLICA IDENTITY FULL")
            self.run(self.without_twins())
            add, first = (
                f"ALTER TABLE {self.table} ADD CONSTRAINT t_pkey PRIMARY KEY",
                next(iter(self.columns(self.table))),
            )
            assert self.run(f"{add} (code)") or self.run(f"{add} ({first})")

    def insert(self, table: str, columns: dict[str, str], **others: str) -> str:
        values = {name: self.value(kind) for name, kind in columns.items()} | others
        return f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(values.values())})"

    def at(self, low: int, columns: dict[str, str]) -> list[str]:
        first = next(iter(columns))
        return [str(low) if name == first else self.value(kind) for name, kind in columns.items()]


def plain(value: Any) -> Any:
    """A value as both drivers have it."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return str(value) if isinstance(value, Decimal | UUID) else value
