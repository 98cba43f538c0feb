"""If a process is suspended while it holds a lock, other processes wait for a while and then succeed, and no
rows are duplicated.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

import penstock
from penstock.commit.owner import Owner
from penstock.errors import StoreLockedError
from penstock.store.statements import qualify
from penstock.testing import temporary_store_url
from tests.store.programs import SCHEMA
from tests.support.processes import ChildProcess
from tests.support.raw_sql import raw_connection
from tests.support.waiting import wait_until

RunChild = Callable[..., ChildProcess]
IDLE = "options=-c%20idle_in_transaction_session_timeout%3D1s%20-c%20lock_timeout%3D800ms"


def _stopped(child: ChildProcess) -> None:
    child.wait_for_line("stopping")
    wait_until(
        lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, 10, "the child is stopped"
    )


@pytest.fixture
def short_url(pg_url: str) -> Iterator[str]:
    """The URL of a store whose sessions may be idle in a transaction for at most one second."""
    with temporary_store_url(pg_url) as url:
        yield f"{url}&lock_wait=8s&{IDLE}"


@pytest.mark.parametrize(
    ("moment", "rows"),
    [("before_commit", [1]), ("behind_many_rows", [*range(12)])],
)
def test_a_client_stopped_during_an_append_does_not_block_others_and_retries_later(
    short_url: str, run_child: RunChild, moment: str, rows: list[int]
) -> None:
    with penstock.connect(short_url) as store:
        queue = store.create_queue("q", SCHEMA, partitions=min(3, len(rows)), key=["n"])
        child = run_child("tests.store.programs", "stop_in_append", short_url, moment)
        _stopped(child)
        began = time.monotonic()
        queue.append([{"n": n} for n in range(100, 112)])
        assert time.monotonic() - began < 6
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(30) == 0, child.output
        assert "appended after 2" in child.output
        found = [row["n"] for part in range(queue.partitions) for row in queue.read(part, 0).to_pylist()]
        assert sorted(found) == [*rows, *range(100, 112)]


def test_with_the_defaults_a_stopped_client_blocks_others_for_less_than_half_a_minute(
    pg_url: str, run_child: RunChild
) -> None:
    with temporary_store_url(pg_url) as url, penstock.connect(url) as store:
        queue = store.create_queue("q", SCHEMA)
        child = run_child("tests.store.programs", "stop_in_append", url, "before_commit")
        _stopped(child)
        began = time.monotonic()
        queue.append([{"n": 2}])
        assert time.monotonic() - began < 30
        # Longer than the store retries, so that the suspended time must not count towards the retries.
        time.sleep(10)
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(30) == 0, child.output
        assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [2, 1]


def test_a_consumer_is_taken_over_from_a_stopped_driver(short_url: str, run_child: RunChild) -> None:
    with penstock.connect(short_url) as store:
        queue = store.create_queue("q", SCHEMA)
        store.create_consumer("c")
        queue.register("c")
        child = run_child("tests.store.programs", "stop_in_plan", short_url)
        _stopped(child)
        began = time.monotonic()
        owner = Owner(store.database, "c", "q")
        assert time.monotonic() - began < 6
        assert owner.epoch == 2
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(30) == 0, child.output
        assert "fenced [1, 2] OWNER_FENCED" in child.output


def test_a_client_stopped_while_the_server_runs_its_statement_retries_the_append(
    short_url: str, run_child: RunChild
) -> None:
    """The server ends the session. Its message arrives with the statement's result, before the commit."""
    with penstock.connect(short_url) as store:
        queue = store.create_queue("q", SCHEMA)
        child = run_child("tests.store.programs", "stop_in_append", short_url, "in_a_statement")
        child.wait_for_line("running")
        os.kill(child.pid, signal.SIGSTOP)
        queue.append([{"n": 2}])
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(30) == 0, child.output
        assert "appended after 2" in child.output
        assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [2, 1]


@contextmanager
def _locked_by_hand(store: penstock.Store, **options: Any) -> Iterator[Any]:
    """Hold the lock of each partition in a session without time limits."""
    connection = psycopg.connect(store.database.url.target, **{"application_name": "psql", **options})
    try:
        connection.execute(
            qualify(
                "select * from penstock.partition for update", "postgres", store.database.url.schema
            ).encode()
        )
        yield connection
    finally:
        connection.close()


def test_a_lock_timeout_names_the_holder_of_the_lock(pg_url: str) -> None:
    with temporary_store_url(pg_url) as url, penstock.connect(f"{url}&lock_wait=6s") as store:
        queue = store.create_queue("q", SCHEMA)
        # A user's own session has no limit without the option; this session is not Penstock's.
        with _locked_by_hand(store) as holder:
            began = time.monotonic()
            with pytest.raises(StoreLockedError) as caught:
                queue.append([{"n": 1}])
            waited = time.monotonic() - began
            assert 5 < waited < 9
            pid = holder.info.backend_pid
            text = str(caught.value)
            assert f"session {pid} (psql, user {holder.info.user}, idle in transaction" in text
            assert f"select pg_terminate_backend({pid})" in text
            limit = re.search(r"within (\d+) s", text)
            assert limit is not None
            assert 6 <= int(limit[1]) <= round(waited), (
                "the time that was waited, of which lock_wait is the least"
            )
            assert caught.value.condition == "STORE_LOCKED"
            assert caught.value.parameters["holders"] == [pid]
        queue.append([{"n": 2}])
        assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [2]


def test_a_lock_timeout_does_not_name_another_waiter(pg_url: str) -> None:
    with temporary_store_url(pg_url) as url, penstock.connect(f"{url}&lock_wait=6s") as store:
        queue = store.create_queue("q", SCHEMA)
        found: list[StoreLockedError] = []

        def append() -> None:
            with pytest.raises(StoreLockedError) as caught:
                queue.append([{"n": 1}])
            found.append(caught.value)

        with _locked_by_hand(store) as holder:
            threads = [threading.Thread(target=append) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert [error.parameters["holders"] for error in found] == [[holder.info.backend_pid]] * 3


def test_an_append_waits_for_a_lock_that_is_released_in_time(pg_url: str) -> None:
    with temporary_store_url(pg_url) as url, penstock.connect(f"{url}&lock_wait=9s") as store:
        queue = store.create_queue("q", SCHEMA)
        with _locked_by_hand(store) as holder:
            thread = threading.Timer(4, holder.rollback)
            thread.start()
            queue.append([{"n": 1}])
            thread.join()
        assert queue.info().rows == 1


SETTINGS = {
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "8s",
    "statement_timeout": "0",
    "tcp_keepalives_idle": "10s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
    "client_connection_check_interval": "5s",
}


UNITLESS = {"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_user_timeout": "25000"}
"""These are shown as the kernel has them."""


def _shown(connection: Any) -> dict[str, str]:
    known = {row[0] for row in connection.execute("select name from pg_settings").fetchall()}
    return {name: connection.execute(f"show {name}").fetchone()[0] for name in SETTINGS if name in known}


def _expected(connection: Any) -> dict[str, str]:
    old = connection.info.server_version < 140000
    return {
        name: value
        for name, value in (SETTINGS | UNITLESS).items()
        if not (old and name.startswith("client_"))
    }


def test_sessions_have_the_documented_limits(pg_store: penstock.Store) -> None:
    for connect in (pg_store.database.open_connection, pg_store.database.long_lived_connection):
        connection = connect()
        assert _shown(connection) == _expected(connection)
        connection.close()
    page = (Path(__file__).parents[2] / "docs/how-to/postgres-settings.md").read_text()
    for name, value in SETTINGS.items():
        if name != "statement_timeout":
            assert f"| `{name}` | `{value}` |" in page


def test_settings_of_the_url_or_the_role_are_kept(pg_url: str) -> None:
    mine = "options=-c%20lock_timeout%3D7s%20-c%20tcp_keepalives_idle%3D77"
    with temporary_store_url(pg_url) as url, penstock.connect(f"{url}&{mine}") as store:
        connection = store.database.open_connection()
        shown = _shown(connection)
        role = connection.info.user
        connection.close()
        assert (shown["lock_timeout"], shown["tcp_keepalives_idle"]) == ("7s", "77")
        assert shown["idle_in_transaction_session_timeout"] == "10s"
        admin = raw_connection(store.database)
        database = admin.info.dbname
        admin.execute(f'alter role "{role}" in database "{database}" set tcp_keepalives_count = 9')
        try:
            connection = store.database.open_connection()
            assert _shown(connection)["tcp_keepalives_count"] == "9"
            connection.close()
        finally:
            admin.execute(f'alter role "{role}" in database "{database}" reset tcp_keepalives_count')
            admin.close()


def test_a_connection_is_set_up_in_one_round_trip(pg_store: penstock.Store, monkeypatch: Any) -> None:
    sent: list[Any] = []
    execute = psycopg.Connection.execute

    def noted(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        sent.append(query)
        return execute(self, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Connection, "execute", noted)
    pg_store.database.open_connection().close()
    pg_store.database.long_lived_connection().close()  # type: ignore[attr-defined]
    assert len(sent) == 2


def test_an_append_waits_for_a_stopped_writer_that_holds_the_write_lock_in_sqlite(
    tmp_path: Path, run_child: RunChild
) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    with penstock.connect(url) as store:
        queue = store.create_queue("q", SCHEMA)
        child = run_child("tests.store.programs", "stop_with_turn", url)
        _stopped(child)
        thread = threading.Thread(target=queue.append, args=([{"n": 2}],))
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(30) == 0, child.output
        thread.join(30)
        assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [1, 2]


def test_a_stopped_writer_that_holds_the_write_lock_for_too_long_is_reported_in_sqlite(
    tmp_path: Path, run_child: RunChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.database.RETRY_SECONDS", 0.2)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?busy_timeout=500") as store:
        queue = store.create_queue("q", SCHEMA)
        child = run_child("tests.store.programs", "stop_with_turn", f"sqlite:///{tmp_path}/x.db")
        _stopped(child)
        with pytest.raises(StoreLockedError) as caught:
            queue.append([{"n": 2}])
        text = str(caught.value)
        assert f"process {child.pid}" in text
        assert "is suspended" in text
        assert f"kill -CONT {child.pid}" in text
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(30) == 0, child.output
        queue.append([{"n": 3}])
        assert [row["n"] for row in queue.read(0, 0).to_pylist()] == [1, 3]


@pytest.mark.parametrize("program", ["of Penstock", "of SQLite"])
def test_a_long_wait_for_another_writer_is_logged_in_sqlite(
    program: str, tmp_path: Path, run_child: RunChild, monkeypatch: Any, caplog: Any
) -> None:
    for module in ("locks", "database"):
        monkeypatch.setattr(f"penstock.store.sqlite.{module}.SLOW_SECONDS", 0.2)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        queue = store.create_queue("q", SCHEMA)
        if program == "of Penstock":
            child = run_child("tests.store.programs", "stop_with_turn", f"sqlite:///{tmp_path}/x.db")
            _stopped(child)
            shown, end = (
                f"process {child.pid}, which is suspended",
                lambda: os.kill(child.pid, signal.SIGCONT),
            )
        else:
            other = raw_connection(store.database)
            other.execute("begin immediate")
            shown, end = "another connection of this process", other.rollback
        thread = threading.Thread(target=queue.append, args=([{"n": 2}],))
        thread.start()
        (record,) = wait_until(
            lambda: [each for each in caplog.records if each.__dict__.get("action") == "store_retry"], 10
        )
        assert shown in record.getMessage()
        end()
        thread.join(30)
        assert 2 in [row["n"] for row in queue.read(0, 0).to_pylist()]
        assert len([each for each in caplog.records if each.__dict__.get("action") == "store_retry"]) == 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("1: FLOCK  ADVISORY  WRITE 77 fe:00:{lock} 0 EOF", 77),
        ("1: -> FLOCK  ADVISORY  WRITE 77 fe:00:{lock} 0 EOF", None),
        ("1: FLOCK  ADVISORY  READ 77 fe:00:{lock} 0 EOF", None),
        ("1: FLOCK  ADVISORY  WRITE 0 fe:00:{lock} 0 EOF", None),
        ("1: FLOCK  ADVISORY  WRITE 77 fe:00:1 0 EOF", None),
        (
            (
                "1: POSIX  ADVISORY  WRITE 78 fe:00:{shm} 120 120\n2: FLOCK  ADVISORY  WRITE 77 "
                "fe:00:{lock} 0 EOF"
            ),
            78,
        ),
        (
            (
                "1: POSIX  ADVISORY  WRITE 78 fe:00:{shm} 121 121\n2: FLOCK  ADVISORY  WRITE 77 "
                "fe:00:{lock} 0 EOF"
            ),
            77,
        ),
        ("some other form", None),
        ("", None),
    ],
)
def test_the_kernels_list_of_locks_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: int | None
) -> None:
    from penstock.store.sqlite import locks

    inodes = {}
    for name in ("lock", "shm"):
        (tmp_path / f"x.db-{name}").touch()
        inodes[name] = (tmp_path / f"x.db-{name}").stat().st_ino
    (tmp_path / "locks").write_text(line.format(**inodes))
    monkeypatch.setattr(locks, "_LOCKS", tmp_path / "locks")
    assert locks.writing_process(f"{tmp_path}/x.db") == found
    monkeypatch.setattr(locks, "_LOCKS", tmp_path / "none")
    assert locks.writing_process(f"{tmp_path}/x.db") is None


def _has_own_networks() -> bool:
    words = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    return all(map(shutil.which, ("unshare", "ip"))) and subprocess.run(words, check=False).returncode == 0


@pytest.mark.soak
@pytest.mark.skipif(not _has_own_networks(), reason="this user may not create networks")
@pytest.mark.parametrize("moment", ["statement", "rows"])
def test_locks_of_a_vanished_machine_are_released_within_30_seconds(moment: str) -> None:
    """The machine vanishes while the server runs its statement, or waits for more of its rows."""
    words = ["unshare", "--net", sys.executable, "-m", "tests.store.postgres.vanished_machine", moment]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SECONDS "))
    assert 5 < float(line.split()[1]) < 31
