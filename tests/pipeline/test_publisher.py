"""The publisher's thread: what it writes and how often, and how it handles a store that does not
respond.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import QueryFailedError, QueueNotFoundError
from penstock.json_text import Json
from penstock.pipeline import publisher as module
from penstock.pipeline.progress_format import descriptions_of, error_of, progress_of, rows_of
from penstock.pipeline.publisher import Publisher
from penstock.store.database import Transaction
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryRun
from tests.support.waiting import wait_until

RUN = QueryRun("id", "run", "ř 'q'", "continuous", 5)


def progress_report(batch: int, rows: int = 10, out: int = -1, **more: object) -> Json:
    """A query's progress as Spark has it in JSON."""
    return {
        "batchId": batch,
        "numInputRows": rows,
        "sink": {"numOutputRows": out, "description": "s"},
        **more,
    }


def rows(store: penstock.Store) -> list[Any]:
    return store.database.run(queries.reported_queries, write=False)


def progress(store: penstock.Store) -> list[Any]:
    return store.database.run(
        lambda tx: queries.progress_since(tx, 0, upto=tx.now(), max_rows_per_query=queries.MAX_PROGRESS_ROWS),
        write=False,
    )


def newest_texts(store: penstock.Store) -> Any:
    """The texts of the newest progress of the only query."""
    (texts,) = store.database.run(lambda tx: queries.newest_texts(tx, 0, upto=tx.now()), write=False)
    return texts


@pytest.fixture
def publisher(store: penstock.Store, store_url: str) -> Iterator[Publisher]:
    found = Publisher(store_url)
    yield found
    for run_id in list(found.reported_runs):
        found.end(run_id, None)
    found.flush(10)


def test_the_start_and_end_of_a_query_are_reported_immediately(
    publisher: Publisher, store: penstock.Store
) -> None:
    publisher.begin(RUN)
    (row,) = wait_until(lambda: rows(store), 10)
    assert (row.query_id, row.run_id, row.name, row.state) == ("id", "run", RUN.name, "running")
    publisher.end("run", QueryError("BAD", "why"))
    assert publisher.await_end("run", 10)
    (row,) = rows(store)
    assert (row.state, row.error_condition, row.error_message) == ("failed", "BAD", "why")


_ENDS_WITH_THE_PROGRAM = """
import sys, time
from penstock.pipeline.publisher import publisher_of
from penstock.store.records.queries import QueryRun
publisher = publisher_of(sys.argv[1])
publisher.begin(QueryRun("id", "run", "q", "continuous", 5))
publisher.flush(10)
publisher.end("run", None)
"""


def test_the_end_of_a_query_is_reported_when_the_program_ends_with_it(
    store: penstock.Store, store_url: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_WITH_THE_PROGRAM, store_url], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    (row,) = rows(store)
    assert row.state == "stopped"


def test_only_the_newest_progress_is_reported_with_the_total_of_rows(
    publisher: Publisher, store: penstock.Store
) -> None:
    publisher.begin(RUN)
    began = time.monotonic()
    for batch in range(25):
        publisher.progressed("run", progress_report(batch, 10, 4))
        time.sleep(0.1)
    publisher.end("run", None)
    assert publisher.await_end("run", 10)
    points = progress(store)
    assert sum(point.rows_in for point in points) == 250
    assert sum(point.rows_out for point in points) == 100
    assert points[-1].batch_id == 24
    assert [point.batch_id for point in points] == sorted({point.batch_id for point in points})
    assert len(points) <= time.monotonic() - began + 2
    # But for the last one, which goes with the end.
    assert all(later.reported_at - point.reported_at > 900_000 for point, later in pairwise(points[:-1]))


def test_rows_dropped_as_late_are_counted_for_the_run_and_logged_once(
    publisher: Publisher, store: penstock.Store, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.begin(RUN)
    for batch, late in enumerate((0, 2, 3, 0)):
        publisher.progressed(
            "run", progress_report(batch, 10, stateOperators=[{"numRowsDroppedByWatermark": late}])
        )
    publisher.end("run", None)
    assert publisher.await_end("run", 10)
    assert "5 rows have been dropped since this run began" in newest_texts(store).warnings
    (record,) = [each for each in caplog.records if each.name == "penstock.pipeline"]
    assert (record.action, record.rows) == ("rows_late", 2)  # type: ignore[attr-defined] # by extra


def test_progress_after_the_end_or_of_an_unknown_run_is_ignored(
    publisher: Publisher, store: penstock.Store
) -> None:
    publisher.progressed("stranger", progress_report(1))
    publisher.begin(RUN)
    publisher.end("run", None)
    assert publisher.await_end("run", 10)
    publisher.progressed("run", progress_report(1))
    publisher.end("run", QueryError("BAD", "why"))
    assert progress(store) == []
    assert rows(store)[0].state == "stopped"


def test_a_process_with_a_running_query_sends_heartbeats(
    publisher: Publisher, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    publisher.begin(RUN)
    first = wait_until(lambda: rows(store), 10)[0].reported_at
    wait_until(lambda: rows(store)[0].reported_at > first, 10)
    assert progress(store) == []


def test_rows_out_come_from_the_ledger_where_spark_has_not_counted_them(
    publisher: Publisher, store: penstock.Store
) -> None:
    def enter(tx: Transaction) -> None:
        for batch, count in ((0, 50), (1, 7), (2, 9)):
            tx.run(
                "insert_ledger",
                sink="s",
                app_id="id",
                batch_id=batch,
                task=-1,
                ranges="",
                row_count=count,
                logged=None,
                now=1,
            )

    store.database.run(enter)
    publisher.begin(RUN, lambda tx: "s")
    publisher.progressed("run", progress_report(1))
    wait_until(lambda: progress(store), 10)
    publisher.progressed("run", progress_report(2))
    publisher.end("run", None)
    assert publisher.await_end("run", 10)
    assert [(point.batch_id, point.rows_out) for point in progress(store)] == [(1, 7), (2, 9)]


def test_a_store_that_does_not_respond_is_logged_once_and_reported_to_later(
    store_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.05)
    caplog.set_level(logging.WARNING, "penstock")
    publisher = Publisher(store_url)
    began = time.monotonic()
    publisher.begin(RUN)
    for batch in range(1000):
        publisher.progressed("run", progress_report(batch, 1))
    assert time.monotonic() - began < 1
    wait_until(lambda: publisher.unavailable, 20)
    assert not publisher.await_end("run", 5)
    publisher.progressed("run", progress_report(1000, 1))
    for _ in range(3):
        again = publisher.retry_at
        wait_until(lambda again=again: publisher.retry_at > again, 20)
    with penstock.connect(store_url) as store:
        wait_until(lambda: progress(store), 20)
        publisher.end("run", None)
        assert publisher.await_end("run", 10)
        assert sum(point.rows_in for point in progress(store)) == 1001
        assert rows(store)[0].state == "stopped"
    warned = [record for record in caplog.records if getattr(record, "action", "") == "monitor_failed"]
    assert len(warned) == 1


def test_reporting_the_end_to_an_unavailable_store_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", 0.2)
    publisher = Publisher(f"sqlite:///{tmp_path}/none.db")
    publisher.begin(RUN)
    thread = publisher.thread
    publisher.end("run", None)
    assert thread is not None
    thread.join(20)
    assert not thread.is_alive()


def test_the_thread_stops_with_the_last_query_and_starts_with_the_next(
    publisher: Publisher, store: penstock.Store
) -> None:
    for number in range(2):
        publisher.begin(QueryRun("id", f"run {number}", None, "continuous", 5))
        thread = publisher.thread
        assert thread is not None
        publisher.end(f"run {number}", None)
        assert publisher.await_end(f"run {number}", 10)
        thread.join(10)
        assert not thread.is_alive()
    assert rows(store)[0].run_id == "run 1"


def test_progress_of_spark_is_parsed() -> None:
    found = progress_of(
        progress_report(
            7,
            durationMs={"triggerExecution": 230, "addBatch": 180},
            eventTime={"watermark": "2026-01-31T12:00:00.500Z"},
            stateOperators=[
                {"numRowsTotal": 5, "memoryUsedBytes": 100},
                {"numRowsTotal": 6, "memoryUsedBytes": 50},
            ],
        ),
        12,
        None,
    )
    assert (found.batch_id, found.rows_in, found.rows_out, found.duration) == (7, 12, None, 230.0)
    assert (found.state_rows, found.state_bytes, found.watermark) == (11, 150, 1769860800500000)
    assert found.latency == {}
    bare = progress_of({"batchId": 0, "eventTime": {"watermark": "1970-01-01T00:00:00.000Z"}}, 0, None)
    assert (bare.watermark, bare.duration, bare.state_rows) == (None, None, None)
    assert rows_of(progress_report(1, 5, 3)) == (5, 3)
    nameless = {"description": "org.apache.spark.sql.PythonStream@75fa25be"}
    assert descriptions_of({"sources": [nameless, {"description": "rate"}]}, ()) == (
        "PythonStream, rate",
        None,
    )
    assert rows_of({"batchId": 1}) == (0, None)


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach postgresql://app:hunter22@db/shop now",
        "jdbc:postgresql://db/shop?user=a&password=hunter22&x=y",
        "host=db password = 'hunter22 and more'",
        "fs.s3a.secret.key=hunter22",
        'sasl.jaas.config: username="a" password="hunter22";',
        "{'access_token': 'hunter22', 'a': 1}",
    ],
)
def test_secrets_are_not_reported(text: str) -> None:
    for error in (RuntimeError(text), QueueNotFoundError(text), QueryFailedError(f"Traceback: {text}")):
        assert "hunter22" not in error_of(error).message


def test_warnings_of_a_feed_are_part_of_the_progress() -> None:
    latest = {"feed": "f", "from": 1, "to": 1, "warnings": ["the slot\nkeeps a password=geheim", ""]}
    sources = [{"latestOffset": latest}, {"latestOffset": "{}"}, {"latestOffset": {"to": 1}}, {}]
    progress = progress_of({"batchId": 1, "sources": sources}, 0, None, ["slot"])
    assert progress.warnings == ("the *** keeps a password=***",)


def test_an_error_is_reported_by_its_condition_in_one_short_line() -> None:
    spark = (
        "org.apache.spark.sql.streaming.StreamingQueryException: [STREAM_FAILED] it broke\n"
        "penstock.errors.OwnerFencedError: [OWNER_FENCED] another query owns it\n\tat "
        "org.apache.spark.Thing.run(Thing.scala:5)"
    )
    assert error_of(RuntimeError(spark)) == QueryError("OWNER_FENCED", "another query owns it")
    plain = error_of(
        RuntimeError("a\nb" + "x" * 5000 + "the end\n\tat org.apache.spark.Thing.run(Thing.scala)")
    )
    assert plain.condition == "QUERY_FAILED"
    assert len(plain.message) <= 620
    assert plain.message.startswith("a b")
    assert plain.message.endswith("the end")
    assert error_of(RuntimeError("x\0y\ud800"), condition="FROM_SPARK") == QueryError("FROM_SPARK", "xy?")


def test_a_child_process_does_not_report_its_parents_queries(tmp_path: Path) -> None:
    publisher = Publisher(f"sqlite:///{tmp_path}/none.db")
    publisher.begin(RUN)
    publisher.after_fork_in_child()
    assert publisher.reported_runs == {}
    assert publisher.thread is None
