"""Staged rows and the transaction that publishes them, without Spark."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import penstock
from penstock.errors import CommitRefusedError
from penstock.store.database import Transaction
from penstock.store.postgres import staging_relations
from penstock.store.url import parse_url
from penstock.tables.row_encoding import database_schema
from penstock.tables.sql import upsert
from penstock.tables.sql.staging import PostgresStage, SegmentStage, drop_earlier_attempts
from penstock.tables.sql.writer import TableTarget
from tests.support.sql_tables import query, sql_name
from tests.support.waiting import wait_until
from tests.tables.targets import SHAPED, Table


@pytest.fixture
def table(store: penstock.Store, store_url: str) -> Table:
    return Table(store, store_url)


def test_only_acknowledged_attempts_are_published(table: Table) -> None:
    stage = table.stage()
    first, second = table.put(stage, ("a", 1)), table.put(stage, ("b", 2))
    table.put(stage, ("a", 100))
    assert table.write(stage, "append", first | second) == 2
    assert table.rows() == [("a", 1), ("b", 2)]


def test_a_reader_sees_the_old_table_until_the_commit_and_does_not_wait(table: Table) -> None:
    stage = table.stage()
    table.write(stage, "append", table.put(stage, ("a", 1), ("b", 2)))
    stage = table.stage(batch_id=1)
    attempts = table.put(stage, ("c", 3))
    target = TableTarget(table.layout, "t", "complete", stage)
    with table.database.transaction() as tx:
        target.write(tx, attempts)
        assert table.rows() == [("a", 1), ("b", 2)]
    assert table.rows() == [("c", 3)]


def test_a_later_attempt_drops_the_rows_staged_by_an_earlier_one_whose_driver_is_refused(
    table: Table,
) -> None:
    slow = table.stage()
    staged = table.put(slow, ("a", 1))
    again = table.stage()
    table.write(again, "update", table.put(again, ("a", 2)))
    with pytest.raises(CommitRefusedError, match=r"STAGING_LOST\].*dropped by another run"):
        table.write(slow, "update", staged)
    assert table.rows() == [("a", 2)]


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_segments_that_are_staged_while_others_are_published_are_left_to_the_next_run(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended driver's tasks stage them. Locked here, they would be locked after those of this epoch, and
    the next run locks them in another order.
    """
    stage = SegmentStage.of(table.layout, database_schema(SHAPED, "postgres"), "app", 0)
    attempts, insert = table.put(stage, ("a", 1)), upsert.insert

    def late(*given: Any) -> int:
        table.put(stage, ("b", 2))
        return insert(*given)

    monkeypatch.setattr(upsert, "insert", late)
    assert table.write(stage, "append", attempts) == 1
    left = table.database.run(lambda tx: tx.all("staged_apps"))
    assert [(row.app_id, row.segments) for row in left] == [("app", 1)]
    drop_earlier_attempts(table.database, stage.sink, "app")
    assert table.database.run(lambda tx: tx.all("staged_apps")) == []


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_key_that_another_transaction_inserts_at_the_same_time_is_updated(table: Table) -> None:
    stage = table.stage()
    attempts = table.put(stage, ("a", 2), ("b", 2))
    parsed = parse_url(table.url)
    waiting = (
        "select count(*) from pg_stat_activity "
        f"where wait_event_type = 'Lock' and query like '%{parsed.schema}%'"
    )
    with psycopg.connect(parsed.target) as other:
        other.execute(f"insert into {sql_name(table.url, 't')} values ('a', 1)")
        writing = threading.Thread(target=table.write, args=(stage, "update", attempts))
        writing.start()
        wait_until(lambda: query(table.url, waiting)[0][0] == 1)
        other.commit()
    writing.join()
    assert table.rows() == [("a", 2), ("b", 2)]


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("kind", ['text collate "C"', "varchar(5)"])
def test_the_unique_index_of_the_table_decides_which_keys_are_equal(
    store: penstock.Store, store_url: str, kind: str
) -> None:
    query(store_url, f"create table {sql_name(store_url, 't')} (k {kind} primary key, v bigint)")
    table = Table(store, store_url)
    for batch_id in range(2):
        stage = table.stage(batch_id=batch_id)
        table.write(stage, "update", table.put(stage, ("a", batch_id), ("ä", batch_id)))
    assert table.rows() == [("a", 1), ("ä", 1)]


def test_a_commit_is_refused_whole_if_its_staged_rows_were_cleaned_up(table: Table) -> None:
    stage = table.stage()
    staged = table.put(stage, ("a", 1))
    assert table.store.clean_up(timedelta(days=1)) == 0
    assert table.store.clean_up(timedelta(seconds=-1)) == 1
    with pytest.raises(CommitRefusedError, match="repeats the micro-batch"):
        table.write(stage, "append", staged)
    assert table.rows() == []


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_staged_rows_lost_in_a_server_crash_are_detected(table: Table) -> None:
    """It empties unlogged relations."""
    stage = table.stage()
    staged = table.put(stage, ("a", 1))
    assert isinstance(stage, PostgresStage)
    query(table.url, f"truncate {sql_name(table.url, stage.relation)}")
    for mode in ("append", "update", "complete"):
        with pytest.raises(CommitRefusedError, match=r"STAGING_LOST\].*lost them in a crash"):
            table.write(stage, mode, staged)


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_long_micro_batch_notes_that_its_relation_is_in_use(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = table.stage()
    assert isinstance(stage, PostgresStage)
    before = _used_at(table)
    table.put(stage, ("a", 1))
    assert _used_at(table) == before
    monkeypatch.setattr(time, "time", lambda: stage.opened_at + 3_600)
    table.put(stage, ("a", 1))
    assert _used_at(table) > before


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_relations_of_a_query_that_has_just_staged_rows_are_kept(table: Table) -> None:
    def create(sink: str, app_id: str, used_at: int) -> str:
        def work(tx: Transaction) -> str:
            name = staging_relations.create(tx, ["c0 bigint"], sink=sink, app_id=app_id)
            about = json.dumps({"sink": sink, "app_id": app_id, "used_at": tx.now() + used_at})
            tx.execute(f"comment on table {staging_relations.qualified(tx, name)} is '{about}'")
            return name

        return table.database.run(work)

    kept = {create("t", "running", 0), create("u", "running", -90_000_000_000)}
    create("t", "dead", -90_000_000_000)
    assert table.store.clean_up() == 1
    assert {each.name for each in table.database.run(staging_relations.list_relations, write=False)} == kept


def _used_at(table: Table) -> int:
    (relation,) = table.database.run(staging_relations.list_relations, write=False)
    return relation.used_at


def test_a_table_may_consist_of_keys_only(store: penstock.Store, store_url: str) -> None:
    table = Table(store, store_url, keys=("k", "v"))
    for batch_id, found in enumerate([[("a", 1)], [("a", 1), ("a", 2)]]):
        stage = table.stage(batch_id=batch_id)
        table.write(stage, "update", table.put(stage, *found, *found))
        assert table.rows() == found


def test_complete_recreates_a_dropped_table(table: Table) -> None:
    query(table.url, f"drop table {sql_name(table.url, 't')}")
    stage = table.stage()
    table.write(stage, "complete", table.put(stage, ("a", 1)))
    assert table.rows() == [("a", 1)]


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_relation_that_a_task_still_writes_is_left_to_the_next_attempt(table: Table) -> None:
    slow = table.stage()
    assert isinstance(slow, PostgresStage)
    with table.database.transaction() as tx:
        tx.execute(f"insert into {sql_name(table.url, slow.relation)} values (1, 'a', 1)")
        stage = table.stage()
        table.write(stage, "append", table.put(stage, ("b", 2)))
    stage = table.stage(batch_id=1)
    left = "select count(*) from pg_class where relname like 'staged_rows_%' and relkind = 'r'"
    assert query(table.url, left) == [(1,)], "its own"
    table.write(stage, "append", table.put(stage, ("c", 3)))
    assert (query(table.url, left), table.rows()) == ([(0,)], [("b", 2), ("c", 3)])


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_two_writers_that_replace_all_rows_are_serialized(table: Table) -> None:
    stages = {app: table.stage(app) for app in ("one", "two")}
    staged = {app: table.put(stage, (app, 1), (f"{app} too", 2)) for app, stage in stages.items()}
    first = TableTarget(table.layout, "t", "complete", stages["one"])
    second = threading.Thread(target=lambda: table.write(stages["two"], "complete", staged["two"]))
    with table.database.transaction() as tx:
        first.write(tx, staged["one"])
        second.start()
        waiting = (
            "select count(*) from pg_locks where not granted and relation = "
            f"'{sql_name(table.url, 't')}'::regclass"
        )
        wait_until(lambda: query(table.url, waiting) == [(1,)], 30, "the second one waits")
    second.join(30)
    assert table.rows() == [("two too", 2), ("two", 1)]
