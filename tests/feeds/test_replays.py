"""Replaying any history of a table, read through Spark in batch or as a stream, gives the table at
every version.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table
from pyspark.sql import SparkSession

import penstock
from tests.feeds.delta.tables import SCHEMA as DELTA_SCHEMA
from tests.feeds.delta.tables import History, table_at
from tests.feeds.delta.tables import rows as delta_rows
from tests.feeds.iceberg import lake
from tests.feeds.replays import State, check_states, read_both_ways, same_rows
from tests.support.debezium_events import postgres as event
from tests.support.postgres_source import COLUMNS, DDL, Row, Source, state_of, transaction

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("data", pa.string())])
NAMES = tuple(SCHEMA.names)
COMMITS = 6


@pytest.fixture(params=[1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 8))])
def chance(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


def keyed(rows: pa.Table) -> State:
    return {(row["id"],): row for row in rows.to_pylist()}


def table(state: State) -> pa.Table:
    return pa.Table.from_pylist(list(state.values()), schema=SCHEMA)


def next_state(state: State, chance: random.Random) -> State:
    """A table after a commit: some rows come, some go, some change, which may be all of it, or none."""
    after = dict(state)
    for id in chance.sample(range(10), chance.randint(0, 8)):
        if (id,) in after and chance.random() < 0.4:
            del after[id,]
        else:
            after[id,] = {"id": id, "data": chance.choice(["p", "q", None])}
    return after


def history(chance: random.Random) -> Iterator[tuple[int, State, State]]:
    """Versions, and a table before and after each."""
    state: State = {}
    version = 1
    for _ in range(COMMITS):
        before, state = state, next_state(state, chance)
        yield version, before, state
        version += chance.choice([1, 1, 3])


def check(
    spark: SparkSession, feed: Any, folder: Path, chance: random.Random, states: dict[int, State]
) -> None:
    columns = next(iter(state for state in states.values() if state))
    for rows in read_both_ways(spark, feed, folder, chance, list(states)):
        check_states(rows, states, ("id",), list(next(iter(columns.values()))))


def test_a_queue(spark: SparkSession, tmp_path: Path, chance: random.Random) -> None:
    url = f"sqlite:///{tmp_path}/feed.db"
    penstock.connect(url, create=True).close()
    contract = penstock.ChangeContract(
        "id", carryover_rows=True, intermediate_changes=True, updates_as_delete_and_insert=True
    )
    feed = penstock.QueueFeed.create("feed", SCHEMA, contract, store=url, partitions=2)
    states = {}
    for version, before, after in history(chance):
        # As a table that is rewritten when it changes: what did not change is carried over.
        rows = [row | {"_change_type": "delete"} for row in before.values()]
        rows += [row | {"_change_type": "insert"} for row in after.values()]
        chance.shuffle(rows)
        feed.append_commit(version, datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=version), rows)
        states[version] = after
    check(spark, feed, tmp_path, chance, states)


@pytest.mark.soak
def test_snapshots(spark: SparkSession, tmp_path: Path, chance: random.Random) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    states = {}
    for version, _, after in history(chance):
        pq.write_table(table(after), folder / f"{version:04}.parquet")
        states[version] = after
    check(spark, penstock.SnapshotFeed(str(folder), "id"), tmp_path, chance, states)


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
def test_delta(spark: SparkSession, tmp_path: Path, chance: random.Random, feed_on: bool) -> None:
    path = tmp_path / "table"
    history = History(path, feed=feed_on, partitioned=chance.random() < 0.5)
    for _ in range(COMMITS):
        step = chance.choice(["append", "append", "merge", "merge", "update", "delete", "optimize"])
        ids = chance.sample(range(12), chance.randint(1, 6))
        values = [(id, chance.choice(["a", "b", None]), chance.choice([0.0, 3.0, None])) for id in ids]
        getattr(history, step)(delta_rows(*values))
    states: dict[int, State] = {}
    for version in range(history.table.version() + 1):
        held = table_at(path, version).values()
        states[version] = {row[:1]: dict(zip(DELTA_SCHEMA.names, row, strict=True)) for row in held}
    check(spark, penstock.DeltaFeed(str(path), "id"), tmp_path, chance, states)


def iceberg_commit(table: Table, new: int, chance: random.Random) -> None:
    held = sorted(table.scan().to_arrow()["id"].to_pylist())
    some = chance.sample(held, min(len(held), 2))
    named = f"id in ({', '.join(map(str, some))})"
    rows = lake.rows(*((id, chance.choice(["p", None]), chance.randint(0, 2)) for id in [*some, new]))
    step = chance.choice(["append", "delete", "overwrite", "upsert", "positions"])
    if step == "append" or not some:
        table.append(rows.slice(len(some)))
    elif step == "delete":
        table.delete(named)
    elif step == "overwrite":
        table.overwrite(rows, named)
    elif step == "upsert":
        table.upsert(rows, join_cols=["id"])
    else:
        places = [(file, place) for file in lake.live_files(table) for place in range(file.record_count)]
        lake.delete_positions(table, chance.sample(places, 1))


@pytest.mark.soak
def test_iceberg(spark: SparkSession, tmp_path: Path, chance: random.Random) -> None:
    made = lake.Lake(tmp_path / "lake")
    orders = made.table()
    orders.append(lake.rows((0, "a", 0), (1, "b", 1)))
    for number in range(COMMITS):
        iceberg_commit(orders, number + 10, chance)
    states = {}
    snapshot = orders.current_snapshot()
    while snapshot is not None:
        states[snapshot.sequence_number or 0] = keyed(
            orders.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
        )
        parent = snapshot.parent_snapshot_id
        snapshot = orders.snapshot_by_id(parent) if parent is not None else None
    check(spark, made.feed(row_id="id"), tmp_path, chance, states)


def test_postgres_tables(spark: SparkSession, source: Source, tmp_path: Path, chance: random.Random) -> None:
    tables = [source.table(DDL, name) for name in ("one", "two")]
    for name, identity in zip(tables, ("default", "full"), strict=True):
        source.run(
            f"ALTER TABLE {name} REPLICA IDENTITY {identity}",
            f"ALTER TABLE {name} ALTER text SET STORAGE EXTERNAL",
            f"INSERT INTO {name} SELECT i, 'a', repeat('x', 5000), i FROM generate_series(1, 5) i",
        )
    feed = source.feed(snapshot="initial")
    opened = feed.open()
    start = opened.prepare()
    states: dict[str, dict[int, State]] = {name: {} for name in tables}
    for number in range(COMMITS + 1):
        if number:
            transaction(source, tables, chance)
        version = opened.newest(start)
        for name in tables:
            states[name][version] = state_of(source, name)
    for rows in read_both_ways(spark, feed, tmp_path, chance, list(states[tables[0]])):
        for name in tables:
            there = [of_table(row) for row in rows if row["_table"] == name]
            check_states(there, states[name], COLUMNS[:2], COLUMNS)


def of_table(row: Row) -> Row:
    """A change of one table out of several; the columns of the others are null."""
    chosen = row["_table"].partition(".")[2]
    assert row["one" if chosen == "two" else "two"] is None
    return {**row, **row[chosen]}


@pytest.mark.soak
def test_debezium(spark: SparkSession, tmp_path: Path, chance: random.Random) -> None:
    folder = tmp_path / "topic"
    folder.mkdir()
    events: list[str | None] = []
    states: dict[int, State] = {}
    for _, before, after in history(chance):
        state = dict(before)
        for key in sorted({*before, *after}):
            old, new = before.get(key), after.get(key)
            if old == new:
                continue
            lsn = len(states) + 1
            if new is None:
                # What the default replica identity has the server log.
                events += [event("d", before={"id": key[0]}, lsn=lsn), None]
                del state[key]
            else:
                image = old if chance.random() < 0.5 else None
                events.append(event("u" if old else "c", before=image, after=new, lsn=lsn))
                state[key] = new
            states[lsn] = dict(state)
    start = 0
    while start < len(events):
        chosen = events[start : start + chance.randint(1, 6)]
        offsets = range(start, start + len(chosen))
        columns = {"value": pa.array(chosen, pa.string()), "offset": pa.array(offsets, pa.int64())}
        path = folder / f"{start:05}.parquet"
        pq.write_table(pa.table(columns), path)
        # Spark takes the oldest ones first.
        os.utime(path, (1_700_000_000 + start, 1_700_000_000 + start))
        start += len(chosen)
    feed = penstock.DebeziumFeed("id bigint not null, data string", "id")
    topic = spark.readStream.schema("value string, offset bigint")
    streams = [topic.option("maxFilesPerTrigger", chance.randint(1, 3)).parquet(str(folder))]
    for rows in same_rows(
        feed.read(spark.read.parquet(str(folder))), [feed.read(each) for each in streams], tmp_path
    ):
        check_states(rows, states, ("id",), NAMES)
