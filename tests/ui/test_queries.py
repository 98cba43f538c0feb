"""What a snapshot says about queries."""

from __future__ import annotations

import json
import shutil
import time
from datetime import datetime
from pathlib import Path

import pytest

import penstock
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun
from penstock.ui.snapshots import Collector
from tests.support.raw_sql import run_sql
from tests.ui.filled import ODD, begin, tell

GOLDEN = Path(__file__).parents[1] / "golden" / penstock.__version__


def test_a_query_is_described_with_its_progress(collector: Collector, store: penstock.Store) -> None:
    run = QueryRun(
        "id", "run", ODD, "continuous", 1_000_000, "queue 'a'", "queue 'b'", "/ck", "http://127.0.0.1:4040"
    )
    begin(store, run)
    latency = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
    tell(store, run, QueryProgress(3, 10, 9, latency, 20.0, {"epochCommit": 2.0}, 5_000_000, 7, 8))
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
    tell(store, run, QueryProgress(4, 5))
    (seen,) = collector.collect()["queries"]
    assert (seen["batch"], seen["rows_out"], seen["latency_ms"]) == (4, None, None)
    assert seen["rows_in_per_second"] > 0
    assert [each["rows_in"] for each in seen["history"]] == [10, 5]
    assert [each["rows_in"] for each in collector.collect()["queries"][0]["history"]] == [10, 5]


def test_warnings_of_a_query_are_notes_while_it_runs(collector: Collector, store: penstock.Store) -> None:
    run = QueryRun("id", "run", ODD, "micro-batch", 5)
    begin(store, run)
    tell(store, run, QueryProgress(1, 1, warnings=("the slot keeps 3 MiB of log", "and more")))
    notes = collector.collect()["notes"]
    assert [note.rpartition(": ")[2] for note in notes] == ["the slot keeps 3 MiB of log", "and more"]
    assert all(note.startswith(f"query {ODD}, at 20") for note in notes)
    # The next progress takes its place, and another run has told nothing yet.
    tell(store, run, QueryProgress(2, 1))
    assert collector.collect()["notes"] == []
    tell(store, run, QueryProgress(3, 1, warnings=("again",)))
    begin(store, QueryRun("id", "next", ODD, "micro-batch", 6))
    assert collector.collect()["notes"] == []
    tell(store, QueryRun("id", "next", ODD, "micro-batch", 6), QueryProgress(4, 1, warnings=("again",)))
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
    begin(store, run)
    assert collector.collect()["queries"][0]["batch_duration_ms"] is None
    # Each number once, in no order.
    for batch in range(110):
        tell(store, run, _took(batch, float(batch * 37 % 110 + 1)))
    newest = sorted(batch * 37 % 110 + 1 for batch in range(10, 110))
    (seen,) = collector.collect()["queries"]
    expected = {"p50": newest[49], "p90": newest[89], "p99": newest[98], "max": newest[99], "batches": 100}
    assert seen["batch_duration_ms"] == expected
    assert seen["latency_ms"] is None
    first, *_, last = seen["history"]
    assert (first["batch_p50"], first["batch_p99"], first["duration_ms"]) == (1, 1, 1)
    assert (last["batch_p50"], last["batch_p99"]) == (newest[49], newest[98])
    assert (last["p50"], last["p99"]) == (None, None)
    tell(store, run, QueryProgress(110, 1))
    # The store has them, whoever looks.
    again = Collector(store_url)
    for each in (collector, again):
        (seen,) = each.collect()["queries"]
        assert seen["batch_duration_ms"] is None
        assert seen["history"][-1]["batch_p50"] is None
    tell(store, run, _took(111, 1.0))
    newest = sorted([*(batch * 37 % 110 + 1 for batch in range(11, 110)), 1])
    for each in (collector, again):
        (seen,) = each.collect()["queries"]
        assert seen["batch_duration_ms"]["p50"] == newest[49]
    again.close()


def test_epochs_are_not_counted_as_micro_batches(collector: Collector, store: penstock.Store) -> None:
    batches = QueryRun("id", "1", ODD, "micro-batch", 5)
    begin(store, batches)
    tell(store, batches, _took(1, 700.0))
    epochs = QueryRun("id", "2", ODD, "continuous", 6)
    begin(store, epochs)
    tell(
        store,
        epochs,
        QueryProgress(2, 10, latency={"p50": 1.0}, duration=5.0, durations={"epochCommit": 5.0}),
    )
    (seen,) = collector.collect()["queries"]
    assert seen["latency_ms"]["p50"] == 1.0
    assert seen["batch_duration_ms"] is None
    assert [point["batch_p50"] for point in seen["history"]] == [700.0, None]
    batches = QueryRun("id", "3", ODD, "micro-batch", 7)
    begin(store, batches)
    tell(store, batches, _took(3, 900.0))
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
    begin(store, QueryRun(seen["watermark"]["id"], "run", "totals", "micro-batch", 5))
    states = {each["id"]: each["state"] for each in collector.collect()["queries"]}
    assert states == {each["id"]: "files only" for each in seen.values()} | {
        seen["watermark"]["id"]: "running"
    }
    assert next(iter(states)) == seen["watermark"]["id"]
    collector.close()


def test_queries_are_sorted_by_state(collector: Collector, store: penstock.Store) -> None:
    for name in ("a runs", "b stops", "c fails", "d is silent"):
        run = QueryRun(name, "run", name, "micro-batch", 5)
        begin(store, run)
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
    begin(store, QueryRun("id", "run", None, "micro-batch", 5, spark_ui=url))
    assert collector.collect()["queries"][0]["spark_ui"] is None
