"""Opening a store: by several processes at once, and when it cannot be opened."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import penstock
from penstock.errors import PenstockError, StoreError, StoreNotFoundError, StoreUnavailableError
from tests.store.programs import SCHEMA
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

RunChild = Callable[..., ChildProcess]


def test_processes_that_open_a_new_store_concurrently_get_the_same_one(
    store_url: str, tmp_path: Path, run_child: RunChild
) -> None:
    go = tmp_path / "go"
    children = [run_child("tests.store.programs", "open_at_once", store_url, go) for _ in range(5)]
    for child in children:
        child.wait_for_line("ready")
    go.touch()
    assert [child.wait() for child in children] == [0] * len(children), [child.output for child in children]
    uuids = {child.wait_for_line("uuid") for child in children}
    with penstock.connect(store_url, create=False) as store:
        assert uuids == {f"uuid {store.uuid}"}


def test_a_store_keeps_its_identity_when_it_is_reopened(store_url: str) -> None:
    with penstock.connect(store_url) as one, penstock.connect(store_url, create=False) as two:
        assert one.uuid == two.uuid


def _failure(url: str, **options: object) -> str:
    with pytest.raises(PenstockError) as caught:
        penstock.connect(url, **options)  # type: ignore[arg-type]
    return "".join(traceback.format_exception(caught.value))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    shown = _failure(f"sqlite:///{tmp_path}/no/such/x.db")
    assert f"{tmp_path}/no/such/x.db cannot be opened: check that its folder exists" in shown


def test_a_folder_is_not_a_store(tmp_path: Path) -> None:
    assert "cannot be opened" in _failure(f"sqlite:///{tmp_path}")


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be looked at" * 100, b"\x89PNG" * 4]
)
def test_a_file_that_is_not_a_database_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.db"
    file.write_bytes(content)
    for create in (True, False):
        assert "is not a SQLite file, or is damaged" in _failure(f"sqlite:///{file}", create=create)
    assert file.read_bytes() == content


def test_a_read_only_file_can_be_read(tmp_path: Path, run_child: RunChild) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if (
            parent != Path("/")
            and parent.stat().st_uid == os.geteuid()
            and parent.name.startswith(("pytest", "popen"))
        ):
            parent.chmod(0o755)
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?mode=0644") as store:
        store.create_queue("q", SCHEMA).append([{"n": 1}])
        (tmp_path / "x.db").chmod(0o444)
        child = run_child("tests.store.programs", "as_nobody", f"sqlite:///{tmp_path}/x.db")
        assert child.wait() == 0, child.output
    assert "rows 1" in child.output
    for what in ("append", "create"):
        assert f"{what} StoreReadOnlyError [STORE_READ_ONLY]" in child.output
    assert "check the permissions on the file and its folder" in child.output


def test_a_session_of_a_server_that_takes_no_writes_can_read(pg_url: str) -> None:
    from penstock.testing import temporary_store

    with temporary_store(pg_url) as store:
        store.create_queue("q", SCHEMA).append([{"n": 1}])
        options = "options=-c%20default_transaction_read_only%3Don"
        url = f"{pg_url}?schema={store.database.url.options['schema']}&{options}"
        with penstock.connect(url, create=False) as reader:
            assert reader.queue("q").read(0, 0).num_rows == 1
            with pytest.raises(penstock.errors.StoreReadOnlyError, match="connect to the primary") as caught:
                reader.queue("q").append([{"n": 2}])
        assert caught.value.condition == "STORE_READ_ONLY.SERVER"


def test_a_read_only_role_can_read_but_not_write(pg_url: str) -> None:
    import psycopg

    from penstock.testing.stores import drop_schema, with_schema

    url = with_schema(pg_url, "readers")
    parts = urlsplit(url)
    with penstock.connect(url) as store, psycopg.connect(pg_url, autocommit=True) as admin:
        store.create_queue("q", SCHEMA).append([{"n": 1}])
        admin.execute("create role reader login password 'pw'")
        try:
            admin.execute("grant usage on schema readers to reader")
            admin.execute("grant select on all tables in schema readers to reader")
            theirs = parts._replace(netloc=f"reader:pw@{parts.hostname}:{parts.port}").geturl()
            with penstock.connect(theirs, create=False) as limited:
                assert limited.queue("q").read(0, 0).num_rows == 1
                with pytest.raises(penstock.errors.StoreReadOnlyError, match="check its grants"):
                    limited.queue("q").append([{"n": 2}])
            admin.execute("revoke all on all tables in schema readers from reader")
            assert "STORE_READ_ONLY" in _failure(theirs)
        finally:
            admin.execute("drop owned by reader")
            admin.execute("drop role reader")
            drop_schema(pg_url, "readers")


def test_a_wrong_password_fails_without_retries_and_is_never_shown(
    pg_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = urlsplit(pg_url)
    url = parts._replace(netloc=f"penstock:s3cr3t@{parts.hostname}:{parts.port}").geturl()
    if os.environ.get("PENSTOCK_TEST_PG_URL"):
        pytest.skip("that server may trust everybody")
    began = time.monotonic()
    with caplog.at_level(logging.DEBUG):
        shown = _failure(url)
    assert time.monotonic() - began < 5
    assert "refused the login: check the user, its password or passfile, and pg_hba.conf" in shown
    assert "s3cr3t" not in shown + caplog.text


def test_a_missing_database_fails_without_retries(pg_url: str) -> None:
    began = time.monotonic()
    shown = _failure(urlsplit(pg_url)._replace(path="/nosuchdb").geturl())
    assert time.monotonic() - began < 5
    assert "[STORE_ERROR.NO_DATABASE]" in shown
    assert "nosuchdb: the server has no database with this name" in shown


def test_a_missing_server_is_retried_until_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"postgresql://me:s3cr3t@127.0.0.1:{probe.getsockname()[1]}/x"
    began = time.monotonic()
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(StoreUnavailableError, match="the server is unavailable") as caught,
    ):
        penstock.connect(url, timeout=0.3)
    assert time.monotonic() - began < 5
    assert "trying again" in caplog.text
    assert "s3cr3t" not in caplog.text + "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("query", ["sslmode=nonsense", "nosuchoption=1", "connect_timeout=x"])
def test_an_option_unknown_to_libpq_is_refused(pg_url: str, query: str) -> None:
    shown = _failure(f"{pg_url}?{query}", timeout=0)
    password = urlsplit(pg_url).password
    assert password is not None
    assert query.split("=")[0] in shown or query.split("=")[1] in shown
    assert password not in shown


def test_a_stray_percent_sign_is_refused_without_showing_the_url() -> None:
    shown = _failure("postgresql://me@host/x?options=%zz", timeout=0)
    assert "INVALID_URL" in shown or "STORE" in shown


def test_a_missing_driver_is_named_with_what_to_install(run_child: RunChild) -> None:
    child = run_child("tests.store.programs", "without_psycopg", "postgresql://host/db", fresh=True)
    assert child.wait() == 0, child.output
    assert "MissingDependencyError [MISSING_DEPENDENCY]" in child.output
    assert "pip install 'penstock-spark[postgres]'" in child.output


def test_a_closed_store_fails_without_retries(store_url: str) -> None:
    store = penstock.connect(store_url)
    queue = store.create_queue("q", SCHEMA)
    store.close()
    store.close()
    began = time.monotonic()
    with pytest.raises(StoreError, match="has been closed; connect again") as caught:
        queue.append([{"n": 1}])
    assert caught.value.condition == "STORE_CLOSED"
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("replaced", [False, True])
def test_an_open_store_whose_file_was_removed_refuses_every_call(tmp_path: Path, replaced: bool) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    with penstock.connect(url) as store:
        queue = store.create_queue("q", SCHEMA)
        queue.append([{"n": 1, "s": "a"}])
        for file in tmp_path.glob("x.db*"):
            if file.is_file():
                file.unlink()
        if replaced:
            penstock.connect(url).close()
        for use in (lambda: queue.append([{"n": 2, "s": "b"}]), lambda: queue.read(0, 0), store.queues):
            with pytest.raises(StoreNotFoundError, match="removed or replaced"):
                use()
        # A new connection neither creates the file again nor accepts another store in its place.
        store.database.pool.drain()
        with pytest.raises(StoreError):
            store.queues()
    assert (tmp_path / "x.db").exists() == replaced


def test_opening_and_closing_leaves_no_files_or_threads_behind(store_url: str) -> None:
    import threading

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with penstock.connect(store_url) as store:
        store.create_queue("q", SCHEMA, retention=penstock.Retention(rows=1000))
    before, threads = open_files(), threading.active_count()
    for _ in range(10):
        with penstock.connect(store_url, create=False) as store:
            for n in range(3):
                store.queue("q").append([{"n": n}])
            store.queue("q").read(0, 0)
    wait_until(lambda: open_files() <= before, message="all files are closed")
    assert threading.active_count() <= threads
