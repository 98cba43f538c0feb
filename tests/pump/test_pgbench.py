"""Large tables are added to a pump's publication while pgbench writes to them and the pump is killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psycopg
import pyarrow as pa
import pytest

import penstock
from penstock.feeds.queue_feed import QueueFeed
from penstock.store.records import pumps
from tests.support.feed_reading import batches_of
from tests.support.pgtools import program
from tests.support.processes import ChildProcess, start

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SCALE = int(os.environ.get("PENSTOCK_PGBENCH_SCALE", "10"))
"""Each has 100,000 accounts."""
SECONDS = int(os.environ.get("PENSTOCK_PGBENCH_SECONDS", "60"))
RATE = 500
BALANCES = {"pgbench_accounts": ("aid", "abalance"), "pgbench_tellers": ("tid", "tbalance")}


@pytest.fixture
def bank(logical_pg_url: str) -> Iterator[str]:
    """pgbench's tables, and a publication that has the smallest one."""
    command = [str(program("pgbench")), "--initialize", "--quiet", "--scale", str(SCALE), logical_pg_url]
    subprocess.run(command, check=True, capture_output=True)
    with psycopg.connect(logical_pg_url, autocommit=True) as connection:
        connection.execute(b"CREATE PUBLICATION bank FOR TABLE pgbench_branches")
        yield logical_pg_url
        connection.execute(b"SELECT pg_drop_replication_slot('bank')")
        connection.execute(b"DROP PUBLICATION bank")
        connection.execute(b"DROP TABLE pgbench_history, pgbench_branches, pgbench_accounts, pgbench_tellers")


@contextmanager
def written(url: str) -> Iterator[None]:
    """Have pgbench write meanwhile."""
    rate = ["--client", "4", "--jobs", "2", "--rate", str(RATE), "--time", "36000", "--no-vacuum"]
    child = subprocess.Popen(
        [str(program("pgbench")), *rate, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        child.terminate()
        child.wait()


def pump(url: str, store: str, folder: Path) -> ChildProcess:
    feed = penstock.PostgresFeed(url, "bank", "bank").url
    command = [sys.executable, "-m", "penstock", "-v", "pump", "run", feed, "--schema-changes", "evolve"]
    return start([*command, "--url", store], os.environ, folder / f"{time.monotonic_ns()}.log")


def test_tables_with_millions_of_rows_come_without_a_difference(bank: str, tmp_path: Path) -> None:
    chance = random.Random(SCALE)
    store = f"sqlite:///{tmp_path}/store.db"
    child = pump(bank, store, tmp_path)
    try:
        child.wait_for_line("follows slot", 60)
        with written(bank):
            begun = time.monotonic()
            with psycopg.connect(bank, autocommit=True) as connection:
                connection.execute(b"ALTER PUBLICATION bank ADD TABLE pgbench_accounts, pgbench_tellers")
            kills, taken = 0, 0.0
            while time.monotonic() < begun + SECONDS or not taken:
                # A pump that is started takes over 6 seconds after the last sign of life of the one before.
                time.sleep(chance.uniform(8, 30))
                if not taken and _is_complete(store):
                    taken = time.monotonic() - begun
                child.kill_tree()
                kills += 1
                child = pump(bank, store, tmp_path)
        print(f"\n{SCALE * 100_000:,} accounts in at most {taken:.0f} s, with {kills} kills in all")
        for table in BALANCES:
            _await_equal(store, bank, table, child)
    finally:
        child.kill_tree()


def _await_equal(store: str, url: str, table: str, child: ChildProcess) -> None:
    deadline = time.monotonic() + 300
    while (found := _balances(store, table)) != (expected := _source(url, table)):
        assert child.returncode is None, child.output
        assert time.monotonic() < deadline, (table, found, expected, child.output)
        time.sleep(2)


def _is_complete(store: str) -> bool:
    with penstock.connect(store) as opened:
        (found,) = opened.database.run(pumps.list_pumps, write=False)
        return len(found.state["queues"]) == 3 and not found.state["backfills"]


def _balances(store: str, table: str) -> tuple[int, int, int]:
    """The number of rows, and sums that no two wrong balances leave as they are, unless by chance."""
    key, balance = BALANCES[table]
    feed = QueueFeed(table, store).open()
    schema = feed.describe().schema
    names = [key, balance, "_change_type", "_commit_version", "_commit_sequence"]
    columns = pa.schema([schema.field(name) for name in names])
    rows = pa.Table.from_batches(batches_of(feed, -1, feed.newest(-1), columns), columns)
    keys, values = rows[key].to_numpy(), rows[balance].to_numpy()
    inserts = rows["_change_type"].to_numpy() == "insert"
    order = np.lexsort((rows["_commit_sequence"].to_numpy(), rows["_commit_version"].to_numpy(), keys))
    last = np.append(np.diff(keys[order]) != 0, True)
    # Each row comes once, before its changes, and nothing is deleted.
    assert inserts[order].tolist() == np.append(True, last[:-1]).tolist()
    final_keys, final_values = keys[order][last].astype(object), values[order][last].astype(object)
    return len(final_keys), int(final_values.sum()), int((final_keys * final_values).sum())


def _source(url: str, table: str) -> tuple[int, int, int]:
    key, balance = BALANCES[table]
    query = f"SELECT count(*), sum({balance}::numeric), sum({key}::numeric * {balance}) FROM {table}"
    with psycopg.connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    count, total, product = map(int, row)
    return count, total, product
