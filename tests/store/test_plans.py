"""Frequent statements use indexes: they do not scan growing tables or sort logs."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.store.database import Database
from penstock.store.statements import qualify, statements
from tests.support.raw_sql import bytes_literal, numbers, raw_connection

SEGMENTS = 30_000
EMPTY = {"sqlite": "x'00'", "postgres": r"'\x00'"}
# A queue with its consumers, and one partition in a hundred with a long log: `{rows:N}` stands for the
# numbers below N.
FILL = [
    (
        "insert into penstock.queue (queue_id, name, schema, key_columns, partitions, created_at) "
        "select i + 1, 'q' || i, {empty}, '[]', 4, 0 from {rows:2000}"
    ),
    (
        "insert into penstock.partition (queue_id, partition, total, next_index) "
        "select 1 + i / 4, i % 4, 4, 1000000 from {rows:8000}"
    ),
    (f"insert into penstock.payload (payload_id, data) select i, {{empty}} from {{rows:{SEGMENTS}}}"),
    (
        "insert into penstock.segment (queue_id, partition, start_index, end_index, first_append, "
        "last_append, first_timestamp, last_timestamp, bytes, columns_id, payload_id) select 6 + i % 3, 0, "
        f"i / 3, i / 3 + 1, i, i, i, i, 100, 0, i from {{rows:{SEGMENTS}}}"
    ),
    (
        "insert into penstock.observed_end (queue_id, partition, observed_at, next_index, last_clock) "
        "select 1 + i % 2000, 0, i / 2000, i, 1 from {rows:20000}"
    ),
    "insert into penstock.consumer (name, created_at) select 'c' || i, 0 from {rows:2000}",
    (
        "insert into penstock.registration (consumer_id, queue_id, vital, generation) "
        "select 1 + i / 4, 1 + (i / 4 + i % 4 * 7) % 2000, i % 2, 1 + i from {rows:8000}"
    ),
    (
        "insert into penstock.position (consumer_id, queue_id, partition, next_index, safe_index) "
        "select consumer_id, queue_id, i, 0, 0 from penstock.registration, {rows:4}"
    ),
    (
        "insert into penstock.producer (queue_id, session, epoch, owner, sequence) "
        "select 1 + i % 2000, 's' || (i / 2000), 1, 'o', 0 from {rows:8000}"
    ),
    (
        "insert into penstock.ledger (sink, app_id, batch_id, task, ranges, row_count, committed_at) "
        "select 's' || (i % 10), 'a' || (i % 3), i / 10, i % 2 - 1, '', 0, 0 from {rows:20000}"
    ),
    (
        "insert into penstock.mark (source, app_id, partition, next_index) select 's' || (i / 4), 'a', i % "
        "4, 0 from {rows:8000}"
    ),
    (
        "insert into penstock.marked_source (source, app_id, generation) select 's' || i, 'a', 1 from "
        "{rows:2000}"
    ),
    (
        "insert into penstock.staged (app_id, batch_id, attempt, task, ordinal, queue_id, segments, "
        "bytes, segment_list, created_at) select 'a' || (i % 10), i / 1000, 't' || (i % 1000), 0, "
        "i % 7, 1 + i % 20, 1, 100, {segment_list}, i from {rows:20000}"
    ),
    (
        "insert into penstock.query (query_id, run_id, engine, state, started_at, reported_at) "
        "select 'q' || i, 'r', 'continuous', 'running', 0, i from {rows:200}"
    ),
    (
        "insert into penstock.query_progress (query_id, reported_at, run_id, batch_id, rows_in, durations) "
        "select 'q' || (i % 20), i, 'r', i, 1, '{{}}' from {rows:18000}"
    ),
    (
        "insert into penstock.segment (queue_id, partition, start_index, end_index, first_append, "
        "last_append, first_timestamp, last_timestamp, bytes, columns_id, object_id, start_byte, checksum) "
        "select 6 + i % 3, 1, i / 3, i / 3 + 1, i, i, i, i, 100, 0, i / 2, 0, 0 from {rows:20000}"
    ),
    (
        "insert into penstock.object (object_id, suffix, queue_id, size, created_at, unused_at) "
        "select i, i, i % 20, 1, 0, case when i % 100 = 0 then i end from {rows:20000}"
    ),
    (
        "insert into penstock.staged_object (object_id, app_id, batch_id, attempt, ordinal) "
        "select 10000 + i, 'a' || (i % 10), i / 1000, 't' || (i % 1000), i % 7 from {rows:5000}"
    ),
    "insert into penstock.key_home (queue_id, partitions, hashes) select 1 + i, 2, {empty} from {rows:1000}",
]
IN_QUEUE = {"queue_id": 7, "partition": 0}
IN_CONSUMER = {"consumer_id": 7, "queue_id": 8}
STAGED = {"app_id": "a3", "batch_id": 2}
LEDGER = {"sink": "s3", "app_id": "a1", "batch_id": 500}
QUERY = {"query_id": "q7", "run_id": "r", "now": 1}
Parameters = dict[str, Any]
HOT: dict[str, Parameters] = {
    "begin_query": QUERY
    | {
        "name": "x",
        "engine": "e",
        "source": "",
        "sink": "",
        "checkpoint": "",
        "spark_ui": "",
        "started_at": 1,
    },
    "report_query": QUERY | {"rows_in": 1, "rows_out": 1, "source": "", "sink": ""},
    "end_query": QUERY | {"state": "failed", "condition": "X", "message": "y"},
    "prune_query_progress": {"query_id": "q7", "most": 900, "ahead": 10**9},
    "rows_committed": {"sink": "s3", "app_id": "a1", "after": 500, "upto": 510},
    "find_queue": {"name": "q7"},
    "find_queue_by_id": {"queue_id": 7},
    "lock_queue": {"name": "q7"},
    "read_key_homes": {"queue_id": 7},
    "read_partitions": {"queue_id": 7},
    "read_partition": IN_QUEUE,
    "read_ends": {"queue_id": 7, "first": 0, "last": 1},
    "lock_partition": IN_QUEUE,
    "lock_partitions": {"queue_id": 7},
    "read_page": IN_QUEUE
    | {"start_index": 700, "end_index": 900, "max_segments": 1024, "max_bytes": 8 << 20, "with_runs": 0},
    "read_segments": IN_QUEUE | {"start_index": 700, "max_segments": 1024},
    "read_last_segments": IN_QUEUE | {"max_segments": 256},
    "segment_at": IN_QUEUE | {"row_index": 700},
    "appends_at": IN_QUEUE | {"row_index": 700},
    "read_payload": {"payload_id": 700},
    "bytes_after": IN_QUEUE | {"row_index": 9900},
    "delete_payloads_before": IN_QUEUE | {"row_index": 20},
    "delete_segments_before": IN_QUEUE | {"row_index": 20},
    "newest_observed_end": IN_QUEUE | {"now": 700, "last_clock": 1},
    "observed_end_before": IN_QUEUE | {"timestamp": 700, "last_clock": 1},
    "forget_observed_ends": IN_QUEUE | {"now": 700, "expired": 500, "last_clock": 1},
    "set_first_index": IN_QUEUE | {"first_index": 1, "bytes": 1, "segments": 1},
    "delete_segment": IN_QUEUE | {"end_index": 700},
    "delete_payload": {"payload_id": 700},
    "account_merge": IN_QUEUE | {"bytes": 1, "segments": 1},
    "find_consumer": {"name": "c7"},
    "find_registration": {"consumer": "c7", "queue": "q7"},
    "lock_registration": {"consumer": "c7", "queue": "q7"},
    "registrations_of_queue": {"queue_id": 7},
    "lock_registrations": {"queue_id": 7},
    "own_registration": IN_CONSUMER | {"owner": "o"},
    "open_plan": IN_CONSUMER | {"epoch": 1, "plan": ""},
    "other_rows": IN_QUEUE | {"last_rows": "[[1, 5], [2, null]]"},
    "row_times": IN_QUEUE | {"ends": "[[1, 5]]"},
    "close_plan": IN_CONSUMER,
    "read_positions": IN_CONSUMER,
    "advance_position": IN_CONSUMER | {"partition": 0, "old": 0, "new": 1, "safe": 0},
    "raise_safe": IN_CONSUMER | {"partition": 0, "safe_index": 1},
    "set_position": IN_CONSUMER | {"partition": 0, "next_index": 1},
    "lowest_vital": IN_QUEUE,
    "lock_producer": {"queue_id": 7, "session": "s1", "epoch": 1, "owner": "o"},
    "set_sequence": {"queue_id": 7, "session": "s1", "sequence": 1},
    "find_ledger": LEDGER | {"task": -1},
    "newest_batch": {**LEDGER, "task": 1},
    "ledger_around": LEDGER,
    "newest_ledger": {"sink": "s3", "app_id": "a1", "before": 100},
    "forget_logged": LEDGER | {"first": 480, "last": 498},
    "lock_marked_source": {"source": "s7", "app_id": "a", "generation": 1},
    "raise_marked_source": {"source": "s7", "app_id": "a", "generation": 2},
    "delete_marks": {"source": "s7"},
    "delete_sink_ledger": {"sink": "s3"},
    "prune_ledger": LEDGER | {"batch_id": 5},
    "read_marks": {"source": "s7"},
    "advance_mark": {"source": "s7", "partition": 0, "old": 0, "new": 1, "app_id": "a"},
    "find_staged": {"app_id": "a", "batch_id": 1, "queue_id": 7},
    "delete_staged_batch": STAGED | {"queue_id": 7},
    "delete_staged_from": STAGED | {"attempt": "t3", "ordinal": 0},
    "insert_object": {"object_id": 7, "suffix": 7, "queue_id": 7, "size": 1, "now": 1},
    "mark_unused": {"queue_id": 7, "now": 1, "most": 1000},
    "mark_used": {"queue_id": 7},
    "delete_unused": {"queue_id": 7, "before": 700, "most": 1000},
    "list_objects": {"queue_id": 7, "after": 700, "most": 1000},
    "runs_of": {"payload_ids": "[1, 2, 3]"},
    "used_objects": {"queue_id": 7, "first": 0, "last": 100},
    "segments_in_objects": {"queue_id": 7, "first": 0, "last": 100},
    "forget_dropped_payloads": {"queue_id": 7, "before": 700},
}
# Sorts for display of a few rows, or of the partitions of one append.
MAY_SORT = {
    "publish_segments",
    "registrations_of_queue",
    "lock_registrations",
    "read_marks",
    "newest_commits",
    "list_reported_queries",
    "progress_since",
    "newest_progress_texts",
    "registrations_most_behind",
    "outline_registrations",
    "partitions_of_queues",
    "positions_of_registrations",
    "orphaned_mark_apps",
}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A store with many rows in every table."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('plans')}/x.db?synchronous=normal"
    else:
        from penstock.testing.stores import with_schema

        url = with_schema(request.getfixturevalue("pg_url"), f"t_{uuid.uuid4().hex}")
    with penstock.connect(url) as store:
        database = store.database
        connection = raw_connection(database)
        for text in FILL:
            connection.execute(_sql(database, text))
        connection.execute("analyze")
        yield database
        if request.param == "postgres":
            connection.execute(f"drop schema {database.url.schema} cascade")
        connection.close()


# Statements that read small tables as a whole, with the aliases of these tables.
LOOKS: dict[str, tuple[Parameters, set[str]]] = {
    "outline_queues": ({"most": 100}, {"q", "penstock_queue"}),
    "partitions_of_queues": ({"queues": "[7, 8]"}, set()),
    "outline_registrations": ({"most": 100}, {"c", "penstock_registration", "a"}),
    "registrations_most_behind": ({"most": 100}, {"c", "penstock_registration", "b"}),
    "positions_of_registrations": ({"registrations": "[[7, 8], [8, 9]]"}, set()),
    "newest_commits": ({"most": 50}, {"app", "found"}),
    "list_reported_queries": ({"most": 1000}, {"main.penstock_query", "penstock_query", "Seq"}),
    "progress_since": (
        {"since": 17000, "upto": 18000, "skipped": 899, "queries": 1000},
        {"main.penstock_query", "q", "Seq"},
    ),
    "newest_progress_texts": (
        {"since": 17000, "upto": 18000, "queries": 1000},
        {"main.penstock_query", "q", "Seq"},
    ),
    "ledger_sinks": ({}, {"found"}),
    "idle_apps": ({"before": 0, "now": 1, "keep": 10, "most": 100}, {"app", "found"}),
    "orphaned_mark_apps": ({"most": 100}, {"found", "m", "Seq"}),
    "delete_orphaned_marks": ({"app_id": "a"}, {"found", "main.penstock_mark", "Seq"}),
    "delete_orphaned_sources": ({"app_id": "a"}, {"s", "Seq"}),
}


@contextmanager
def as_the_store(database: Database) -> Iterator[Any]:
    connection = database.open_connection()
    yield connection
    connection.close()


def _sql(database: Database, text: str) -> str:
    text = re.sub(r"\{rows:(\d+)\}", lambda found: numbers(database, int(found[1])), text)
    text = text.replace("{empty}", EMPTY[database.dialect])
    text = text.replace("{segment_list}", bytes_literal(database.dialect, bytes(64)))
    return qualify(text, database.dialect, database.url.schema)


@pytest.mark.parametrize("name", sorted(HOT))
def test_hot_statements_read_no_more_than_they_need(filled: Database, name: str) -> None:
    with as_the_store(filled) as connection:
        text = statements(filled.dialect, filled.url.schema)[name]
        check = _sqlite_faults if filled.dialect == "sqlite" else _postgres_faults
        assert check(connection, text, HOT[name], name) == []


@pytest.mark.parametrize("name", sorted(LOOKS))
def test_store_wide_statements_read_logs_and_ledger_by_index(filled: Database, name: str) -> None:
    parameters, small = LOOKS[name]
    with as_the_store(filled) as connection:
        text = statements(filled.dialect, filled.url.schema)[name]
        check = _sqlite_faults if filled.dialect == "sqlite" else _postgres_faults
        faults = check(connection, text, parameters, name)
        assert [each for each in faults if each.removeprefix("SCAN ").split()[0] not in small] == []


def test_an_append_of_one_segment_finds_its_partition_by_index(filled: Database) -> None:
    parameters = IN_QUEUE | {"row_count": 1, "bytes": 1, "gap": 1}
    if filled.dialect == "sqlite":
        name, check = "advance_partition", _sqlite_faults
        parameters |= {"segments": 1, "now": 1}
    else:
        name, check = "append_segment", _postgres_faults
        parameters |= {"data": b"x", "columns_id": 0, "columns": None}
    with as_the_store(filled) as connection:
        text = statements(filled.dialect, filled.url.schema)[name]
        assert check(connection, text, parameters, name) == []


ARRAYS: dict[str, Parameters] = {
    "advance_mark_all": {
        "source": "s7", "partition": [0, 1], "app_id": "a", "old": [0, 0], "new": [1, 1],
    },
    "advance_position_all": {
        "consumer_id": 7, "queue_id": 8, "partition": [0, 1], "old": [0, 0], "new": [1, 1],
        "safe": [0, 0],
    },
    "delete_payload_all": {"payload_id": [700, 701]},
    "delete_segment_all": {"queue_id": 7, "partition": 0, "end_index": [700, 701]},
    "publish_segments": {
        "queue_id": 7, "partition": [0, 1], "row_count": [1, 1], "bytes": [1, 1], "segments": [1, 1],
        "place": [1, 2], "rows_before": [0, 0], "segment_rows": [1, 1], "segment_bytes": [1, 1],
        "columns_id": [0, 0], "payload_id": [700, 701], "object_id": [], "start_byte": [], "checksum": [],
        "gap": 1,
    },
    "raise_safe_all": {
        "consumer_id": 7, "queue_id": 8, "partition": [0, 1], "safe_index": [1, 1],
    },
    "set_position_all": {
        "consumer_id": 7, "queue_id": 8, "partition": [0, 1], "next_index": [1, 1],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_statements_over_many_rows_find_each_row_by_index(filled: Database, name: str) -> None:
    if filled.dialect != "postgres":
        assert name not in statements(filled.dialect, filled.url.schema)
        return
    with as_the_store(filled) as connection:
        text = statements("postgres", filled.url.schema)[name]
        assert _postgres_faults(connection, text, ARRAYS[name], name) == []


ONE_ROW = {"CONSTANT", "penstock_store"}


def _sqlite_faults(connection: Any, text: str, parameters: Parameters, name: str) -> list[str]:
    plan = [row[3] for row in connection.execute(f"explain query plan {text}", parameters)]
    inner = {line.split()[1] for line in plan if line.startswith(("CO-ROUTINE", "MATERIALIZE"))}
    scans = [
        line
        for line in plan
        if line.startswith("SCAN")
        and "VIRTUAL TABLE" not in line
        and line.split()[1].removeprefix("main.") not in inner | ONE_ROW
    ]
    sorts = [line for line in plan if "TEMP B-TREE" in line and name not in MAY_SORT]
    return scans + sorts


def _postgres_faults(connection: Any, text: str, parameters: Parameters, name: str) -> list[str]:
    with connection.transaction(force_rollback=True):
        plan = connection.execute(f"explain (format json) {text}", parameters).fetchone()[0]
    plan = json.loads(plan) if isinstance(plan, str) else plan
    return list(_faulty(plan[0]["Plan"], name))


def _faulty(node: Parameters, name: str) -> Iterator[str]:
    kind = node["Node Type"]
    if kind == "Seq Scan" or (kind in ("Sort", "Incremental Sort") and name not in MAY_SORT):
        yield f"{kind} {node.get('Relation Name', '')}{node.get('Sort Key', '')}"
    for child in node.get("Plans", []):
        yield from _faulty(child, name)


def test_the_check_detects_a_scan_and_a_sort(filled: Database) -> None:
    text = qualify(
        "select * from penstock.segment where bytes = 5 order by payload_id",
        filled.dialect,
        filled.url.schema,
    )
    check = _sqlite_faults if filled.dialect == "sqlite" else _postgres_faults
    with as_the_store(filled) as connection:
        assert len(check(connection, text, {}, "bad")) == 2


def test_every_statement_on_a_log_is_listed() -> None:
    """Add each new statement on a log to the list above, or name it here as one that inserts."""
    listed = set(HOT) | set(LOOKS) | set(ARRAYS) | {"append_segment"}
    for dialect in ("sqlite", "postgres"):
        for name, text in statements(dialect, "x").items():
            in_log = re.search(r"\b(from|update|join) x\.(penstock_)?(segment|payload|position)\b", text)
            if in_log and not name.startswith(("delete_queue", "insert_")):
                assert name in listed, name


def test_reading_a_page_does_not_read_the_rows_after_it(tmp_path: Path) -> None:
    """A good plan may still do too much work, so this counts the steps of SQLite's virtual machine."""
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        connection = raw_connection(store.database)
        for text in FILL[:4]:
            connection.execute(_sql(store.database, text))
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        text = statements("sqlite", store.database.url.schema)["read_page"]
        connection.set_progress_handler(step, 1)
        rows = connection.execute(text, HOT["read_page"] | {"end_index": 705}).fetchall()
        connection.close()
        assert len(rows) == 5
        assert steps < 1000
