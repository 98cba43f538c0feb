"""A stream follows a server to which pgbench writes as fast as it can."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from tests.support.pgtools import program
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

SECONDS = int(os.environ.get("PENSTOCK_PGBENCH_SECONDS", "60"))
RATE = 2_000
TABLES = {
    "pgbench_accounts": ("aid", "abalance"),
    "pgbench_tellers": ("tid", "tbalance"),
    "pgbench_branches": ("bid", "bbalance"),
}
SINK = pa.schema(
    [
        ("table", pa.string()),
        ("key", pa.int64()),
        ("balance", pa.int64()),
        ("kind", pa.string()),
        ("version", pa.int64()),
        ("place", pa.int64()),
    ]
)


@pytest.fixture
def bank(logical_pg_url: str) -> Iterator[str]:
    """pgbench's tables, and a publication of those that have a key."""
    pgbench("--initialize", "--quiet", "--scale", 2, url=logical_pg_url)
    with psycopg.connect(logical_pg_url, autocommit=True) as connection:
        connection.execute(f"CREATE PUBLICATION bank FOR TABLE {', '.join(TABLES)}".encode())
        yield logical_pg_url
        connection.execute(b"SELECT pg_drop_replication_slot('bank')")
        connection.execute(b"DROP PUBLICATION bank")
        connection.execute(f"DROP TABLE pgbench_history, {', '.join(TABLES)}".encode())


def pgbench(*words: object, url: str) -> str:
    done = subprocess.run(
        [str(program("pgbench")), *map(str, words), url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def balances(changes: DataFrame) -> DataFrame:
    """One form for all three tables."""
    key = F.coalesce(*[F.col(f"{table}.{key}") for table, (key, _) in TABLES.items()])
    balance = F.coalesce(*[F.col(f"{table}.{balance}") for table, (_, balance) in TABLES.items()])
    return changes.select(
        F.col("_table").alias("table"),
        key.cast("bigint").alias("key"),
        balance.cast("bigint").alias("balance"),
        F.col("_change_type").alias("kind"),
        F.col("_commit_version").alias("version"),
        F.col("_commit_sequence").alias("place"),
    )


def test_the_lag_stays_bounded_and_the_replica_equals_the_source(
    spark: SparkSession, bank: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    feed = penstock.PostgresFeed(bank, "bank", "bank", snapshot="initial")
    opened = feed.open()
    lags: list[int] = []
    with penstock.connect(url, create=True) as store:
        queue = store.create_queue("balances", SINK)
        query = (
            penstock.stream(spark, feed)
            .transform(balances)
            .write(penstock.QueueSink("balances", url=url))
            .start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.processing_time())
        )
        wait_until(lambda: queue.info().rows >= 200_000, 120, "the snapshot is there")
        done = threading.Event()

        def watch() -> None:
            while not done.wait(1):
                lags.append(opened.lag().unconfirmed)

        watcher = threading.Thread(target=watch)
        watcher.start()
        report = pgbench(
            "--client", 4, "--jobs", 2, "--rate", RATE, "--time", SECONDS, "--no-vacuum", url=bank
        )
        done.set()
        watcher.join()
        query.processAllAvailable()
        query.stop()
        found = pa.concat_tables([queue.read(0, 0)])
    tps = float(re.findall(r"tps = ([\d.]+)", report)[0])
    third = len(lags) // 3
    print(
        f"\n{tps:.0f} transactions/s for {SECONDS} s; most bytes behind: {max(lags[:third])}, "
        f"{max(lags[third : 2 * third])}, {max(lags[2 * third :])} in its thirds"
    )
    assert max(lags[2 * third :]) < 2 * max(lags[: 2 * third]) + (16 << 20)
    assert replica(found) == source(bank)


def replica(changes: pa.Table) -> dict[tuple[str, int], int]:
    """The last balance of each row."""
    assert set(pc.unique(changes["kind"]).to_pylist()) == {"insert", "update_postimage"}
    places = changes.group_by(["version", "place"]).aggregate([([], "count_all")])
    assert pc.max(places["count_all"]).as_py() == 1
    ordered = changes.sort_by([("version", "ascending"), ("place", "ascending")])
    last = ordered.group_by(["table", "key"], use_threads=False).aggregate([("balance", "last")])
    rows = zip(*(last[name].to_pylist() for name in ("table", "key", "balance_last")), strict=True)
    return {(table, key): balance for table, key, balance in rows}


def source(url: str) -> dict[tuple[str, int], int]:
    with psycopg.connect(url) as connection:
        return {
            (f"public.{table}", row[0]): row[1]
            for table, (key, balance) in TABLES.items()
            for row in connection.execute(f"SELECT {key}, {balance} FROM {table}".encode())
        }
