"""A PostgreSQL feed delivers the transactions of its tables as they were committed."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.changes import reading
from penstock.changes.options import EVER, ChangeOptions
from penstock.changes.schema import select_columns
from penstock.errors import ChangelogContractViolationError, DataLostError
from penstock.feeds.postgres import server
from penstock.spark.schemas import to_struct
from tests.support.postgres_source import (
    COLUMNS,
    DDL,
    Row,
    Source,
    apply,
    batches,
    changes,
    everything,
    long_text,
    source_at,
    state_of,
    transaction,
)
from tests.support.processes import ChildProcess


@settings(max_examples=6, suppress_health_check=list(HealthCheck), deadline=None)
@given(seed=st.integers(0, 2**32), identity=st.sampled_from(["default", "full"]), fetch=st.integers(1, 9))
def test_replaying_a_history_gives_the_table_after_every_commit(
    logical_pg_url: str, seed: int, identity: str, fetch: int
) -> None:
    chance = random.Random(seed)
    with source_at(logical_pg_url) as source, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_CHUNK_ROWS", fetch)
        patch.setattr(server, "_FETCH_ROWS", fetch)
        table = source.table(DDL)
        other = source.table("n int primary key", "other")
        source.run(
            f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
            f"ALTER TABLE {table} ALTER text SET STORAGE EXTERNAL",
        )
        source.make_slot()
        feed = source.open(tables=("t",))
        start = feed.oldest()
        states: dict[int, dict[object, Row]] = {start: {}}
        for number in range(20):
            transaction(source, [table], chance)
            source.run(f"INSERT INTO {other} VALUES ({number})")
            states[feed.newest(start)] = state_of(source, table)
        ends = sorted({start, *chance.sample(sorted(states), 5), feed.newest(start)})
        state: dict[object, Row] = {}
        for after, upto in pairwise(ends):
            found = changes(feed, after, upto)
            assert found == changes(feed, after, upto)
            assert [(c.version, c.rows) for c in feed.commits(after, upto)] == counted(found, identity)
            apply(found, COLUMNS[:2], COLUMNS, state)
            if upto in states:
                assert state == states[upto]
            if chance.random() < 0.5:
                feed.logged(upto)
        assert state == state_of(source, table)


def counted(rows: list[Row], identity: str) -> list[tuple[int, int]]:
    found: dict[int, int] = {}
    for row in rows:
        found[row["_commit_version"]] = found.get(row["_commit_version"], 0) + 1
    return list(found.items())


def test_updates_and_deletes_by_replica_identity(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.open()
    work = (
        f"INSERT INTO {table} VALUES (1, 'a')",
        f"UPDATE {table} SET v = 'b'",
        f"UPDATE {table} SET id = 2",
        f"DELETE FROM {table}",
    )
    source.run(*work, f"ALTER TABLE {table} REPLICA IDENTITY FULL", *work)
    found = [(row["_change_type"], row["id"], row["v"]) for row in everything(feed)]
    assert found == [
        ("insert", 1, "a"), ("update_postimage", 1, "b"), ("delete", 1, None), ("insert", 2, "b"),
        ("delete", 2, None),
        ("insert", 1, "a"), ("update_preimage", 1, "a"), ("update_postimage", 1, "b"), ("delete", 1, "b"),
        ("insert", 2, "b"),
        ("delete", 2, "b"),
    ]  # fmt: skip


def test_rows_of_a_table_with_full_identity_and_no_key_are_identified_by_all_columns(source: Source) -> None:
    table = source.table("a int, b text")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    source.make_slot()
    feed = source.open()
    contract = feed.describe().contract
    assert contract is not None
    assert contract.row_id == ("a", "b")
    source.run(
        f"INSERT INTO {table} VALUES (1, NULL)", f"UPDATE {table} SET b = 'x'", f"UPDATE {table} SET b = 'x'"
    )
    kinds = [row["_change_type"] for row in everything(feed)]
    assert kinds == ["insert", "delete", "insert", "update_preimage", "update_postimage"]


def test_the_index_of_a_replica_identity_is_the_key(source: Source) -> None:
    table = source.table(
        "id int primary key, code text not null unique, v int, twice int generated always as (v * 2) stored"
    )
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY USING INDEX t_code_key")
    source.make_slot()
    feed = source.open()
    description = feed.describe()
    assert description.contract is not None
    assert description.contract.row_id == ("code",)
    assert description.schema.names[:4] == ["id", "code", "v", "_commit_sequence"]
    assert [field.nullable for field in description.schema][:3] == [True, False, True]
    source.run(
        f"INSERT INTO {table} VALUES (1, 'a', 1)",
        f"UPDATE {table} SET id = 2",
        f"UPDATE {table} SET code = 'b'",
    )
    source.run(f"DELETE FROM {table}")
    found = [(row["_change_type"], row["id"], row["code"], row["v"]) for row in everything(feed)]
    assert found == [
        ("insert", 1, "a", 1), ("update_postimage", 2, "a", 1), ("delete", None, "a", None),
        ("insert", 2, "b", 1),
        ("delete", None, "b", None),
    ]  # fmt: skip


def test_commits_are_read_in_order_however_few_rows_are_requested(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    for number in range(700):
        source.run(f"INSERT INTO {table} VALUES ({number})")
    upto = feed.newest(start)
    found = list(feed.commits(start, upto, rows=1))
    assert len(found) == 700
    assert found == list(feed.commits(start, upto))
    assert found == sorted(found, key=lambda commit: commit.version)
    assert {commit.rows for commit in found} == {1}


def test_an_unchanged_long_value_is_named_or_filled_in(source: Source) -> None:
    table = source.table("id int primary key, a text, b text, n int")
    text = long_text(random.Random(1))
    source.run(*(f"ALTER TABLE {table} ALTER {name} SET STORAGE EXTERNAL" for name in "ab"))
    source.run(f"INSERT INTO {table} SELECT i, '{text}', '{text}', 0 FROM generate_series(1, 2) i")
    source.make_slot()
    feed = source.open()
    source.run(f"UPDATE {table} SET n = 1", f"UPDATE {table} SET a = 'short' WHERE id = 2")
    source.run(f"ALTER TABLE {table} REPLICA IDENTITY FULL", f"UPDATE {table} SET n = 2 WHERE id = 1")
    found = everything(feed)
    assert [(row["_unchanged"], row["a"], row["b"]) for row in found] == [
        (["a", "b"], None, None),
        (["a", "b"], None, None),
        (["b"], "short", None),
        (None, text, text),
        (None, text, text),
    ]


def test_a_commit_of_any_size_is_read_whole_and_in_batches(source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    with source.connection.transaction():
        source.run(f"INSERT INTO {table} SELECT i, repeat('x', i % 50) FROM generate_series(1, 30000) i")
        source.run(f"UPDATE {table} SET v = 'y' WHERE id <= 100")
    found = batches(feed, start, feed.newest(start))
    assert len(found) == 2
    rows = [row for batch in found for row in batch.to_pylist()]
    assert [row["_commit_sequence"] for row in rows] == list(range(30100))
    (version,) = {row["_commit_version"] for row in rows}
    assert [(c.version, c.rows) for c in feed.commits(start, feed.newest(start), rows=1)] == [
        (version, 30100)
    ]


def test_large_rows_after_small_ones_are_split_into_batches(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"ALTER TABLE {table} ALTER v SET STORAGE EXTERNAL")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    monkeypatch.setattr(server, "_CHUNK_BYTES", 50_000)
    source.run(
        f"INSERT INTO {table} SELECT i, repeat('x', CASE WHEN i > 5000 THEN 20000 END) FROM "
        "generate_series(1, 5200) i"
    )
    found = batches(feed, start, feed.newest(start))
    assert sum(batch.num_rows for batch in found) == 5200
    assert max(batch.nbytes for batch in found) < 10 * 50_000


def test_several_tables_share_one_schema(source: Source) -> None:
    one = source.table("id int, part text, v text, primary key (part, id)", "one")
    two = source.table("n uuid primary key", "two")
    source.make_slot()
    feed = source.open()
    description = feed.describe()
    assert description.contract is not None
    assert description.contract.row_id == ("_table", "_key")
    with source.connection.transaction():
        source.run(f"INSERT INTO {one} VALUES (7, E'a\"\\\\\\n', 'x')")
        source.run(f"INSERT INTO {two} VALUES ('00000000-0000-0000-0000-000000000001')")
        source.run(f"UPDATE {one} SET v = 'y'", f"DELETE FROM {two}")
    found = everything(feed)
    assert [(row["_table"], row["_change_type"], row["_commit_sequence"]) for row in found] == [
        (one, "insert", 0), (two, "insert", 1), (one, "update_postimage", 2), (two, "delete", 3),
    ]  # fmt: skip
    assert found[0]["one"] == {"id": 7, "part": 'a"\\\n', "v": "x"}
    assert found[0]["two"] is None
    assert found[1]["one"] is None
    assert found[3]["two"] == {"n": "00000000-0000-0000-0000-000000000001"}
    assert {row["_key"] for row in found} == {
        '{"id":7,"part":"a\\"\\\\\\u000a"}',
        '{"n":"00000000-0000-0000-0000-000000000001"}',
    }


def test_some_columns_in_another_order(source: Source) -> None:
    table = source.table("id int primary key, v text, w text")
    source.make_slot()
    feed = source.open()
    source.run(f"INSERT INTO {table} VALUES (1, 'v', 'w')")
    assert changes(feed, feed.oldest(), feed.newest(feed.oldest()), columns=["_change_type", "w", "id"]) == [
        {"_change_type": "insert", "w": "w", "id": 1}
    ]
    assert changes(feed, feed.oldest(), feed.newest(feed.oldest()), columns=["v"]) == [{"v": "v"}]


def test_newest_does_not_advance_without_changes_of_the_feed(source: Source) -> None:
    table = source.table("id int primary key")
    other = source.table("id int primary key", "other")
    source.run(f"CREATE TABLE {source.name}.unpublished (n int)")
    source.make_slot()
    feed = source.open(tables=(table,))
    start = feed.oldest()
    assert feed.newest(start) == start
    source.run(
        f"INSERT INTO {other} SELECT generate_series(1, 300)",
        f"INSERT INTO {source.name}.unpublished VALUES (1)",
    )
    assert feed.newest(start) == start
    source.run(f"INSERT INTO {table} VALUES (1)")
    newest = feed.newest(start)
    assert newest > start
    feed.logged(newest)
    source.run(f"INSERT INTO {other} VALUES (-1)")
    assert feed.newest(newest) == newest


def test_nothing_is_ever_committed_at_or_below_newest(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    start = after = feed.oldest()
    for number in range(30):
        source.run(f"INSERT INTO {table} VALUES ({number})")
        upto = feed.newest(after)
        assert [row["id"] for row in changes(feed, after, upto)] == [number]
        after = upto
    assert [row["id"] for row in changes(feed, start, after)] == list(range(30))


def test_a_range_ends_with_the_commit_that_it_names(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    start = after = feed.oldest()
    for number in range(5):
        source.run(f"INSERT INTO {table} SELECT {number} * 10 + i FROM generate_series(0, {number}) i")
    upto = feed.newest(start)
    for number, commit in enumerate(feed.commits(start, upto)):
        assert [row["id"] for row in changes(feed, after, commit.version - 1)] == []
        assert len(changes(feed, after, commit.version)) == commit.rows == number + 1
        assert [each.version for each in feed.commits(after, commit.version)] == [commit.version]
        after = commit.version


def test_the_slot_advances_past_much_log_without_changes(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.table("id int primary key")
    source.run(f"CREATE TABLE {source.name}.unpublished (n int)")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    monkeypatch.setattr("penstock.feeds.postgres.feed._MAX_UNCHANGED_BYTES", 100_000)
    source.run(f"INSERT INTO {source.name}.unpublished SELECT generate_series(1, 5000)")
    newest = feed.newest(start)
    assert newest > start + 100_000
    assert changes(feed, start, newest) == []
    feed.logged(newest)
    assert feed.oldest() == newest
    assert feed.lag().unconfirmed < 100_000


def test_reading_confirmed_changes_again_is_refused(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1)", f"INSERT INTO {table} VALUES (2)")
    first, second = feed.commits(start, feed.newest(start))
    feed.logged(first.version)
    feed.logged(start)
    assert feed.oldest() == first.version
    assert [row["id"] for row in everything(feed)] == [2]
    for lost in (
        lambda: feed.tasks(start, second.version, 10),
        lambda: list(feed.commits(start, second.version)),
    ):
        with pytest.raises(DataLostError, match=str(first.version)):
            lost()
    # Later commits are still read, also by a process that knew an older state.
    assert feed.newest(start) >= second.version


def test_a_running_task_detects_a_slot_that_somebody_moved(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    start = feed.oldest()
    source.run(f"INSERT INTO {table} VALUES (1)")
    tasks = feed.tasks(start, feed.newest(start), 10)
    source.run(f"SELECT pg_replication_slot_advance('{source.name}', pg_current_wal_flush_lsn())")
    with pytest.raises(DataLostError):
        list(feed.read(tasks[0], feed.describe().schema))


def test_commits_with_times_out_of_order_are_not_lost(source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    feed = source.open()
    with psycopg.connect(source.url) as first:
        # The transaction that begins first, commits last.
        first.execute(f"INSERT INTO {table} VALUES (1)".encode())
        source.run(f"INSERT INTO {table} VALUES (2)")
        upto = feed.newest(feed.oldest())
        assert [row["id"] for row in changes(feed, feed.oldest(), upto)] == [2]
    assert [row["id"] for row in everything(feed, upto)] == [1]


def test_the_feed_is_the_same_in_another_process(source: Source) -> None:
    table = source.table("id int primary key, v numeric(5, 2)")
    source.make_slot()
    feed = source.feed(tables=("t",))
    opened = feed.open()
    source.run(f"INSERT INTO {table} VALUES (1, 2.5)")
    start = opened.oldest()
    schema, upto = opened.describe().schema, opened.newest(start)
    tasks = pickle.dumps(opened.tasks(start, upto, 10))
    again = pickle.loads(pickle.dumps(feed))
    assert again == feed
    (rows,) = [batch.to_pylist() for task in pickle.loads(tasks) for batch in again.open().read(task, schema)]
    assert (rows[0]["id"], rows[0]["v"]) == (1, Decimal("2.50"))


def test_a_slot_that_retains_much_log_is_warned_about_once(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    # Far more than a checkpoint or autovacuum writes meanwhile.
    limit = 5_000_000
    feed = source.open(lag_warning=limit)
    start = feed.oldest()
    with caplog.at_level(logging.WARNING, "penstock.feeds"):
        feed.newest(start)
        assert not caplog.records
        source.run(f"INSERT INTO {table} SELECT i, repeat('x', 200) FROM generate_series(1, 30000) i")
        for _ in range(3):
            feed.newest(start)
    assert [record.action for record in caplog.records] == ["slot_lag"]  # type: ignore[attr-defined] # by extra
    assert feed.lag().retained > limit
    assert feed.lag().unconfirmed > limit


def test_net_changes_include_long_values_that_an_update_left_unchanged(source: Source) -> None:
    table = source.table("id int primary key, text text, n int")
    source.run(f"ALTER TABLE {table} ALTER text SET STORAGE EXTERNAL")
    source.make_slot()
    feed = source.open()
    long = "x" * 5000
    source.run(f"INSERT INTO {table} VALUES (1, '{long}', 0)", f"UPDATE {table} SET n = 1")
    first = feed.newest(feed.oldest())

    def net(after: int) -> list[Row]:
        upto = feed.newest(after)
        done = reading.local_changes(feed, after, upto, ChangeOptions("netChanges", False, EVER))
        return [row for part in done for row in part.to_pylist()]

    (row,) = net(feed.oldest())
    assert (row["text"], row["n"], row["_unchanged"]) == (long, 1, None)
    source.run(f"UPDATE {table} SET n = 2", f"UPDATE {table} SET n = 3")
    (row,) = net(first)
    assert (row["text"], row["n"], row["_unchanged"]) == (None, 3, ["text"])
    source.run(f"UPDATE {table} SET id = 2")
    with pytest.raises(ChangelogContractViolationError, match=r"'text'.*REPLICA IDENTITY FULL"):
        net(first)
    found = feed.describe()
    few = select_columns(to_struct(found.schema), found.contract, ["n"], case_sensitive=False)
    assert "_unchanged" in few.names


@pytest.mark.soak
def test_a_large_transaction_is_not_held_in_memory(
    source: Source, run_child: Callable[..., ChildProcess]
) -> None:
    table = source.table("id int primary key, v text")
    source.make_slot()
    source.run(f"INSERT INTO {table} SELECT i, repeat(md5(i::text), 32) FROM generate_series(1, 300000) i")
    child = run_child("tests.feeds.postgres.slot_reader", source.feed().url)
    _, rows, size, grown = child.wait_for_line("READ", 240).split()
    assert int(rows) == 300_000
    assert int(size) > 300 << 20
    assert int(grown) < 160 << 20
