"""Published tables with a slot, and a model to which the change rows of a feed are applied."""

from __future__ import annotations

import json
import pickle
import random
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.changes.data_source import STREAM, ChangesStreamReader, read_options
from penstock.changes.schema import select_columns
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.json_text import Json
from penstock.spark.schemas import to_struct
from tests.support.feed_reading import batches_of
from tests.support.waiting import wait_until

Row = dict[str, Any]
COLUMNS = ("id", "part", "text", "number")
DDL = "id int, part text, text text, number numeric(12, 3), PRIMARY KEY (id, part)"
"""Columns of a table for random histories."""


@dataclass
class Source:
    """Schema of a database, with a publication of its tables."""

    url: str
    name: str
    connection: psycopg.Connection = field(repr=False)

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement.encode())

    @property
    def version(self) -> int:
        """The server's major version."""
        return self.connection.info.server_version // 10000

    def rows(self, query: str) -> list[tuple[object, ...]]:
        return self.connection.execute(query.encode()).fetchall()

    def table(self, columns: str, name: str = "t", *more: str) -> str:
        """Create a published table, and return its name with the schema."""
        self.run(f"CREATE TABLE {self.name}.{name} ({columns})", *more)
        self.run(f"ALTER PUBLICATION {self.name} ADD TABLE {self.name}.{name}")
        return f"{self.name}.{name}"

    def make_slot(self) -> None:
        self.run(f"SELECT pg_create_logical_replication_slot('{self.name}', 'pgoutput')")

    def feed(self, **options: object) -> PostgresFeed:
        options = {"publication": self.name, "slot": self.name, "snapshot": "none"} | options
        return PostgresFeed(self.url, **options)

    def open(self, **options: object) -> OpenPostgresFeed:
        return self.feed(**options).open()

    def drop_slot(self) -> None:
        """Drop the slot if it exists, as soon as its last reader has released it."""

        def is_dropped() -> bool:
            slots = f"FROM pg_replication_slots WHERE slot_name = '{self.name}'"
            self.run(f"SELECT pg_drop_replication_slot(slot_name) {slots} AND NOT active")
            return not self.slots()

        wait_until(is_dropped, 60, "the slot is dropped")

    def slots(self) -> int:
        return self.rows(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{self.name}'")[0][0]


@contextmanager
def source_at(url: str) -> Iterator[Source]:
    name = f"t_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as connection:
        source = Source(url, name, connection)
        source.run(f"CREATE SCHEMA {name}", f"CREATE PUBLICATION {name}")
        try:
            yield source
        finally:
            drop = (
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                "WHERE slot_name LIKE %s AND NOT active"
            )
            connection.execute(drop.encode(), [f"{name}%"])
            source.run(f"DROP PUBLICATION IF EXISTS {name}", f"DROP SCHEMA {name} CASCADE")


@contextmanager
def open_transaction(source: Source, statement: str) -> Iterator[psycopg.Connection]:
    """Keep a transaction with a statement open, and roll it back in the end."""
    with psycopg.connect(source.url) as connection:
        connection.execute(statement.encode())
        yield connection
        connection.rollback()


def batches(
    feed: OpenPostgresFeed,
    after: int,
    upto: int,
    columns: Sequence[str] | None = None,
    rows_per_task: int = 1000,
) -> list[pa.RecordBatch]:
    """Return the batches of a range, checked against the schema."""
    schema = feed.describe().schema
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    return batches_of(feed, after, upto, schema, rows_per_task)


def changes(feed: OpenPostgresFeed, after: int, upto: int, **options: object) -> list[Row]:
    """Return the change rows of a range."""
    return [row for batch in batches(feed, after, upto, **options) for row in batch.to_pylist()]


def everything(feed: OpenPostgresFeed, after: int | None = None) -> list[Row]:
    if after is None:
        after = feed.prepare() if feed.settings.snapshot == "initial" else feed.oldest()
    return changes(feed, after, feed.newest(after))


def apply(
    rows: Sequence[Row],
    key: Sequence[str],
    columns: Sequence[str],
    state: dict[object, Row],
    unchecked: Collection[str] = (),
) -> None:
    """Apply change rows to a table. Unchanged TOAST values keep their old value, even if the key changes.

    The pre-image of an update must equal the table's row, except for the columns that are ``unchecked``.
    """
    deleted: Row = {}
    checked = [name for name in columns if name not in unchecked]
    for row in rows:
        assert row["_change_type"] in ("insert", "delete", "update_preimage", "update_postimage")
        row_key = tuple(row[name] for name in key)
        if row["_change_type"] == "insert":
            assert row_key not in state, row
        else:
            assert row_key in state, row
        if row["_change_type"] == "update_preimage":
            assert {name: state[row_key][name] for name in checked} == {
                name: row[name] for name in checked
            }, row
        elif row["_change_type"] == "delete":
            deleted = state.pop(row_key)
        else:
            unchanged = row.get("_unchanged") or ()
            old = state.get(row_key, deleted)
            state[row_key] = {name: old[name] if name in unchanged else row[name] for name in columns}


def state_of(source: Source, table: str) -> dict[object, Row]:
    """Return the rows of a table of DDL by key."""
    rows = source.rows(f"SELECT {', '.join(COLUMNS)} FROM {table}")
    return {row[:2]: dict(zip(COLUMNS, row, strict=True)) for row in rows}


def transaction(source: Source, tables: Sequence[str], rng: random.Random) -> None:
    """Run a transaction of random statements, some of which change keys or write texts that need TOAST."""
    with source.connection.transaction(force_rollback=rng.random() < 0.1):
        for _ in range(rng.randint(1, 4)):
            source.run(_statement(rng.choice(tables), rng))


def _statement(table: str, rng: random.Random) -> str:
    text = rng.choice(["", "é", "x" * rng.randint(0, 30), long_text(rng)])
    id, part, amount = rng.randint(0, 9), rng.choice("ab"), rng.randint(-99, 99) / 8
    where = [f"WHERE id = {id}", "WHERE part = 'a'", f"WHERE id < {id}"][rng.randrange(3)]
    rows = f"SELECT i AS id, '{part}' AS part FROM generate_series({id}, {id + 4}) i"
    merge = (
        f"MERGE INTO {table} AS t USING ({rows}) AS s"
        " ON t.id = s.id AND t.part = s.part WHEN MATCHED AND t.number < 0 THEN DELETE"
        f" WHEN MATCHED THEN UPDATE SET text = '{text}' WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.part, "
        f"'{text}', {amount})"
    )
    return rng.choice(
        [
            f"INSERT INTO {table} VALUES ({id}, '{part}', '{text}', {amount}) ON CONFLICT DO NOTHING",
            merge,
            f"UPDATE {table} SET number = number + 1 {where}",
            f"UPDATE {table} SET text = NULLIF('{text}', '') {where}",
            f"UPDATE {table} SET part = part || '{rng.random()}', id = id + 100 {where}",
            f"DELETE FROM {table} {where}",
        ]
    )


def long_text(rng: random.Random) -> str:
    # It is not compressible, so it is stored out of line, and updates of other columns do not log it.
    return "".join(rng.choices("0123456789abcdef", k=6000))


class Stream:
    """Simulation of a streaming query without Spark, with a checkpoint and runs that can end at any step.

    The rows that were written are in ``rows``. A repeated micro-batch replaces the rows that it wrote before.
    """

    def __init__(self, **options: str) -> None:
        self._options = options
        self.offsets: list[Json] = []
        self.committed = 0
        self.batches: dict[int, list[Row]] = {}
        self._reader: ChangesStreamReader | None = None
        self.plan = ""
        self._initial: Json = {}

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    def start(self, feed: PostgresFeed, columns: Sequence[str] | None = None) -> pa.Schema:
        """Plan the query and start it. Return the schema of the plan."""
        with closing(feed.open()) as opened:
            described = opened.describe()
        schema = to_struct(described.schema)
        if columns is not None:
            schema = select_columns(schema, described.contract, columns, case_sensitive=True)
        assert described.plan is not None
        self.plan = described.plan
        plan = {"plan": described.plan, "someColumns": str(columns is not None).lower()}
        parsed = read_options({"url": feed.url, **plan, **self._options}, STREAM, "a read")
        self.end()
        self._reader = ChangesStreamReader(parsed, schema)
        self._initial = self._reader.initialOffset() if not self.offsets else {}
        return described.schema

    def step(self, *, die: str = "") -> bool:
        """Run a micro-batch, and return whether there was one.

        ``die`` ends the run after the micro-batch is ``logged`` or ``written``.
        """
        reader = self._reader
        assert reader is not None
        if self.committed == len(self.offsets):
            previous = self.offsets[-1] if self.offsets else self._initial
            offset = json.loads(json.dumps(reader.latestOffset(previous, ReadAllAvailable())))
            if offset == previous:
                return False
            self.offsets.append(offset)
        if die == "logged":
            self.end()
            return True
        number = len(self.offsets) - 1
        tasks = reader.partitions(self._start_offset(number), self.offsets[number])
        executor = pickle.loads(pickle.dumps(reader))
        self.batches[number] = [
            row
            for task in pickle.loads(pickle.dumps(tasks))
            for batch in executor.read(task)
            for row in batch.to_pylist()
        ]
        if die == "written":
            self.end()
            return True
        self.committed = len(self.offsets)
        return True

    def end(self) -> None:
        """End the run as the exit of its process would."""
        if self._reader is not None:
            self._reader._opened.close()
        self._reader = None

    def drain(self) -> list[Row]:
        """Run micro-batches until there are no more rows, and return their rows."""
        first = len(self.offsets)
        while self.step():
            pass
        return [row for number in range(first, len(self.offsets)) for row in self.batches[number]]

    def _start_offset(self, number: int) -> Json:
        return self.offsets[number - 1] if number else self._initial
