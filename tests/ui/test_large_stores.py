"""What the page, the metrics and the lists need for very many records, and what they show of them.

Whoever may write to a store can write any number of records with long texts, so all of it has limits. An
ordinary store reaches none of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.store.database import Database
from penstock.store.records import queries
from penstock.store.records.queries import QueryProgress, QueryRun
from penstock.store.statements import qualify
from penstock.ui import reading
from penstock.ui.history import MAX_POINTS, MIN_POINTS, History, step_for
from penstock.ui.metrics import exposition
from penstock.ui.snapshots import Collector, EncodedSnapshot
from tests.support.commands import run_penstock
from tests.support.raw_sql import long_text, numbers, raw_connection

SCHEMA = pa.schema([("id", pa.int64())])
KINDS = ("queues", "consumers", "queries")
SECOND = 1_000_000
RUN = QueryRun("id", "run", "totals", "micro-batch", 5)


@pytest.fixture
def collector(store: penstock.Store, store_url: str) -> Iterator[Collector]:
    found = Collector(store_url)
    yield found
    found.close()


def write(database: Database, text: str, rows: int = 1) -> None:
    """Execute SQL text, in which ``{rows}`` stands for a table of numbers and ``{text}`` for a long text."""
    text = text.replace("{rows}", numbers(database, rows)).replace("{text}", long_text(database, 2000))
    connection = raw_connection(database)
    connection.execute(qualify(text, database.dialect, database.url.schema))
    connection.close()


def begin(store: penstock.Store, run: QueryRun) -> None:
    store.database.run(lambda tx: queries.begin(tx, run))


def report(store: penstock.Store, run: QueryRun, progress: QueryProgress) -> None:
    store.database.run(lambda tx: queries.report(tx, run, progress))


def insert_reports(store: penstock.Store, rows: int, durations: str, warnings: str = "null") -> None:
    """Write reports of all queries without pruning: the newest is that of batch 0, a second ago."""
    now = store.database.run(lambda tx: tx.now(), write=False)
    write(
        store.database,
        "insert into penstock.query_progress "
        "(query_id, reported_at, run_id, batch_id, rows_in, duration, durations, warnings) "
        f"select q.query_id, {now} - cast(i + 1 as bigint) * {SECOND}, q.run_id, i, 7, 20 + i, "
        f"{durations}, {warnings} from penstock.query as q cross join {{rows}}",
        rows,
    )


def insert_consumers(store: penstock.Store, consumers: int, name: str) -> None:
    """Write consumers with one offset each, on the queue ``q``."""
    database = store.database
    text = f"insert into penstock.consumer (name, created_at) select {name}, 1 from {{rows}}"
    write(database, text, consumers)
    text = (
        "insert into penstock.registration (consumer_id, queue_id, vital, generation, app_id) "
        "select c.consumer_id, q.queue_id, 0, 1, c.name "
        "from penstock.consumer as c cross join penstock.queue as q where q.name = 'q'"
    )
    write(database, text)
    text = (
        "insert into penstock.position (consumer_id, queue_id, partition, next_index, safe_index) "
        "select consumer_id, queue_id, 0, 0, 0 from penstock.registration"
    )
    write(database, text)


def samples(snapshot: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """The values of the metrics by name and labels."""
    families = text_string_to_metric_families(exposition(snapshot).decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


MEASURED = """
import sys
from pathlib import Path

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10

from penstock.cli import main
from penstock.ui.metrics import exposition
from penstock.ui.snapshots import Collector, EncodedSnapshot
what, url = sys.argv[1:]
collector = Collector(url)
main(["queue", "list", "--url", url])
before = peak()
if what == "page":
    for _ in range(2):
        snapshot = collector.collect()
        EncodedSnapshot.of(snapshot)
        exposition(snapshot)
    assert snapshot["store"]["error"] is None
else:
    main([*what.split(), "--url", url])
print(peak() - before, file=sys.stderr)
"""


def memory_of(what: str, url: str) -> int:
    """The bytes that a process of its own needs at most for the page, or for a command."""
    command = [sys.executable, "-c", MEASURED, what, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return int(done.stderr.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc reports the most memory that was used")
@pytest.mark.soak
def test_the_memory_for_the_reports_of_a_query_does_not_grow_with_them(
    store: penstock.Store, store_url: str
) -> None:
    """80 MB of texts in 20,000 reports."""
    begin(store, RUN)
    insert_reports(store, 20_000, "{text}", "{text}")
    for what in ("page", "query list", "query list --json"):
        assert memory_of(what, store_url) < 24 << 20, what


@pytest.mark.skipif(sys.platform != "linux", reason="/proc reports the most memory that was used")
@pytest.mark.soak
def test_the_memory_for_all_queries_is_bounded(store: penstock.Store, store_url: str) -> None:
    """1,200 queries with long names and texts, and 200 reports each."""
    write(
        store.database,
        "insert into penstock.query (query_id, run_id, name, engine, state, source, sink, started_at, "
        "reported_at) select 'q' || i, 'r', {text}, {text}, 'running', {text}, {text}, 1, 1 + i from {rows}",
        1200,
    )
    insert_reports(store, 200, """'{"triggerExecution": 20}'""")
    assert memory_of("page", store_url) < 320 << 20


def test_of_very_many_reports_the_newest_are_shown(collector: Collector, store: penstock.Store) -> None:
    begin(store, RUN)
    insert_reports(store, 2000, """'{"triggerExecution": ' || (20 + i) || ', "addBatch": 5}'""")
    (query,) = collector.collect()["queries"]
    assert (query["batch"], query["duration_ms"]) == (0, {"triggerExecution": 20, "addBatch": 5})
    assert [point["duration_ms"] for point in query["history"]] == list(range(20 + MAX_POINTS - 1, 19, -1))
    expected = {"p50": 69, "p90": 109, "p99": 118, "max": 119, "batches": 100}
    assert query["batch_duration_ms"] == expected
    # What is reported from now on follows.
    report(store, RUN, QueryProgress(3000, 5, duration=1.0, durations={"triggerExecution": 1.0}))
    (query,) = collector.collect()["queries"]
    assert (query["batch"], query["duration_ms"]) == (3000, {"triggerExecution": 1.0})
    assert [point["duration_ms"] for point in query["history"]][-2:] == [20, 1]
    assert len(query["history"]) == MAX_POINTS
    assert query["batch_duration_ms"]["p50"] == 68
    (again,) = collector.collect()["queries"]
    assert again["history"] == query["history"]
    assert again["duration_ms"] == query["duration_ms"]


def test_reports_dated_in_the_future_do_not_crowd_out_the_others(
    collector: Collector, store: penstock.Store
) -> None:
    begin(store, RUN)
    insert_reports(store, 1000, "'{}'")
    day = 86_400 * SECOND
    write(store.database, f"update penstock.query_progress set reported_at = reported_at + {day}")
    report(store, RUN, QueryProgress(5, 1, durations={"addBatch": 1.0}, warnings=("slow",)))
    snapshot = collector.collect()
    (query,) = snapshot["queries"]
    assert (query["batch"], query["duration_ms"], len(query["history"])) == (5, {"addBatch": 1.0}, 1)
    assert [note.rpartition(": ")[2] for note in snapshot["notes"]] == ["slow"]


def test_with_many_queries_fewer_reports_of_each_are_read_at_once(
    collector: Collector, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_REPORTS", 300)
    for number in range(2):
        begin(store, QueryRun(f"{number}", "run", None, "micro-batch", 5))
    insert_reports(store, 200, "'{}'")
    assert [len(query["history"]) for query in collector.collect()["queries"]] == [150, 150]
    for number in range(2, 5):
        begin(store, QueryRun(f"{number}", "run", None, "micro-batch", 5))
    state = store.database.run(lambda tx: reading.read_queries(tx, 0), write=False)
    # The percentiles of micro-batches need so many.
    assert len(state.progress) == 200


def test_a_history_keeps_no_points_that_are_not_shown() -> None:
    history = History()
    for number in range(10 * MAX_POINTS):
        history.add({"n": number})
        if number % 10 == 0:
            shown = history.every_nth(step_for(100_000))
    assert len(history.points) <= len(shown) + 10
    assert MIN_POINTS - 5 <= len(shown) <= MIN_POINTS + 1
    # A smaller step shows what is left.
    assert [point["n"] for point in history.every_nth(2)][-1] == 10 * MAX_POINTS - 1


def test_only_the_consumers_that_are_most_behind_are_shown_if_there_are_too_many(
    collector: Collector, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_CONSUMERS", 2)
    queue = store.create_queue("q", SCHEMA, partitions=2)
    for partition in (0, 1):
        queue.append([{"id": number} for number in range(10)], partition=partition)
    for name, offset in (("a", 9), ("b", 2), ("c", 10), ("d", 1)):
        consumer = store.create_consumer(name)
        consumer.register("q")
        consumer.advance("q", 1, old=0, new=offset)
    snapshot = collector.collect()
    assert {row["consumer"]: row["lag_rows"] for row in snapshot["consumers"]} == {"b": 18, "d": 19}
    assert snapshot["left_out"] == {"queues": 0, "consumers": 2, "queries": 0}
    (note,) = snapshot["notes"]
    assert note == (
        "consumers that are not shown: 2. The page shows the 2,000 that are most behind, with 100,000 "
        "partitions at most"
    )
    values = samples(snapshot)
    assert [values["penstock_left_out_records", kind] for kind in KINDS] == [0, 2, 0]
    assert values["penstock_consumer_lag_rows", "b", "q"] == 18


def test_only_the_first_queues_are_shown_if_there_are_too_many(
    collector: Collector, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_QUEUES", 2)
    for name in ("b", "c", "a"):
        store.create_queue(name, SCHEMA).append([{"id": 1}])
    store.create_consumer("x").register("c")
    snapshot = collector.collect()
    assert [(queue["name"], queue["rows"]) for queue in snapshot["queues"]] == [("a", 1), ("b", 1)]
    # Its consumers are shown all the same.
    assert [(row["queue"], row["lag_rows"]) for row in snapshot["consumers"]] == [("c", 1)]
    assert snapshot["left_out"] == {"queues": 1, "consumers": 0, "queries": 0}
    assert samples(snapshot)["penstock_left_out_records", "queues"] == 1


def test_only_the_queries_that_have_reported_last_are_shown_if_there_are_too_many(
    collector: Collector, store: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_QUERIES", 2)
    for name in ("b", "c", "a"):
        run = QueryRun(name, "run", name, "continuous", 5)
        begin(store, run)
        report(store, run, QueryProgress(1, 1))
    snapshot = collector.collect()
    assert [query["name"] for query in snapshot["queries"]] == ["a", "c"]
    assert snapshot["left_out"] == {"queues": 0, "consumers": 0, "queries": 1}
    listed = run_penstock("query", "list", "--url", store_url)
    assert len(listed.out.splitlines()) == 3
    assert "queries that are not listed: 1. The list has those that have reported last" in listed.err


def test_a_queue_with_too_many_partitions_hides_only_itself(
    collector: Collector, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_PARTITIONS", 5)
    for name, partitions in (("a", 2), ("b", 6), ("c", 3)):
        store.create_queue(name, SCHEMA, partitions=partitions)
        store.create_consumer(name).register(name)
    snapshot = collector.collect()
    assert [queue["name"] for queue in snapshot["queues"]] == ["a", "c"]
    assert [len(queue["partitions"]) for queue in snapshot["queues"]] == [2, 3]
    assert [row["queue"] for row in snapshot["consumers"]] == ["a", "c"]
    assert snapshot["left_out"] == {"queues": 1, "consumers": 1, "queries": 0}


def test_a_big_installation_is_shown_as_a_whole(collector: Collector, store: penstock.Store) -> None:
    """1,000 queues, 2,000 consumers and 500 queries."""
    store.create_queue("q", SCHEMA).append([{"id": 1}])
    copy = (
        "insert into penstock.queue (queue_id, name, schema, key_columns, partitions, created_at) "
        "select i + 1, 'q' || i, q.schema, '[]', 4, 1 from penstock.queue as q cross join {rows}"
    )
    write(store.database, copy, 999)
    partitions = "insert into penstock.partition (queue_id, partition, total) "
    write(store.database, partitions + "select 1 + i / 4, i % 4, 4 from {rows}", 3996)
    insert_consumers(store, 2000, "'consumer-' || i")
    insert = "insert into penstock.query (query_id, run_id, engine, state, started_at, reported_at) "
    write(
        store.database, insert + "select 'q' || i, 'r', 'micro-batch', 'running', 1, 1 + i from {rows}", 500
    )
    insert_reports(store, 120, """'{"triggerExecution": 20}'""")
    snapshot = collector.collect()
    assert [len(snapshot[kind]) for kind in KINDS] == [1000, 2000, 500]
    assert snapshot["left_out"] == dict.fromkeys(KINDS, 0)
    assert (snapshot["notes"], snapshot["unreadable"]) == ([], 0)
    assert {row["lag_rows"] for row in snapshot["consumers"]} == {1}
    assert {query["batch_duration_ms"]["batches"] for query in snapshot["queries"]} == {100}
    assert len(EncodedSnapshot.of(snapshot).text) < 5_000_000
    assert len(samples(snapshot)) > 1000 * 5 + 2000 * 5 + 500 * 10


def test_very_many_consumers_with_long_names_give_bounded_answers(
    collector: Collector, store: penstock.Store
) -> None:
    store.create_queue("q", SCHEMA).append([{"id": 1}])
    insert_consumers(store, 20_000, "i || {text}")
    for _ in range(2):
        snapshot = collector.collect()
    assert snapshot["left_out"] == {"queues": 0, "consumers": 18_000, "queries": 0}
    assert len(EncodedSnapshot.of(snapshot).text) < 4_000_000
    assert len(exposition(snapshot)) < 5_000_000


def test_the_warnings_of_very_many_queries_are_counted(collector: Collector, store: penstock.Store) -> None:
    for number in range(15):
        run = QueryRun(f"{number}", "run", f"{number}", "micro-batch", 5)
        begin(store, run)
        report(store, run, QueryProgress(1, 1, warnings=tuple(map(str, range(10)))))
    notes = collector.collect()["notes"]
    assert len(notes) == 101
    assert notes[-1] == "50 more warnings of queries"
