"""The schema of a store refuses states that Penstock does not produce."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock import Store
from tests.support.queues import SCHEMA
from tests.support.raw_sql import bytes_literal, long_text, run_sql


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("registration", "owner = {long}"),
        ("registration", "app_id = {long}"),
        ("registration", "plan = {longest}"),
        ("mark", "app_id = {long}"),
        ("mark", "source = {long}"),
        ("marked_source", "app_id = {long}"),
        ("ledger", "sink = {long}"),
        ("ledger", "app_id = {long}"),
        ("ledger", "ranges = {longest}"),
        ("ledger", "logged = {longest}"),
        ("producer", "session = {long}"),
        ("producer", "owner = {long}"),
        ("staged", "app_id = {long}"),
        ("staged", "attempt = {long}"),
        ("staged", "segments = 2"),
        ("feed_commit", "ends = {longest}"),
    ],
)
def test_the_schema_refuses_longer_texts_than_penstock_writes(store: Store, table: str, values: str) -> None:
    """Otherwise readers of many such texts would need any amount of memory."""
    queue = store.create_queue("q", SCHEMA)
    store.create_consumer("c").register("q")
    store.producer("q", "s")
    number = queue.record.queue_id
    segment_list = bytes_literal(store.database.dialect, bytes(64))
    for row in (
        "mark (source, app_id, partition, next_index) values ('s', 'a', 0, 0)",
        "marked_source (source, app_id, generation) values ('s', 'a', 0)",
        (
            "ledger (sink, app_id, batch_id, task, ranges, row_count, committed_at) "
            "values ('s', 'a', 0, -1, '', 0, 0)"
        ),
        (
            "staged (app_id, batch_id, attempt, task, ordinal, queue_id, segments, bytes, segment_list, "
            f"created_at) values ('a', 0, 't', 0, 0, {number}, 1, 1, {segment_list}, 0)"
        ),
        f"feed_commit (queue_id, version, timestamp, row_count, ends) values ({number}, 1, 1, 1, '[]')",
    ):
        run_sql(store.database, f"insert into penstock.{row}")
    long, longest = (long_text(store.database, characters) for characters in (10_000, (1 << 24) + 2))
    with pytest.raises(Exception, match=r"(?i)check constraint"):
        run_sql(store.database, f"update penstock.{table} set {values.format(long=long, longest=longest)}")


def test_triggers_and_views_in_a_file_can_call_only_functions_of_sqlite(store: Store) -> None:
    if store.database.dialect == "sqlite":
        with store.database.transaction(write=False) as tx:
            assert tx.query("pragma trusted_schema") == [(0,)]


@pytest.mark.parametrize(
    "state",
    [
        "first_index = next_index + 10",
        "first_index = -1",
        "next_index = -5",
        "next_index = 9223372036854775807",
        "last_timestamp = 9223372036854775807",
        "bytes = 9223372036854775807",
        "segments = 9223372036854775807",
        "next_index = 1099511627777",
    ],
)
def test_the_schema_refuses_a_partition_state_that_no_append_produces(store: Store, state: str) -> None:
    """A role that may append has the right to write these columns."""
    store.create_queue("q", pa.schema([("n", pa.int64())])).append([{"n": 1}])
    with pytest.raises(Exception, match=r"(?i)check constraint"):
        run_sql(store.database, f"update penstock.partition set {state}")
    assert store.queue("q").append([{"n": 2}]).rows == 1
    assert store.queue("q").read(0, 0)["n"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "state",
    [
        "registration set epoch = -1",
        "registration set generation = -1",
        "registration set vital = 77",
        "registration set draining = 9",
        "registration set plan_epoch = 5",
        "position set safe_index = -7",
        "position set next_index = 9223372036854775807",
        "producer set sequence = 9223372036854775807",
        "producer set sequence = -9",
        "producer set epoch = 0",
    ],
)
def test_the_schema_refuses_impossible_states_of_readers_and_producers(store: Store, state: str) -> None:
    queue = store.create_queue("q", pa.schema([("n", pa.int64())]))
    queue.register(store.create_consumer("c").name)
    store.producer("q", "s")
    with pytest.raises(Exception, match=r"(?i)check constraint"):
        run_sql(store.database, f"update penstock.{state}")
