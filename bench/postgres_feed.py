"""Changes of PostgreSQL that are read as rows, compared with pg_recvlogical, which writes them to a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

import penstock
from bench.harness import Result, scratch, speed, timed
from bench.spark_session import spark
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.feed import OpenPostgresFeed
from tests.support.pgtools import program
from tests.support.postgres import start_postgres

INSERTS, UPDATES = 600_000, 400_000
ROWS_IN_COMMIT = 50_000
NAME = "bench_feed"


def read(url: str, *, rounds: int = 3) -> Result:
    """Measure ``feed.read`` of a million changes of a table with five columns."""
    with changes(url) as feed, scratch() as folder:
        start = feed.oldest()
        upto, schema = feed.newest(start), feed.describe().schema

        def ours() -> float:
            return timed(lambda: _require_all(sum(_rows(feed, start, upto, schema))))

        return speed("postgresql feed, read", ours, lambda: receive(url, folder), least=0.4, rounds=rounds)


def through_spark(url: str, *, rounds: int = 3) -> Result:
    """Measure the same changes in one micro-batch of a streaming query into Spark's noop sink.

    The start of the query is not included.
    """
    with changes(url), scratch() as folder:
        runs = iter(range(1000))

        def run(copy: str) -> float:
            frame = penstock.changes.read_stream(spark(), PostgresFeed(url, NAME, copy, snapshot="none"))
            checkpoint = str(folder / f"checkpoint-{next(runs)}")
            writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
            (progress,) = [progress for progress in query.recentProgress if progress.numInputRows]
            _require_all(progress.numInputRows)
            return progress.durationMs["triggerExecution"] / 1000

        def ours() -> float:
            with copied_slot(url) as copy:
                return run(copy)

        return speed(
            "postgresql feed, Spark micro-batch",
            ours,
            lambda: receive(url, folder),
            least=0.4,
            rounds=rounds,
        )


def _rows(feed: OpenPostgresFeed, start: int, upto: int, schema: Any) -> Iterator[int]:
    for task in feed.tasks(start, upto, 1_000_000):
        for batch in feed.read(task, schema):
            yield batch.num_rows


def _require_all(rows: int) -> None:
    if rows != INSERTS + UPDATES:
        raise AssertionError(f"{rows} change rows were read, not {INSERTS + UPDATES}")


@contextmanager
def changes(url: str) -> Iterator[OpenPostgresFeed]:
    """Yield a feed whose slot has a million changes."""
    with psycopg.connect(url, autocommit=True) as connection:
        _clean(connection)
        connection.execute(
            f"CREATE TABLE {NAME} ("
            "id bigint PRIMARY KEY, a int, name text, price double precision, at timestamptz)"
        )
        connection.execute(f"CREATE PUBLICATION {NAME} FOR TABLE {NAME}")
        connection.execute(f"SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')")
        for first in range(0, INSERTS, ROWS_IN_COMMIT):
            connection.execute(
                f"INSERT INTO {NAME} SELECT i, i % 1000, 'customer ' || i, i * 0.25, now()"
                f" FROM generate_series({first}, {first + ROWS_IN_COMMIT - 1}) AS i"
            )
        for first in range(0, UPDATES, ROWS_IN_COMMIT):
            connection.execute(
                f"UPDATE {NAME} SET a = a + 1 WHERE id >= {first} AND id < {first + ROWS_IN_COMMIT}"
            )
        try:
            yield PostgresFeed(url, NAME, NAME, snapshot="none").open()
        finally:
            _clean(connection)


def _clean(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE '{NAME}%'"
    )
    connection.execute(f"DROP PUBLICATION IF EXISTS {NAME}")
    connection.execute(f"DROP TABLE IF EXISTS {NAME}")


@contextmanager
def copied_slot(url: str) -> Iterator[str]:
    """Copy the slot for a reader that advances it."""
    copy = f"{NAME}_copy"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"SELECT pg_copy_logical_replication_slot('{NAME}', '{copy}')")
        yield copy
        connection.execute(f"SELECT pg_drop_replication_slot('{copy}')")


def receive(url: str, folder: Path) -> float:
    """Return the seconds of pg_recvlogical."""
    with psycopg.connect(url) as connection, copied_slot(url) as copy:
        end = connection.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
        assert end is not None
        command = [
            str(program("pg_recvlogical")), "--dbname", url, "--slot", copy, "--start", "--no-loop",
            "--endpos", end[0], "--file", str(folder / "received"), "--fsync-interval", "0",
            "--option", "proto_version=1", "--option", f"publication_names={NAME}",
        ]  # fmt: skip
        seconds = timed(lambda: subprocess.run(command, check=True, cwd=folder))
    (folder / "received").unlink()
    return seconds


def main(names: list[str]) -> None:
    server = start_postgres()
    try:
        for name, case in (("read", read), ("spark", through_spark)):
            if not names or name in names:
                print(case(server.url).line(), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
