"""Random damage to the rows of SQLite and PostgreSQL stores, and checks of their readers."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import sqlite3
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pyarrow as pa
from psycopg import sql

import penstock
from penstock.errors import PenstockError
from penstock.feeds.contract import DEAD_LETTERS
from penstock.store.int_columns import pack_columns
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun
from penstock.store.records.staged import NONE
from tests.support.mutated_values import mutate_value
from tests.support.postgres import start_postgres
from tests.support.raw_sql import bytes_literal
from tests.support.store_readers import command, read_in_python, read_page, store_commands

_MORE_ROWS = (
    "insert into {ledger} values ('queue:q', 'app', 3, -1, '{{}}', 20, '{{}}', 5)",
    "insert into {ledger} values ('queue:q', 'app', 3, 0, 'origin covers', 10, null, 5)",
    "insert into {mark} values ('source', 'app', 0, 7)",
    "insert into {marked_source} values ('source', 'app', 2)",
    "insert into {observed_end} select queue_id, 0, 5, 3, 4 from {queue}",
    "insert into {feed_commit} select queue_id, 1, 5, 20, '[10, 10]' from {queue}",
    """insert into {pump}
        values ('pump', 'owner', 1, 5, 7, 6, 8, 2, '{{"feed": "f", "queues": {{"t": "q"}}}}')""",
    """insert into {staged} select 'app', 4, 'attempt', 0, 0, queue_id, 1, 10, {segment_list}, 5
        from {queue} where name = 'q'""",
    "insert into {staged_object} values (7, 'app', 4, 'attempt', 0)",
)
"""Rows for the tables that only streaming queries and feeds fill."""


def fill(url: str, objects: Path) -> None:
    """Create a store with rows in every table, and a folder of objects."""
    with penstock.connect(url) as store:
        rows = pa.schema([("id", pa.int64()), ("name", pa.string())])
        for name in ("q", "other"):
            queue = store.create_queue(name, rows, partitions=2, key="id")
            for number in range(20):
                queue.append([{"id": number, "name": f"n{number}"}])
            store.create_consumer(name).register(name, vital=name == "q")
        store.queue("other").add_partitions(2)
        store.queue("other").compact()
        pull = store.consumer("q").pull("q", 0)
        store.consumer("q").advance("q", 0, old=pull.start, new=pull.end)
        store.producer("q", session="web").append([{"id": 1, "name": "x"}], sequence=1)
        letter = {"reason": "r", "topic": None, "partition": None, "offset": None, "value": "v"}
        store.create_queue("dead", DEAD_LETTERS).append([letter])
        for name in ("kept", "dropped"):
            large = store.create_queue(name, pa.schema([("data", pa.binary())]), payloads=objects)
            large.append([{"data": random.Random(0).randbytes(100_000)}])
        store.drop_queue("dropped")
        store.clean_up_objects()
        for name in ("a", "b"):
            run = QueryRun(
                name, "run", name, "continuous", 5, "queue 'q'", "queue 'other'", "/ck", "http://h:1"
            )
            latency = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
            progress = QueryProgress(3, 10, 9, latency, 20.0, {"triggerExecution": 20.0}, 7, 8, 9, ("slow",))
            store.database.run(partial(queries.begin, run=run))
            for _ in range(2):
                store.database.run(partial(queries.report, run=run, progress=progress))
        store.database.run(partial(queries.end, run=run, error=QueryError("BAD", "message")))


class Copies(Protocol):
    """Copies of a store, which may be damaged."""

    def fresh(self) -> str:
        """Replace the last copy by an undamaged one, and return its URL."""

    def columns(self) -> dict[str, list[tuple[str, type, bool]]]:
        """Return the columns of all tables: name, type, and whether it is part of the key."""

    def rows(self, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]: ...

    def update(
        self, table: str, column: str, value: object, keys: Sequence[str], key: Sequence[object]
    ) -> None:
        """Change a value, unless the database refuses it."""


class SqliteCopies:
    """Copies of a SQLite file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._original, self._copy = folder / "whole.db", folder / f"{name}.db"
        if not self._original.exists():
            fill(f"sqlite:///{self._original}", folder / "objects")
            with contextlib.closing(sqlite3.connect(self._original, isolation_level=None)) as connection:
                for statement in _MORE_ROWS:
                    connection.execute(statement.format_map(_Placeholders("sqlite")))

    def fresh(self) -> str:
        self.close()
        shutil.copy(self._original, self._copy)
        return f"sqlite:///{self._copy}"

    def close(self) -> None:
        for path in self._copy.parent.glob(f"{self._copy.name}*"):
            path.unlink()

    def columns(self) -> dict[str, list[tuple[str, type, bool]]]:
        kinds = {"BLOB": bytes, "TEXT": str, "REAL": float}
        names = self._run("select name from sqlite_schema where type = 'table' and name like 'penstock_%'")
        return {
            name: [
                (column, kinds.get(kind, int), bool(in_key))
                for column, kind, in_key in self._run(
                    f"select name, type, pk from pragma_table_info('{name}')"
                )
            ]
            for (name,) in sorted(names)
        }

    def rows(self, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        return self._run(f"select {', '.join(columns)} from {table}")

    def update(
        self, table: str, column: str, value: object, keys: Sequence[str], key: Sequence[object]
    ) -> None:
        where = " and ".join(f"{name} = ?" for name in keys)
        with contextlib.suppress(sqlite3.Error, OverflowError):
            self._run(f"update or replace {table} set {column} = ? where {where}", [value, *key])

    def _run(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self._copy, isolation_level=None)) as connection:
            connection.execute("pragma ignore_check_constraints = on")
            connection.execute("pragma foreign_keys = off")
            return connection.execute(statement, values).fetchall()


class PostgresqlCopies:
    """Copies of a PostgreSQL database without the check constraints of its tables."""

    def __init__(self, folder: Path) -> None:
        self._server = start_postgres()
        self._admin = psycopg.connect(self._server.url, autocommit=True)
        self._copied = 0
        self._admin.execute("create database whole")
        fill(self._url("whole"), folder / "objects")
        with psycopg.connect(self._url("whole"), autocommit=True) as connection:
            for statement in _MORE_ROWS:
                connection.execute(statement.format_map(_Placeholders("postgres")))
            checks = connection.execute(
                "select conrelid::regclass::text, conname from pg_constraint where contype = 'c'"
                " and connamespace = 'penstock'::regnamespace"
            ).fetchall()
            for table, name in checks:
                drop = sql.SQL("alter table {} drop constraint {}").format(
                    sql.SQL(table), sql.Identifier(name)
                )
                connection.execute(drop)

    def _url(self, database: str) -> str:
        return f"{self._server.url.rpartition('/')[0]}/{database}"

    def fresh(self) -> str:
        self._drop()
        self._copied += 1
        self._admin.execute(f"create database copy{self._copied} template whole strategy file_copy")
        return self._url(f"copy{self._copied}")

    def _drop(self) -> None:
        self._admin.execute(f"drop database if exists copy{self._copied} with (force)")

    def close(self) -> None:
        self._admin.close()
        self._server.stop()

    def columns(self) -> dict[str, list[tuple[str, type, bool]]]:
        kinds = {"bytea": bytes, "text": str, "double precision": float}
        columns: dict[str, list[tuple[str, type, bool]]] = {}
        for table, column, kind, in_key in self._run(
            "select c.relname, a.attname, format_type(a.atttypid, null),"
            " coalesce(a.attnum = any(i.indkey), false) from pg_class c"
            " join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped"
            " left join pg_index i on i.indrelid = c.oid and i.indisprimary"
            " where c.relnamespace = 'penstock'::regnamespace and c.relkind = 'r' order by 1, a.attnum"
        ):
            columns.setdefault(f"penstock.{table}", []).append((column, kinds.get(kind, int), in_key))
        return columns

    def rows(self, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        return self._run(f"select {', '.join(columns)} from {table}")

    def update(
        self, table: str, column: str, value: object, keys: Sequence[str], key: Sequence[object]
    ) -> None:
        where = " and ".join(f"{name} = %s" for name in keys)
        with contextlib.suppress(psycopg.Error):
            self._run(f"update {table} set {column} = %s where {where}", [value, *key])

    def _run(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._url(f"copy{self._copied}"), autocommit=True) as connection:
            # This disables foreign keys.
            connection.execute("set session_replication_role = replica")
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []


class _Placeholders(dict[str, str]):
    """Qualified names of tables, and an encoded list of one staged segment."""

    def __init__(self, dialect: str) -> None:
        segment = [0, 1, 10, 0, 4096, NONE, NONE, NONE]
        super().__init__(segment_list=bytes_literal(dialect, pack_columns([[number] for number in segment])))
        self._prefix = "penstock_" if dialect == "sqlite" else "penstock."

    def __missing__(self, name: str) -> str:
        return f"{self._prefix}{name}"


def _damage_rows(rng: random.Random, copies: Copies, tables: dict[str, list[tuple[str, type, bool]]]) -> str:
    """Change one to three values of the store, and describe the changes."""
    changed = []
    for _ in range(rng.randint(1, 3)):
        table, columns = rng.choice(list(tables.items()))
        column, kind, _ = rng.choice(columns)
        keys = [name for name, _, in_key in columns if in_key]
        rows = copies.rows(table, [column, *keys])
        if rows:
            old, *key = rng.choice(rows)
            value = mutate_value(rng, old, kind)
            changed.append(f"{table}.{column} of row {key} = {str(value)[:80]!r}")
            copies.update(table, column, value, keys, key)
    return "; ".join(changed)


def _damage(copies: Copies, folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    extra_rows = folder / "more.jsonl"
    extra_rows.write_text('{"id": 77, "name": "more"}\n')
    copies.fresh()
    tables = copies.columns()
    empty = [table for table, columns in tables.items() if not copies.rows(table, [columns[0][0]])]
    assert not empty, f"nothing to damage in {empty}"
    for number in numbers:
        rng = random.Random(number)
        url = copies.fresh()
        changed = _damage_rows(rng, copies, tables)
        # Use the Python API and the page each time, and some of the commands.
        commands = rng.sample(store_commands(url, extra_rows), 6)
        # The page may fail only if the row that identifies the store is damaged.
        must_answer = re.search(r"penstock[._]store\.", changed) is None
        calls = [partial(read_in_python, url), partial(read_page, url, must_answer=must_answer)]
        for call in (*calls, *(partial(command, *arguments) for arguments in commands)):
            try:
                call()
            except PenstockError:
                pass
            except Exception:
                yield number, f"{changed}\n{traceback.format_exc()}"


def damage_sqlite(folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    with contextlib.closing(SqliteCopies(folder, f"damaged-{numbers.start}")) as copies:
        yield from _damage(copies, folder, numbers)


def damage_postgresql(folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    with contextlib.closing(PostgresqlCopies(folder)) as copies:
        yield from _damage(copies, folder, numbers)
