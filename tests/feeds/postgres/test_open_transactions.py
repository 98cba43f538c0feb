"""Transactions that stay open on the server: because of them the slot retains the log, so the operator
of the query is warned.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

from penstock.changes.data_source import STREAM, ChangesStreamReader, read_options
from penstock.feeds.postgres import PostgresFeed
from penstock.json_text import Json
from penstock.spark.schemas import to_struct
from tests.support.commands import run_penstock
from tests.support.postgres_source import Source, open_transaction
from tests.support.waiting import wait_until


def progress(feed: PostgresFeed) -> Json:
    """What Spark learns about the feed's end."""
    given = read_options({"url": feed.url}, STREAM, "a read")
    with closing(feed.open()) as opened:
        schema = to_struct(opened.describe().schema)
    return ChangesStreamReader(given, schema).reportLatestOffset() or {}


@pytest.fixture
def table(source: Source) -> str:
    name = source.table("id int primary key, v text")
    source.make_slot()
    return name


def test_an_old_open_transaction_is_reported_with_its_age_process_and_statement(
    source: Source, table: str
) -> None:
    feed = source.feed(transaction_warning=0.2)
    assert "warnings" not in progress(feed)
    with open_transaction(source, f"INSERT INTO {table} VALUES (1, 'a secret')") as connection:
        pid = connection.info.backend_pid
        wait_until(lambda: progress(feed).get("warnings"), 20)
        (warning,) = progress(feed)["warnings"]
        for part in (f"server process {pid}", "idle in transaction", f"INSERT INTO {table}", source.name):
            assert part in warning
        assert f"pg_terminate_backend({pid})" in warning
        assert "secret" not in warning
        assert json.dumps(progress(feed))
        assert "warnings" not in progress(source.feed()), "it is not old yet"
        assert "warnings" not in progress(source.feed(transaction_warning=0))
    assert "warnings" not in progress(feed)


def test_a_read_only_transaction_retains_no_log(source: Source, table: str) -> None:
    with open_transaction(source, f"SELECT count(*) FROM {table}"):
        assert "warnings" not in progress(source.feed(transaction_warning=0.001))


def test_the_warning_is_logged_once_for_each_doubling_of_the_age(
    source: Source, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    feed = source.open(transaction_warning=0.2)
    with (
        open_transaction(source, f"INSERT INTO {table} VALUES (1)") as connection,
        caplog.at_level(logging.WARNING, "penstock.feeds"),
    ):
        pid = connection.info.backend_pid
        wait_until(lambda: feed.warnings(), 20)
        seconds = [record.seconds for record in caplog.records]  # type: ignore[attr-defined] # by extra
        for _ in range(3):
            feed.warnings()
        wait_until(lambda: len(caplog.records) > 1 or not feed.warnings(), 20)
    first, second = caplog.records[:2]
    assert (first.action, first.pid) == ("open_transaction", pid)  # type: ignore[attr-defined] # by extra
    assert second.seconds >= 2 * seconds[0]  # type: ignore[attr-defined] # by extra


def test_a_prepared_transaction_is_reported_by_its_name(source: Source, table: str) -> None:
    name = f"{source.name}'s"
    with psycopg.connect(source.url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute(f"INSERT INTO {table} VALUES (1)".encode())
        connection.execute(f"PREPARE TRANSACTION '{source.name}''s'".encode())
        try:
            feed = source.open(transaction_warning=0.2)
            wait_until(lambda: feed.warnings(), 20)
            (warning,) = feed.warnings()
        finally:
            connection.execute(f"ROLLBACK PREPARED '{source.name}''s'".encode())
    name_in_sql = f"'{source.name}''s'"
    assert f"Run commit prepared {name_in_sql} or rollback prepared {name_in_sql}" in warning
    assert name.partition("'")[0] in warning


def test_a_start_names_the_transaction_that_its_slot_waits_for(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    table = source.table("id int primary key, v text")
    feed = source.open(snapshot="initial")
    with (
        ThreadPoolExecutor() as threads,
        caplog.at_level(logging.WARNING, "penstock.feeds"),
        open_transaction(source, f"INSERT INTO {table} VALUES (1, 'a secret')") as connection,
    ):
        pid = connection.info.backend_pid
        started = threads.submit(feed.prepare)

        def waiting() -> list[logging.LogRecord]:
            # Before, it may have waited for an autovacuum.
            return [record for record in caplog.records if vars(record)["pid"] == pid]

        wait_until(waiting, 20)
        assert not started.done()
        connection.rollback()
        started.result(20)
    (record,) = waiting()
    assert vars(record)["action"] == "slot_waits"
    assert f"INSERT INTO {table}" in record.getMessage()
    assert f"pg_terminate_backend({pid})" in record.getMessage()
    assert "secret" not in record.getMessage()
    feed.close()


def test_a_role_that_may_not_see_statements_gets_the_rest_of_the_report(source: Source, table: str) -> None:
    role = f"{source.name}_reader"
    source.run(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'x'")
    source.run(f"GRANT USAGE ON SCHEMA {source.name} TO {role}", f"GRANT SELECT ON {table} TO {role}")
    info = psycopg.conninfo.conninfo_to_dict(source.url)
    url = f"postgresql://{role}:x@{info['host']}:{info['port']}/{info['dbname']}"
    try:
        feed = PostgresFeed(
            url, publication=source.name, slot=source.name, snapshot="none", transaction_warning=0.2
        )
        opened = feed.open()
        with open_transaction(source, f"INSERT INTO {table} VALUES (1)") as connection:
            assert not opened.warnings(), "since when it is open nobody has said"
            wait_until(lambda: opened.warnings(), 20)
            (warning,) = opened.warnings()
            assert f"server process {connection.info.backend_pid}" in warning
            assert "pg_read_all_stats" in warning
        opened.close()
    finally:
        source.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_the_command_line_reports_open_transactions_with_the_lag(source: Source, table: str) -> None:
    url = f"{source.url}?publication={source.name}&slot={source.name}"
    assert run_penstock("changes", "lag", url, "--json").json["open_transaction"] is None
    with open_transaction(source, f"INSERT INTO {table} VALUES (1)") as connection:
        found = run_penstock("changes", "lag", url, "--json").json["open_transaction"]
        assert (found["pid"], found["state"]) == (connection.info.backend_pid, "idle in transaction")
        assert found["seconds"] > 0
        assert found["query"] == f"INSERT INTO {table} VALUES (1)"
        assert f"server process {connection.info.backend_pid}" in run_penstock("changes", "lag", url).out
