"""Tables with a publication and a slot of their own, and a feed's rows applied to a model."""

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
"""A table for random histories."""


@dataclass
class Source:
    """A schema of a database, with a publication of its tables."""

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
        """Make a published table; its name with the schema."""
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
        """Drop the slot, if there is one, once its last reader has let go of it: that takes a moment."""

        def is_dropped() -> bool:
            slots = f"FROM pg_replication_slots WHERE slot_name = '{self.name}'"
            self.run(f"SELECT pg_drop_replication_slot(slot_name) {slots} AND NOT active")
            return not self.slots()

        wait_until(is_dropped, 60, "the slot to be free")

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
    """Leave a statement's transaction open; it is rolled back in the end."""
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
    """The batches of a range, checked against the schema."""
    schema = feed.describe().schema
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    return batches_of(feed, after, upto, schema, rows_per_task)


def changes(feed: OpenPostgresFeed, after: int, upto: int, **options: object) -> list[Row]:
    """The rows of a range."""
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
    """Play change rows onto a table; what is not known stays as it is, also where the key changes.

    The old values of an update have to be those of the table, but for the columns that are ``unchecked``.
    """
    gone: Row = {}
    checked = [name for name in columns if name not in unchecked]
    for row in rows:
        assert row["_change_type"] in ("insert", "delete", "update_preimage", "update_postimage")
        place = tuple(row[name] for name in key)
        if row["_change_type"] == "insert":
            assert place not in state, row
        else:
            assert place in state, row
        if row["_change_type"] == "update_preimage":
            assert {name: state[place][name] for name in checked} == {name: row[name] for name in checked}, (
                row
            )
        elif row["_change_type"] == "delete":
            gone = state.pop(place)
        else:
            unknown = row.get("_unchanged") or ()
            old = state.get(place, gone)
            state[place] = {name: old[name] if name in unknown else row[name] for name in columns}


def state_of(source: Source, table: str) -> dict[object, Row]:
    """What a table of DDL holds."""
    found = source.rows(f"SELECT {', '.join(COLUMNS)} FROM {table}")
    return {row[:2]: dict(zip(COLUMNS, row, strict=True)) for row in found}


def transaction(source: Source, tables: Sequence[str], chance: random.Random) -> None:
    """Some statements that change some rows, with keys that move, and texts that are too long for their
    row."""
    with source.connection.transaction(force_rollback=chance.random() < 0.1):
        for _ in range(chance.randint(1, 4)):
            source.run(_statement(chance.choice(tables), chance))


def _statement(table: str, chance: random.Random) -> str:
    text = chance.choice(["", "é", "x" * chance.randint(0, 30), long_text(chance)])
    id, part, amount = chance.randint(0, 9), chance.choice("ab"), chance.randint(-99, 99) / 8
    where = [f"WHERE id = {id}", "WHERE part = 'a'", f"WHERE id < {id}"][chance.randrange(3)]
    several = f"SELECT i AS id, '{part}' AS part FROM generate_series({id}, {id + 4}) i"
    merge = (
        f"MERGE INTO {table} AS t USING ({several}) AS s"
        " ON t.id = s.id AND t.part = s.part WHEN MATCHED AND t.number < 0 THEN DELETE"
        f" WHEN MATCHED THEN UPDATE SET text = '{text}' WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.part, "
        f"'{text}', {amount})"
    )
    return chance.choice(
        [
            f"INSERT INTO {table} VALUES ({id}, '{part}', '{text}', {amount}) ON CONFLICT DO NOTHING",
            merge,
            f"UPDATE {table} SET number = number + 1 {where}",
            f"UPDATE {table} SET text = NULLIF('{text}', '') {where}",
            f"UPDATE {table} SET part = part || '{chance.random()}', id = id + 100 {where}",
            f"DELETE FROM {table} {where}",
        ]
    )


def long_text(chance: random.Random) -> str:
    # Not compressible: it is kept out of line, and updates of other columns do not log it.
    return "".join(chance.choices("0123456789abcdef", k=6000))


class Stream:
    """A streaming query as Spark runs it, without Spark: a checkpoint, and runs that can be ended anywhere.

    What is written goes to ``rows``; a micro-batch that is repeated replaces what it has written before.
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
        """Plan the query and start it: the columns of the plan."""
        with closing(feed.open()) as opened:
            found = opened.describe()
        schema = to_struct(found.schema)
        if columns is not None:
            schema = select_columns(schema, found.contract, columns, case_sensitive=True)
        assert found.plan is not None
        self.plan = found.plan
        plan = {"plan": found.plan, "someColumns": str(columns is not None).lower()}
        given = read_options({"url": feed.url, **plan, **self._options}, STREAM, "a read")
        self.end()
        self._reader = ChangesStreamReader(given, schema)
        self._initial = self._reader.initialOffset() if not self.offsets else {}
        return found.schema

    def step(self, *, die: str = "") -> bool:
        """Run one micro-batch: whether there was one. ``die`` ends the run once it is ``logged`` or
        ``written``."""
        reader = self._reader
        assert reader is not None
        if self.committed == len(self.offsets):
            before = self.offsets[-1] if self.offsets else self._initial
            found = json.loads(json.dumps(reader.latestOffset(before, ReadAllAvailable())))
            if found == before:
                return False
            self.offsets.append(found)
        if die == "logged":
            self.end()
            return True
        number = len(self.offsets) - 1
        tasks = reader.partitions(self._before(number), self.offsets[number])
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
        """End the run, as its process would."""
        if self._reader is not None:
            self._reader._opened.close()
        self._reader = None

    def drain(self) -> list[Row]:
        """Run micro-batches until there is nothing more: the rows that came."""
        first = len(self.offsets)
        while self.step():
            pass
        return [row for number in range(first, len(self.offsets)) for row in self.batches[number]]

    def _before(self, number: int) -> Json:
        return self.offsets[number - 1] if number else self._initial
