"""Pumps in processes of their own, which are killed, suspended and woken."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import penstock
from penstock.store.records import pumps
from penstock.ui.reading import QueryRow, read_queries
from tests.support.postgres_source import Source
from tests.support.processes import ChildProcess, start
from tests.support.pumped import await_equal, change, fill, is_equal, pumped_tables, source_tables
from tests.support.raw_sql import run_sql
from tests.support.waiting import wait_until

TAKE_OVER_SECONDS = 10.0


class Machines:
    """Starts pumps with the command line."""

    def __init__(self, shop: Source, store_url: str, folder: Path) -> None:
        self._shop, self._url, self._folder = shop, store_url, folder
        self._number = 0
        self.all: list[ChildProcess] = []

    def start(self) -> ChildProcess:
        self._number += 1
        feed = self._shop.feed(snapshot="initial").url
        child = start(
            [sys.executable, "-m", "penstock", "-v", "pump", "run", feed, "--url", self._url],
            os.environ,
            self._folder / f"pump{self._number}.log",
        )
        self.all.append(child)
        return child

    def pair(self) -> tuple[ChildProcess, ChildProcess]:
        """Start a pump that has appended what is there, and another one that waits."""
        first = self.start()
        await_equal(self._url, self._shop, [])
        second = self.start()
        second.wait_for_line("runs in another process")
        return first, second


@pytest.fixture
def machines(shop: Source, store_url: str, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(shop, store_url, tmp_path)
    with ExitStack() as stack:
        yield made
        for child in made.all:
            stack.callback(child.kill_tree)


def test_pumps_that_are_killed_at_random_moments_lose_and_repeat_nothing(
    shop: Source, store_url: str, machines: Machines
) -> None:
    chance = random.Random(7)
    for _ in range(8):
        child = machines.start()
        ends_at = time.monotonic() + chance.uniform(0.8, 3.0)
        while time.monotonic() < ends_at:
            change(shop, chance)
            time.sleep(0.002)
        child.kill_tree()
        for _ in range(chance.randint(0, 30)):
            change(shop, chance)
    machines.start()
    await_equal(store_url, shop, [])


def test_another_pump_takes_over_from_one_that_is_suspended_which_appends_nothing_later(
    shop: Source, store_url: str, machines: Machines
) -> None:
    first, _ = machines.pair()
    os.kill(first.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    fill(shop, 501, 600)
    wait_until(lambda: is_equal(store_url, shop), 60, "the other pump")
    taken = time.monotonic() - stopped_at
    os.kill(first.pid, signal.SIGCONT)
    fill(shop, 601, 700)
    assert first.wait(60) == 1
    assert "PRODUCER_FENCED" in first.output
    await_equal(store_url, shop, [])
    # Starting and reading the queues are not the pump's.
    assert taken < TAKE_OVER_SECONDS + 3


def test_another_pump_takes_over_at_once_from_one_that_is_stopped(
    shop: Source, store_url: str, machines: Machines
) -> None:
    first, second = machines.pair()
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(30) == 0
    assert "has stopped" in first.output
    fill(shop, 501, 510)
    await_equal(store_url, shop, [])
    second.wait_for_line("starts", 30)


def test_a_pump_is_listed_and_removed(
    shop: Source, store_url: str, machines: Machines, tmp_path: Path
) -> None:
    child = machines.start()
    await_equal(store_url, shop, [])
    with penstock.connect(store_url) as store:
        listed = store.database.run(pumps.list_pumps, write=False)
        assert [(each.name, each.epoch, sorted(each.state["queues"])) for each in listed] == [
            (shop.name, 1, [f"{shop.name}.orders", f"{shop.name}.stock"])
        ]
        # On the monitor page it is one of the queries.
        (query,) = wait_until(lambda: _reported(store), 30, "a report")
        assert (query.engine, query.name, query.rows_in) == ("pump", shop.name, 507)
        assert query.sink == f"queues '{shop.name}.orders', '{shop.name}.stock'"
    refused = _command(tmp_path, "pump", "remove", shop.name, "--yes", "--url", store_url)
    assert refused.wait() == 1
    assert "is running: stop it first" in refused.output
    os.kill(child.pid, signal.SIGINT)
    assert child.wait(30) == 0
    password = urlsplit(shop.url).password
    assert password
    with penstock.connect(store_url) as store:
        kept = [run_sql(store.database, f"select * from penstock.{table}") for table in ("pump", "query")]
    assert password not in f"{kept} {child.output}"
    shown = _command(tmp_path, "pump", "list", "--json", "--url", store_url)
    assert shown.wait() == 0
    assert '"state": "stopped"' in shown.output
    assert _command(tmp_path, "pump", "remove", shop.name, "--yes", "--url", store_url).wait() == 0
    assert pumped_tables(store_url, shop) == source_tables(shop)


def _reported(store: penstock.Store) -> list[QueryRow]:
    """The queries that have reported rows."""
    state = store.database.run(lambda tx: read_queries(tx, since=0), write=False)
    return [query for query in state.queries if query.rows_in]


def _command(folder: Path, *words: str) -> ChildProcess:
    return start([sys.executable, "-m", "penstock", *words], os.environ, folder / "command.log")
