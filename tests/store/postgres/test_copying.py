"""Rows that a server sends for ``copy … to stdout``."""

from __future__ import annotations

import itertools
import threading
import time

import psycopg

from penstock.store.postgres.connection import copy_rows


def test_other_threads_run_while_the_server_takes_its_time(pg_url: str) -> None:
    ticks: list[float] = []
    copying = threading.Event()
    copying.set()

    def tick() -> None:
        while copying.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.01)

    with psycopg.connect(pg_url, autocommit=True) as connection:
        thread = threading.Thread(target=tick)
        thread.start()
        # The server sends what is larger than its buffer at once.
        slow = "select repeat('x', 20000), pg_sleep(n / 2.0) from generate_series(0, 2) as n"
        rows = [bytes(row) for row in copy_rows(connection, f"copy ({slow}) to stdout")]
        copying.clear()
        thread.join()
        assert rows == [b"x" * 20_000 + b"\t\n"] * 3
        assert connection.execute("select 1").fetchone() == (1,)
    longest = max(after - before for before, after in itertools.pairwise(ticks))
    assert longest < 0.4
