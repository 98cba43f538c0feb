"""A standby of a PostgreSQL server, which takes over when the server has crashed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from tests.support.crashing_postgres import CrashingPostgres, crashing_postgres
from tests.support.postgres import answers, free_port
from tests.support.postgres_guard import server_identity
from tests.support.postgres_proxy import Proxy, proxied
from tests.support.waiting import wait_until


class Pair:
    """Server and its standby, behind one URL."""

    def __init__(self, primary: CrashingPostgres, proxy: Proxy, folder: Path) -> None:
        self._primary, self._proxy, self._folder = primary, proxy, folder
        self.url = proxy.url
        self.standby_url = _with_port(primary.url, free_port())
        self._standby: subprocess.Popen[bytes] | None = None

    def follow(self) -> None:
        """Start the standby from a copy of the server's current data."""
        data = self._folder / "data"
        command = [str(self._primary.program("pg_basebackup")), "--dbname", self._primary.url]
        options = ["--pgdata", str(data), "--write-recovery-conf", "--checkpoint", "fast", "--no-sync"]
        slot = ["--create-slot", "--slot", "standby"]
        subprocess.run([*command, *options, *slot], check=True, cwd=self._folder, **server_identity())
        database = f"{urlsplit(self._primary.url).path[1:]}"
        with (data / "postgresql.auto.conf").open("a") as settings:
            text = (data / "postgresql.auto.conf").read_text()
            primary_conninfo = re.findall(r"primary_conninfo = '(.*)'", text)[-1]
            settings.write(f"primary_conninfo = '{primary_conninfo} dbname={database}'\n")
            settings.write("hot_standby_feedback = on\nsync_replication_slots = on\nfsync = off\n")
        port = str(urlsplit(self.standby_url).port)
        arguments = self._primary.options(data=str(data), port=port)
        with (self._folder / "log").open("wb") as log:
            self._standby = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", **server_identity()
            )
        wait_until(lambda: answers(self.standby_url), 60, "the standby accepts connections")

    def pause(self) -> None:
        """Stop replication, so that the standby lacks later changes."""
        self._on_standby("ALTER SYSTEM SET primary_conninfo = ''")
        self._on_standby("SELECT pg_reload_conf()")
        wait_until(
            lambda: not self._on_standby("SELECT pid FROM pg_stat_wal_receiver"),
            30,
            "the WAL receiver has ended",
        )

    def take_over(self) -> None:
        """Crash the server, and promote the standby."""
        self._primary.stop()
        self._on_standby("SELECT pg_promote()")
        self._proxy.lead_to(self.standby_url)
        wait_until(
            lambda: self._on_standby("SELECT pg_is_in_recovery()") == [(False,)],
            60,
            "the standby is promoted",
        )

    def _on_standby(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.standby_url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def stop(self) -> None:
        if self._standby is not None:
            self._standby.send_signal(3)
            self._standby.wait(30)


@contextmanager
def with_standby(**settings: str) -> Iterator[Pair]:
    """Run a server whose standby has not been started yet."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-standby-"))
    if identity := server_identity():
        os.chown(folder, identity["user"], identity["group"])
    try:
        with (
            crashing_postgres(hot_standby_feedback="on", **settings) as primary,
            proxied(primary.url) as proxy,
        ):
            pair = Pair(primary, proxy, folder)
            try:
                yield pair
            finally:
                pair.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def await_slot(pair: Pair, read_on: Callable[[], object] = lambda: None, slot: str = "p") -> None:
    """Wait until the standby has the slot at its confirmed position, while its reader continues."""
    query = (
        b"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s AND NOT temporary "
        b"AND (synced OR NOT pg_is_in_recovery())"
    )

    def confirmed(url: str) -> list[tuple[object, ...]]:
        with psycopg.connect(url) as connection:
            return connection.execute(query, [slot]).fetchall()

    def is_synced() -> bool:
        run(pair.url, "SELECT pg_log_standby_snapshot()")
        read_on()
        return confirmed(pair.standby_url) == confirmed(pair.url) != []

    wait_until(is_synced, 60, "the slot is on the standby", interval=0.5)


def _with_port(url: str, port: int) -> str:
    parts = urlsplit(url)
    credentials = parts.netloc.rpartition("@")[0]
    return parts._replace(netloc=f"{credentials}@127.0.0.1:{port}").geturl()
