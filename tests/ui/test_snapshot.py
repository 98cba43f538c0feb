"""What a snapshot contains about a store."""

from __future__ import annotations

import json
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.feeds.contract import DEAD_LETTERS
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun
from penstock.ui import queues
from penstock.ui.history import BUDGET, MOST, History, step_for
from penstock.ui.snapshots import Collector
from tests.support.raw_sql import run_sql
from tests.ui.conftest import Clock

SCHEMA = pa.schema([("id", pa.int64()), ("customer", pa.string())])
GOLDEN = Path(__file__).parents[1] / "golden" / penstock.__version__
ODD = "or'd\"ers <script>alert(1)</script> ž"


def _rows(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "customer": f"c{number}"} for number in range(count)]


def _by(found: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {each[key]: each for each in found}


def _begin(store: penstock.Store, run: QueryRun) -> None:
    store.database.run(lambda tx: queries.begin(tx, run))


def _tell(store: penstock.Store, run: QueryRun, progress: QueryProgress) -> None:
    store.database.run(lambda tx: queries.report(tx, run, progress))


def test_an_empty_store_has_an_empty_snapshot(collector: Collector, store: penstock.Store) -> None:
    found = collector.collect()
    assert found["store"] == {
        "url": store.url,
        "kind": "sqlite" if store.database.dialect == "sqlite" else "postgresql",
        "error": None,
    }
    assert found["version"] == penstock.__version__
    assert abs((datetime.fromisoformat(found["taken_at"]) - datetime.now(UTC)).total_seconds()) < 60
    for name in ("queues", "consumers", "queries", "ledger", "dead_letters", "notes"):
        assert found[name] == []


def test_a_queue_is_described_as_in_the_store(collector: Collector, store: penstock.Store) -> None:
    retention = penstock.Retention(rows=1000)
    queue = store.create_queue(ODD, SCHEMA, partitions=2, key=["customer"], retention=retention)
    queue.append(_rows(20))
    (seen,) = collector.collect()["queues"]
    info = queue.info()
    assert (seen["name"], seen["rows"], seen["bytes"], seen["key"]) == (ODD, 20, info.bytes, ["customer"])
    assert seen["keeps"] == {"rows": 1000, "age_seconds": None, "bytes": None}
    appended = max(part.last_append for part in info.partitions if part.last_append)
    assert datetime.fromisoformat(seen["last_append_at"]) <= appended
    assert 0 <= seen["oldest_seconds"] < 60
    assert [(part["first_index"], part["next_index"], part["segments"]) for part in seen["partitions"]] == [
        (part.first_index, part.next_index, part.segments) for part in info.partitions
    ]
    assert (seen["rows_per_second"], seen["bytes_per_second"], seen["history"]) == (None, None, [])


def test_rates_are_calculated_from_the_growth_between_two_snapshots(
    collector: Collector, store: penstock.Store
) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(_rows(5))
    first = datetime.fromisoformat(collector.collect()["taken_at"])
    queue.append(_rows(100))
    queue.trim(0, 5)
    found = collector.collect()
    (seen,) = found["queues"]
    seconds = (datetime.fromisoformat(found["taken_at"]) - first).total_seconds()
    assert seen["rows_per_second"] * seconds == pytest.approx(100, rel=0.1, abs=100 * 0.002 / seconds)
    assert seen["bytes_per_second"] == pytest.approx(
        seen["rows_per_second"] * seen["bytes"] / seen["rows"], rel=0.01
    )
    assert [point["rows_per_second"] for point in seen["history"]] == [seen["rows_per_second"]]
    (seen,) = collector.collect()["queues"]
    assert seen["rows_per_second"] == 0


def test_a_recreated_queue_has_no_history(collector: Collector, store: penstock.Store) -> None:
    for _ in range(2):
        store.create_queue("q", SCHEMA).append(_rows(50))
        collector.collect()
        assert collector.collect()["queues"][0]["rows_per_second"] == 0
        store.drop_queue("q")


def test_a_consumer_is_described_with_its_lag(collector: Collector, store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    billing = store.create_consumer(ODD)
    billing.register("q", vital=True)
    for partition in (0, 1):
        queue.append(_rows(10), partition=partition)
    billing.advance("q", 0, old=0, new=4)
    (seen,) = collector.collect()["consumers"]
    lag = billing.lag("q")
    assert (seen["consumer"], seen["queue"], seen["vital"]) == (ODD, "q", True)
    assert seen["lag_rows"] == lag.rows == 16
    # Of the rows, where the command line counts whole segments.
    assert 0 < seen["lag_bytes"] < lag.bytes
    assert 0 < seen["lag_seconds"] <= billing.lag("q").seconds
    assert (seen["owner"], seen["stuck"], seen["stuck_seconds"]) == (None, False, None)
    assert seen["partitions"] == [
        {"partition": 0, "offset": 4, "safe_offset": 4, "next_index": 10, "lag_rows": 6},
        {"partition": 1, "offset": 0, "safe_offset": 0, "next_index": 10, "lag_rows": 10},
    ]
    assert [point["lag_rows"] for point in seen["history"]] == [16]


def test_the_lag_in_a_merged_segment_is_that_of_the_first_waiting_row(
    store: penstock.Store, collector: Collector
) -> None:
    queue = store.create_queue("q", SCHEMA)
    consumer = store.create_consumer("c")
    consumer.register("q")
    for number in range(200):
        queue.append([{"id": number, "customer": "x"}])
    queue.maintain()
    assert queue.info().partitions[0].segments < 200
    waiting = []
    for old, new in ((0, 0), (0, 15), (15, 55)):
        consumer.advance("q", 0, old=old, new=new)
        found = collector.collect()
        behind = timedelta(seconds=found["consumers"][0]["lag_seconds"])
        waiting.append(datetime.fromisoformat(found["taken_at"]) - behind)
    first, early, late = waiting
    assert first < early < late
    indeed = datetime.now(UTC) - timedelta(seconds=consumer.lag("q").seconds)
    assert late - first > (indeed - first) / 10


def test_an_owner_is_shown_as_alive_or_dead(collector: Collector, store: penstock.Store) -> None:
    store.create_queue("q", SCHEMA)
    consumer = store.create_consumer("c")
    consumer.register("q")
    registration = consumer.registration("q")
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    assert lock.acquire()
    store.database.run(lambda tx: tx.all("own_registration", owner="o", **registration.keys))
    store.database.run(lambda tx: tx.run("bind_app", app_id="app", **registration.keys))
    owner = {"app_id": "app", "query": None, "epoch": 1, "alive": True}
    assert collector.collect()["consumers"][0]["owner"] == owner
    _begin(store, QueryRun("app", "run", ODD, "micro-batch", 5))
    assert collector.collect()["consumers"][0]["owner"] == owner | {"query": ODD}
    lock.release()
    assert collector.collect()["consumers"][0]["owner"] == owner | {"query": ODD, "alive": False}


def test_a_consumer_that_does_not_move_while_rows_wait_is_stuck_and_listed_first(
    collector: Collector, store: penstock.Store, clock: Clock
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    consumers = {name: store.create_consumer(name) for name in ("done", "moving", "one stands", "stuck")}
    for consumer in consumers.values():
        consumer.register("q")
    for partition in (0, 1):
        queue.append(_rows(10), partition=partition)
        consumers["done"].advance("q", partition, old=0, new=10)
    collector.collect()
    clock.now += 61
    for partition in (0, 1):
        consumers["moving"].advance("q", partition, old=0, new=1)
    consumers["one stands"].advance("q", 1, old=0, new=1)
    seen = collector.collect()["consumers"]
    assert [(each["consumer"], each["stuck"]) for each in seen] == [
        ("one stands", True),
        ("stuck", True),
        ("moving", False),
        ("done", False),
    ]
    assert [each["stuck_seconds"] for each in seen] == [61, 61, None, None]
    clock.now += 59
    stuck = {each["consumer"] for each in collector.collect()["consumers"] if each["stuck"]}
    assert stuck == {"one stands", "stuck"}
    for partition in (0, 1):
        consumers["stuck"].advance("q", partition, old=0, new=1)
    consumers["one stands"].advance("q", 0, old=0, new=1)
    stuck = {each["consumer"] for each in collector.collect()["consumers"] if each["stuck"]}
    assert stuck == set()


def test_a_consumer_without_waiting_rows_is_not_stuck_when_rows_arrive(
    collector: Collector, store: penstock.Store, clock: Clock
) -> None:
    queue = store.create_queue("q", SCHEMA)
    store.create_consumer("c").register("q")
    collector.collect()
    clock.now += 600
    queue.append(_rows(1))
    assert not collector.collect()["consumers"][0]["stuck"]
    clock.now += 61
    assert collector.collect()["consumers"][0]["stuck"]


def test_a_query_is_described_with_its_progress(collector: Collector, store: penstock.Store) -> None:
    run = QueryRun(
        "id", "run", ODD, "continuous", 1_000_000, "queue 'a'", "queue 'b'", "/ck", "http://127.0.0.1:4040"
    )
    _begin(store, run)
    latency = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
    _tell(store, run, QueryProgress(3, 10, 9, latency, 20.0, {"epochCommit": 2.0}, 5_000_000, 7, 8))
    (seen,) = collector.collect()["queries"]
    assert (seen["id"], seen["run_id"], seen["name"], seen["engine"]) == ("id", "run", ODD, "continuous")
    assert (seen["state"], seen["batch"], seen["unit"]) == ("running", 3, "epoch")
    assert (seen["rows_in"], seen["rows_out"], seen["rows_in_per_second"]) == (10, 9, None)
    assert (seen["latency_ms"], seen["duration_ms"]) == (latency, {"epochCommit": 2.0})
    assert (seen["watermark"], seen["started_at"]) == (
        "1970-01-01T00:00:05.000Z",
        "1970-01-01T00:00:01.000Z",
    )
    assert (seen["state_rows"], seen["state_bytes"], seen["last_error"]) == (7, 8, None)
    assert (seen["source"], seen["sink"], seen["checkpoint"]) == ("queue 'a'", "queue 'b'", "/ck")
    assert seen["spark_ui"] == "http://127.0.0.1:4040"
    (point,) = seen["history"]
    assert {
        key: point[key] for key in ("rows_in", "rows_out", "p50", "p99", "duration_ms", "state_rows")
    } == {
        "rows_in": 10,
        "rows_out": 9,
        "p50": 1.0,
        "p99": 3.0,
        "duration_ms": 20.0,
        "state_rows": 7,
    }
    _tell(store, run, QueryProgress(4, 5))
    (seen,) = collector.collect()["queries"]
    assert (seen["batch"], seen["rows_out"], seen["latency_ms"]) == (4, None, None)
    assert seen["rows_in_per_second"] > 0
    assert [each["rows_in"] for each in seen["history"]] == [10, 5]
    assert [each["rows_in"] for each in collector.collect()["queries"][0]["history"]] == [10, 5]


def test_warnings_of_a_query_are_notes_while_it_runs(collector: Collector, store: penstock.Store) -> None:
    run = QueryRun("id", "run", ODD, "micro-batch", 5)
    _begin(store, run)
    _tell(store, run, QueryProgress(1, 1, warnings=("the slot keeps 3 MiB of log", "and more")))
    notes = collector.collect()["notes"]
    assert [note.rpartition(": ")[2] for note in notes] == ["the slot keeps 3 MiB of log", "and more"]
    assert all(note.startswith(f"query {ODD}, at 20") for note in notes)
    # The next progress takes its place, and another run has told nothing yet.
    _tell(store, run, QueryProgress(2, 1))
    assert collector.collect()["notes"] == []
    _tell(store, run, QueryProgress(3, 1, warnings=("again",)))
    _begin(store, QueryRun("id", "next", ODD, "micro-batch", 6))
    assert collector.collect()["notes"] == []
    _tell(store, QueryRun("id", "next", ODD, "micro-batch", 6), QueryProgress(4, 1, warnings=("again",)))
    store.database.run(
        lambda tx: queries.end(tx, QueryRun("id", "next", ODD, "micro-batch", 6), None), idempotent=True
    )
    assert collector.collect()["notes"] == []


def _took(batch: int, duration: float) -> QueryProgress:
    return QueryProgress(batch, 10, duration=duration, durations={"triggerExecution": duration})


def test_a_micro_batch_query_is_described_with_the_duration_of_its_newest_batches(
    collector: Collector, store: penstock.Store, store_url: str
) -> None:
    run = QueryRun("id", "run", ODD, "micro-batch", 5)
    _begin(store, run)
    assert collector.collect()["queries"][0]["batch_duration_ms"] is None
    # Each number once, in no order.
    for batch in range(110):
        _tell(store, run, _took(batch, float(batch * 37 % 110 + 1)))
    newest = sorted(batch * 37 % 110 + 1 for batch in range(10, 110))
    (seen,) = collector.collect()["queries"]
    expected = {"p50": newest[49], "p90": newest[89], "p99": newest[98], "max": newest[99], "batches": 100}
    assert seen["batch_duration_ms"] == expected
    assert seen["latency_ms"] is None
    first, *_, last = seen["history"]
    assert (first["batch_p50"], first["batch_p99"], first["duration_ms"]) == (1, 1, 1)
    assert (last["batch_p50"], last["batch_p99"]) == (newest[49], newest[98])
    assert (last["p50"], last["p99"]) == (None, None)
    _tell(store, run, QueryProgress(110, 1))
    # The store has them, whoever looks.
    again = Collector(store_url)
    for each in (collector, again):
        (seen,) = each.collect()["queries"]
        assert seen["batch_duration_ms"] is None
        assert seen["history"][-1]["batch_p50"] is None
    _tell(store, run, _took(111, 1.0))
    newest = sorted([*(batch * 37 % 110 + 1 for batch in range(11, 110)), 1])
    for each in (collector, again):
        (seen,) = each.collect()["queries"]
        assert seen["batch_duration_ms"]["p50"] == newest[49]
    again.close()


def test_epochs_are_not_counted_as_micro_batches(collector: Collector, store: penstock.Store) -> None:
    batches = QueryRun("id", "1", ODD, "micro-batch", 5)
    _begin(store, batches)
    _tell(store, batches, _took(1, 700.0))
    epochs = QueryRun("id", "2", ODD, "continuous", 6)
    _begin(store, epochs)
    _tell(
        store,
        epochs,
        QueryProgress(2, 10, latency={"p50": 1.0}, duration=5.0, durations={"epochCommit": 5.0}),
    )
    (seen,) = collector.collect()["queries"]
    assert seen["latency_ms"]["p50"] == 1.0
    assert seen["batch_duration_ms"] is None
    assert [point["batch_p50"] for point in seen["history"]] == [700.0, None]
    batches = QueryRun("id", "3", ODD, "micro-batch", 7)
    _begin(store, batches)
    _tell(store, batches, _took(3, 900.0))
    (seen,) = collector.collect()["queries"]
    assert seen["batch_duration_ms"] == {
        "p50": 700.0,
        "p90": 900.0,
        "p99": 900.0,
        "max": 900.0,
        "batches": 2,
    }


def test_a_query_known_only_from_its_files_is_described_as_that(
    store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    names = ("stateless", "watermark", "continuous")
    given = shutil.copytree(GOLDEN / "sqlite/checkpoints", tmp_path / "checkpoints")
    paths = {name: given / f"{name}_sqlite" for name in names}
    # How many epochs it took depends on the machine that made the files.
    epoch = max(int(path.name) for path in (paths["continuous"] / "commits").glob("[0-9]*"))
    ranges = json.loads((paths["continuous"] / f"offsets/{epoch}").read_text().split("\n")[2])
    # Nobody can tell whether the one that writes runs, nor whether the others have ended.
    written = time.time() * 1000
    planned = paths["stateless"] / "offsets/1"
    version, _, *sources = planned.read_text().split("\n")
    about = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": int(written), "conf": {"a": "b"}})
    planned.write_text("\n".join((version, about, *sources)))
    collector = Collector(store_url, list(map(str, paths.values())))
    found = collector.collect()
    assert found["notes"] == []
    seen = {Path(each["checkpoint"]).name.partition("_")[0]: each for each in found["queries"]}
    assert {name: (each["state"], each["unit"], each["batch"]) for name, each in seen.items()} == {
        "stateless": ("files only", "batch", 1),
        "watermark": ("files only", "batch", 3),
        "continuous": ("files only", "epoch", epoch),
    }
    # The last one of `watermark` has no new rows: it lets out what the watermark has closed.
    assert {name: each["rows_in"] for name, each in seen.items()} == {
        "stateless": 60,
        "watermark": 0,
        "continuous": sum(ranges["to"]) - sum(ranges["from"]),
    }
    assert seen["watermark"]["state_bytes"] > 0
    assert {each["state_rows"] for each in seen.values()} == {None}
    moment = datetime.fromisoformat(seen["stateless"]["updated_at"]).timestamp()
    assert moment == pytest.approx(written / 1000, abs=0.01)
    # Of one that tells, the store knows better.
    _begin(store, QueryRun(seen["watermark"]["id"], "run", "totals", "micro-batch", 5))
    states = {each["id"]: each["state"] for each in collector.collect()["queries"]}
    assert states == {each["id"]: "files only" for each in seen.values()} | {
        seen["watermark"]["id"]: "running"
    }
    assert next(iter(states)) == seen["watermark"]["id"]
    collector.close()


def test_queries_are_sorted_by_state(collector: Collector, store: penstock.Store) -> None:
    for name in ("a runs", "b stops", "c fails", "d is silent"):
        run = QueryRun(name, "run", name, "micro-batch", 5)
        _begin(store, run)
        if name == "b stops":
            store.database.run(lambda tx, run=run: queries.end(tx, run, None))
        if name == "c fails":
            store.database.run(lambda tx, run=run: queries.end(tx, run, QueryError("BAD", "why")))
    schema = store.database.url.schema
    table = f"{schema}.query" if store.database.dialect == "postgres" else "penstock_query"
    run_sql(
        store.database,
        f"update {table} set reported_at = reported_at - 31000000 where query_id = 'd is silent'",
    )
    seen = collector.collect()["queries"]
    assert [(each["id"], each["state"]) for each in seen] == [
        ("c fails", "failed"),
        ("d is silent", "silent"),
        ("a runs", "running"),
        ("b stops", "stopped"),
    ]
    error = seen[0]["last_error"]
    assert (error["condition"], error["message"]) == ("BAD", "why")
    assert error["at"] == seen[0]["updated_at"]


@pytest.mark.parametrize("url", ["javascript:alert(1)", "file:///etc/passwd", "data:text/html,x"])
def test_only_http_links_are_included(collector: Collector, store: penstock.Store, url: str) -> None:
    _begin(store, QueryRun("id", "run", None, "micro-batch", 5, spark_ui=url))
    assert collector.collect()["queries"][0]["spark_ui"] is None


def test_the_newest_commits_are_listed_by_sink_and_query(collector: Collector, store: penstock.Store) -> None:
    _begin(store, QueryRun("app", "run", "large", "micro-batch", 5))

    def enter(tx: Any) -> None:
        sinks = {f"queue:{ODD}: x:77": 0, 'table:"main"."totals"': 1000}
        for sink, later in sinks.items():
            for batch in range(60):
                values = {
                    "ranges": "",
                    "logged": None,
                    "row_count": batch,
                    "now": 1_000_000 * (batch + later),
                }
                tx.run("insert_ledger", sink=sink, app_id="app", batch_id=batch, task=-1, **values)
        tx.run(
            "insert_ledger",
            sink="queue:other:1",
            app_id="z",
            batch_id=0,
            task=-1,
            ranges="",
            row_count=1,
            logged=None,
            now=2**41,
        )
        tx.run(
            "insert_ledger",
            sink="queue:other:1",
            app_id="z",
            batch_id=1,
            task=0,
            ranges="",
            row_count=1,
            logged=None,
            now=2**42,
        )

    store.database.run(enter)
    seen = collector.collect()["ledger"]
    assert len(seen) == 50
    assert (seen[0]["sink"], seen[0]["app_id"], seen[0]["query"], seen[0]["batch"]) == (
        "other",
        "z",
        None,
        0,
    )
    assert [(each["sink"], each["batch"]) for each in seen[1:]] == [
        ('"main"."totals"', batch) for batch in range(59, 10, -1)
    ]
    assert seen[1]["query"] == "large"
    assert seen[1]["rows"] == 59


def test_any_name_of_a_queue_in_the_ledger_is_shown(collector: Collector, store: penstock.Store) -> None:
    values = {
        "ranges": "",
        "logged": None,
        "row_count": 1,
        "now": 5,
        "task": -1,
        "batch_id": 0,
        "app_id": "a",
    }
    store.database.run(lambda tx: tx.run("insert_ledger", sink=f"queue:{ODD}: x:77", **values))
    assert collector.collect()["ledger"][0]["sink"] == f"{ODD}: x"


def test_dead_letters_are_listed_with_the_newest(
    collector: Collector, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_queue("plain", SCHEMA)
    queue = store.create_queue("refused", DEAD_LETTERS, partitions=2)
    place = {"topic": "t", "partition": 0, "offset": 1}
    for number in range(7):
        value = None if number == 6 else f"<b>{number}</b>" + "x" * 500
        queue.append([{"reason": f"bad {number}", "value": value, **place}], partition=number % 2)
    (seen,) = collector.collect()["dead_letters"]
    assert (seen["queue"], seen["rows"]) == ("refused", 7)
    assert [each["reason"] for each in seen["newest"]] == [f"bad {number}" for number in (6, 5, 4, 3, 2)]
    assert seen["newest"][0]["value"] is None
    assert seen["newest"][1]["value"] == ("<b>5</b>" + "x" * 500)[:200]
    assert seen["newest"][0]["at"] == seen["last_append_at"]

    def read(*_: object, **__: object) -> None:
        raise AssertionError("payloads are read again")

    monkeypatch.setattr(queues.reading, "read", read)
    assert collector.collect()["dead_letters"] == [seen]


def test_a_dead_letter_is_shown_without_secrets_in_its_reason_and_with_its_original_value(
    collector: Collector, store: penstock.Store
) -> None:
    queue = store.create_queue("refused", DEAD_LETTERS)
    place = {"topic": "t", "partition": 0, "offset": 1}
    value = '{"password": "hunter22", "token": "t0ps3cret"}'
    own = store.database.url.secrets
    reasons = [
        "postgresql://app:hunter22@db/shop does not answer",
        f"at {store.url}: token=t0ps3cret,\n  and {' '.join(own)} is wrong",
        "password = hunter22",
        # Were it cut first, a half of the password would be seen.
        "x" * 150 + " postgresql://app:" + "h" * 100 + "@db",
        "secret" * 100_000,
    ]
    for reason in reasons:
        queue.append([{"reason": reason, "value": value, **place}])
    began = time.perf_counter()
    (seen,) = collector.collect()["dead_letters"]
    assert time.perf_counter() - began < 5
    long, cut, words, two_lines, url = [each["reason"] for each in seen["newest"]]
    assert url == "postgresql://app:***@db/shop does not answer"
    assert two_lines == f"at {store.url}: token=***, and {' '.join('***' for _ in own)} is wrong".replace(
        "  ", " "
    )
    assert words == "password =***"
    assert cut == "x" * 150 + " postgresql://app:***@db"
    assert len(long) == 200
    assert {each["value"] for each in seen["newest"]} == {value}


def test_the_number_of_sql_statements_does_not_grow_with_the_store(
    collector: Collector, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.store.postgres.transaction import PostgresTransaction
    from penstock.store.sqlite.database import SqliteTransaction

    kind = SqliteTransaction if store.database.dialect == "sqlite" else PostgresTransaction
    real, asked = kind.all, []
    monkeypatch.setattr(
        kind, "all", lambda self, name, /, **more: asked.append(name) or real(self, name, **more)
    )
    counts = []
    for number in (1, 8):
        for each in range(number):
            store.create_queue(f"q{number} {each}", SCHEMA, partitions=2).append(_rows(5))
            store.create_consumer(f"c{number} {each}").register(f"q{number} {each}")
            _begin(store, QueryRun(f"{number} {each}", "run", None, "micro-batch", 5))
        asked.clear()
        collector.collect()
        counts.append(len(asked))
    assert counts[0] == counts[1] <= 14


def test_an_older_store_is_refused_and_left_unchanged(store: penstock.Store, store_url: str) -> None:
    prefix = f"{store.database.url.schema}." if store.database.dialect == "postgres" else "penstock_"
    run_sql(store.database, f"update {prefix}store set version = 2")
    with pytest.raises(penstock.errors.StoreError, match="use the Penstock that created the store") as caught:
        Collector(store_url)
    assert caught.value.condition == "STORE_TOO_OLD"
    assert run_sql(store.database, f"select version from {prefix}store") == [(2,)]


def test_a_missing_checkpoint_is_a_note(store: penstock.Store, store_url: str, tmp_path: Path) -> None:
    collector = Collector(store_url, [str(tmp_path / "nothing"), "ftp://key:hunter22@127.0.0.1:1/ck"])
    found = collector.collect()
    assert found["queries"] == []
    assert len(found["notes"]) == 2
    assert "nothing exists there" in found["notes"][0]
    assert "hunter22" not in str(found)
    collector.close()


def test_histories_are_bounded_and_thinned_out_if_there_are_many() -> None:
    history = History()
    for number in range(MOST + 101):
        history.add({"n": number})
    points = [point["n"] for point in history.every(1)]
    assert points == list(range(101, MOST + 101))
    thinned = [point["n"] for point in history.every(7)]
    assert set(thinned) <= set(points)
    assert thinned[-1] == points[-1]
    assert len(thinned) <= MOST // 7 + 2
    for count in (0, 1, 10, 50, 150):
        assert count * (MOST // step_for(count)) <= BUDGET
