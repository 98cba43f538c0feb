"""Throughput of a pump compared with pg_recvlogical, and the latency from a commit to the queue."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

import penstock
from bench.harness import Result, bounded, pairs, scratch
from bench.postgres_feed import INSERTS, NAME, UPDATES, changes, copied_slot, receive
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.queue_feed import QueueFeed
from penstock.testing.stores import drop_schema, with_schema

ROWS = INSERTS + UPDATES
MIN_SPEED = 0.8
RATE, SECONDS = 1_000, 20
MAX_P50, MAX_P99 = 10.0, 50.0
_LATENCY = "bench_pump"


def throughput(url: str, store_kind: str, *, rounds: int = 3) -> list[Result]:
    """Measure a million changes into a queue, by a pump in a separate process."""
    with changes(url), scratch() as folder:
        speeds: list[tuple[float, float]] = []

        def ours() -> float:
            with copied_slot(url) as slot, _store(url, folder, store_kind) as store:
                start = time.perf_counter()
                child = _start_pump(str(PostgresFeed(url, NAME, slot, snapshot="none").url), store)
                _await_rows(store, NAME, ROWS)
                seconds = time.perf_counter() - start
                speeds.append((seconds, _stop_pump(child)))
            return seconds

        our_seconds, peer = pairs(ours, lambda: receive(url, folder), rounds)
        speed = ROWS / our_seconds
        cpu = min(cpu_seconds for _, cpu_seconds in speeds)
        return [
            Result(
                f"pump into {store_kind}, 1,000,000 changes",
                our_seconds,
                peer,
                peer / our_seconds,
                f">= {MIN_SPEED}",
                peer / our_seconds >= MIN_SPEED,
                f"{speed:,.0f} rows/s, {cpu:.1f} s of CPU in the pump's process, with its start",
            )
        ]


def latency(url: str, store_kind: str) -> list[Result]:
    """Measure the time from a commit at the source until a reader of the queue can see it."""
    with scratch() as folder, _store(url, folder, store_kind) as store, _table(url):
        child = _start_pump(PostgresFeed(url, _LATENCY, _LATENCY).url, store)
        try:
            _await_commits(store)
            writer = subprocess.Popen([sys.executable, "-m", "bench.pump", url])
            latencies = _observe_latencies(store, writer)
        finally:
            _stop_pump(child)
        milliseconds = np.array(latencies) * 1000
        p50, p99 = np.percentile(milliseconds, 50), np.percentile(milliseconds, 99)
        note = f"{len(latencies):,} commits at {RATE:,} a second"
        name = f"pump into {store_kind}, commit to queue"
        return [
            bounded(f"{name}, p50", float(p50), MAX_P50, "ms", note=note),
            bounded(f"{name}, p99", float(p99), MAX_P99, "ms"),
        ]


def _observe_latencies(store: str, writer: subprocess.Popen[bytes]) -> list[float]:
    """Return the seconds from each row's timestamp until a reader that watches the queue has read it."""
    latencies: list[float] = []
    with penstock.connect(store) as connected:
        queue = connected.queue(_LATENCY)
        row = 0
        with queue.watch() as watch:
            while len(latencies) < RATE * SECONDS:
                rows = queue.read(0, row)
                now = time.time()
                row += rows.num_rows
                latencies += [now - written_at for written_at in rows["at"].to_pylist()]
                if not rows.num_rows:
                    watch.wait({0: row}, 0.2)
    writer.wait()
    # The first rows are a warm-up.
    return latencies[len(latencies) // 10 :]


def _write(url: str) -> None:
    """Commit rows at a fixed rate."""
    with psycopg.connect(url, autocommit=True) as connection:
        due = time.perf_counter()
        for number in range(RATE * SECONDS):
            due += 1 / RATE
            if (early := due - time.perf_counter()) > 0:
                time.sleep(early)
            connection.execute(f"INSERT INTO {_LATENCY} VALUES (%s, %s)", [number, time.time()])


@contextmanager
def _table(url: str) -> Iterator[None]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {_LATENCY} (id bigint PRIMARY KEY, at double precision)".encode())
        connection.execute(f"CREATE PUBLICATION {_LATENCY} FOR TABLE {_LATENCY}".encode())
        try:
            yield
        finally:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{_LATENCY}' AND active_pid IS NOT NULL".encode()
            )
            time.sleep(0.5)
            connection.execute(f"SELECT pg_drop_replication_slot('{_LATENCY}')".encode())
            connection.execute(f"DROP PUBLICATION {_LATENCY}".encode())
            connection.execute(f"DROP TABLE {_LATENCY}".encode())


@contextmanager
def _store(url: str, folder: Path, kind: str) -> Iterator[str]:
    if kind == "SQLite":
        store_url = f"sqlite:///{folder}/{time.monotonic_ns()}.db"
        with penstock.connect(store_url):
            yield store_url
        return
    store_url = with_schema(url, "bench")
    drop_schema(url, "bench")
    with penstock.connect(store_url):
        yield store_url
    drop_schema(url, "bench")


def _start_pump(feed: str, store: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "penstock", "pump", "run", feed, "--url", store])


def _stop_pump(child: subprocess.Popen[bytes]) -> float:
    """Stop a pump, and return the CPU seconds that it has used."""
    child.terminate()
    _, _, used = os.wait4(child.pid, 0)
    return used.ru_utime + used.ru_stime


def _await_rows(store: str, queue: str, rows: int) -> None:
    feed: Any = QueueFeed(queue, store).open()
    while True:
        try:
            if sum(commit.rows for commit in feed.commits(-1, 2**62)) >= rows:
                return
        except penstock.PenstockError:
            pass
        time.sleep(0.02)


def _await_commits(store: str) -> None:
    """Wait until the pump runs and its queue exists."""
    while True:
        try:
            QueueFeed(_LATENCY, store).open().oldest()
            time.sleep(2)
            return
        except penstock.PenstockError:
            time.sleep(0.05)


if __name__ == "__main__":
    _write(sys.argv[1])
