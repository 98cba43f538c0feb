"""From pgbench to copies of its tables, through a pump and Spark, while each of them is killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

import penstock
from tests.support.crashing_postgres import CrashingPostgres, crashing_postgres
from tests.support.pgtools import program
from tests.support.processes import ChildProcess, start
from tests.support.sql_tables import query
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

SECONDS = int(os.environ.get("PENSTOCK_PGBENCH_SECONDS", "60"))
SCALE = int(os.environ.get("PENSTOCK_PGBENCH_SCALE", "1"))
RATE = 300
TABLES = {"pgbench_accounts": "aid", "pgbench_tellers": "tid", "pgbench_branches": "bid"}
BALANCES = {"pgbench_accounts": "abalance", "pgbench_tellers": "tbalance", "pgbench_branches": "bbalance"}


class Chain:
    """A server, pgbench on it, a pump of its tables, and a driver that copies them."""

    def __init__(self, server: CrashingPostgres, folder: Path) -> None:
        self.server, self._folder = server, folder
        self.store, self.copies = f"sqlite:///{folder}/store.db", f"sqlite:///{folder}/copies.db"
        self.kills: Counter[str] = Counter()
        self._load: subprocess.Popen[bytes] | None = None
        self.pump, self.driver = self._start_pump(), None

    def _start_pump(self) -> ChildProcess:
        feed = penstock.PostgresFeed(self.server.url, "bank", "bank").url
        command = [sys.executable, "-m", "penstock", "-v", "pump", "run", feed, "--url", self.store]
        return start(command, os.environ, self._log("pump"))

    def _start_driver(self) -> ChildProcess:
        tables = [f"{table}:{key}" for table, key in TABLES.items()]
        module = [sys.executable, "-m", "tests.pump.copy_child"]
        command = [*module, str(self._folder), self.store, self.copies, *tables]
        return start(command, os.environ, self._log("driver"))

    def _log(self, what: str) -> Path:
        return self._folder / f"{what}.{time.monotonic_ns()}.log"

    def begin(self) -> None:
        self.pump.wait_for_line("follows slot", 120)
        self.driver = self._start_driver()
        self.write()

    def write(self) -> None:
        """Have pgbench write until the server is gone."""
        rate = ["--client", "4", "--rate", str(RATE), "--time", "36000", "--no-vacuum"]
        self._load = subprocess.Popen(
            [str(program("pgbench")), *rate, self.server.url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def end_writing(self) -> None:
        if self._load is not None:
            self._load.terminate()
            self._load.wait()

    def kill(self, what: str) -> None:
        self.kills[what] += 1
        if what == "server":
            self.server.stop()
            self.end_writing()
            self.server.start()
            wait_until(self._answers, 120, "the server")
            self.write()
        elif what == "pump":
            self.pump.kill_tree()
            self.pump = self._start_pump()
        else:
            assert self.driver is not None
            self.driver.kill_tree()
            self.driver = self._start_driver()

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError), psycopg.connect(self.server.url):
            return True
        return False

    def require_alive(self) -> None:
        """Nothing but a kill may end a process."""
        for child in (self.pump, self.driver):
            assert child is not None
            assert child.returncode is None, child.output[-5000:]

    def differences(self) -> list[str]:
        """The tables whose copies differ now."""
        with psycopg.connect(self.server.url) as connection:
            connection.execute(b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            return [table for table in TABLES if self._differs(connection, table)]

    def _differs(self, connection: psycopg.Connection, table: str) -> bool:
        text = f"SELECT {TABLES[table]}, {BALANCES[table]} FROM {table} ORDER BY 1"
        try:
            return connection.execute(text.encode()).fetchall() != query(self.copies, text)
        except Exception as error:
            if "no such table" in str(error):
                return True
            raise

    def close(self) -> None:
        self.end_writing()
        for child in (self.pump, self.driver):
            if child is not None:
                child.kill_tree()


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    with crashing_postgres(wal_level="logical") as server:
        command = [str(program("pgbench")), "--initialize", "--quiet", "--scale", str(SCALE), server.url]
        subprocess.run(command, check=True, capture_output=True)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"CREATE PUBLICATION bank FOR TABLE {', '.join(TABLES)}".encode())
        made = Chain(server, tmp_path)
        try:
            yield made
        finally:
            made.close()


def test_copies_equal_their_source_whatever_is_killed(chain: Chain) -> None:
    chance = random.Random(SECONDS)
    chain.begin()
    began = time.monotonic()
    while time.monotonic() < began + SECONDS:
        time.sleep(chance.uniform(5, 20))
        chain.require_alive()
        chain.kill(chance.choice(["pump", "driver", "server"]))
    with psycopg.connect(chain.server.url) as connection:
        row = connection.execute(b"SELECT count(*) FROM pgbench_history").fetchone()
    chain.end_writing()
    wait_until(lambda: chain.require_alive() or not chain.differences(), 300, "the copies", interval=2)
    print(f"\n{row} transactions in {time.monotonic() - began:.0f} s with {dict(chain.kills)} kills")
