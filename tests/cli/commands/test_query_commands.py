"""``penstock query``, in text and in JSON, on both kinds of database."""

from __future__ import annotations

from dataclasses import replace

from penstock.queue.store import connect
from penstock.store.records import queries
from penstock.store.records.queries import CONTINUOUS, MICRO_BATCH, QueryError, QueryProgress, QueryRun
from tests.support.commands import Penstock
from tests.support.raw_sql import long_text, run_sql


def report(store_url: str, run: QueryRun, *progress: QueryProgress, error: QueryError | None = None) -> None:
    with connect(store_url) as store:
        store.database.run(lambda tx: queries.begin(tx, run))
        for each in progress:
            store.database.run(lambda tx, each=each: queries.report(tx, run, each))
        if error is not None:
            store.database.run(lambda tx: queries.end(tx, run, error))


def test_a_store_without_queries(penstock: Penstock) -> None:
    assert penstock("query", "list").out == "no queries\n"
    assert penstock("query", "list", "--json").json == {"queries": []}


def test_queries_are_listed_with_those_that_need_attention_first(penstock: Penstock, store_url: str) -> None:
    running = QueryRun("1", "run", "totals", MICRO_BATCH, 5, source="queue 'orders'", sink="table 'totals'")
    report(store_url, running, QueryProgress(1_412, 1_000, 990))
    error = QueryError("DATA_LOST.QUEUE", "rows 0 to 9 of the queue 'orders' are gone")
    report(store_url, QueryRun("2", "run", None, CONTINUOUS, 5), QueryProgress(7, 10), error=error)
    header, failed, fine = penstock("query", "list").out.splitlines()
    assert header.split() == [
        "query", "state", "engine", "batch", "rows/s", "source", "sink", "reported", "error", "id",
    ]  # fmt: skip
    assert failed.split()[:4] == ["2", "failed", "continuous", "7"]
    assert failed.split()[-2:] == ["DATA_LOST.QUEUE", "2"]
    assert fine.split()[:8] == [
        "totals",
        "running",
        "micro-batch",
        "1,412",
        "queue",
        "'orders'",
        "table",
        "'totals'",
    ]
    first, second = penstock("query", "list", "--json").json["queries"]
    assert (first["id"], first["name"], first["last_error"]["message"]) == ("2", None, error.message)
    assert (second["name"], second["batch"], second["rows_in"]) == ("totals", 1_412, 1_000)
    assert 0 <= second["reported_seconds"] < 60


def test_a_query_that_has_stopped_reporting_is_silent(penstock: Penstock, store_url: str) -> None:
    report(store_url, QueryRun("1", "run", "totals", MICRO_BATCH, 5))
    hour = 3_600_000_000
    with connect(store_url) as store:
        text = f"update penstock.query set reported_at = reported_at - {hour}"
        run_sql(store.database, text)
    (query,) = penstock("query", "list", "--json").json["queries"]
    assert query["state"] == "silent"
    assert 3_600 <= query["reported_seconds"] < 3_700
    assert "1 h" in penstock("query", "list").out


def test_long_texts_that_others_have_written_are_cut(penstock: Penstock, store_url: str) -> None:
    report(store_url, QueryRun("1", "run", "totals", MICRO_BATCH, 5), QueryProgress(1, 1))
    with connect(store_url) as store:
        long = long_text(store.database, 1_000_000)
        columns = ("name", "engine", "source", "sink", "checkpoint", "error_message", "run_id")
        run_sql(
            store.database, f"update penstock.query set {', '.join(f'{name} = {long}' for name in columns)}"
        )
        run_sql(store.database, f"update penstock.query_progress set durations = {long}, warnings = {long}")
    assert len(penstock("query", "list").out) < 3000
    listed = penstock("query", "list", "--json")
    assert len(listed.out) < 5000
    assert listed.json["queries"][0]["name"] == "x" * 300


def test_the_last_reports_show_how_fast_a_query_reads(penstock: Penstock, store_url: str) -> None:
    batches = [QueryProgress(number, 500) for number in range(2)]
    report(store_url, QueryRun("1", "run", "totals", MICRO_BATCH, 5), *batches)
    (query,) = penstock("query", "list", "--json").json["queries"]
    assert query["rows_in_per_second"] > 0


def test_the_error_of_an_earlier_run_is_not_that_of_a_running_query(
    penstock: Penstock, store_url: str
) -> None:
    run = QueryRun("1", "run", "totals", MICRO_BATCH, 5)
    report(store_url, run, error=QueryError("OWNER_FENCED", "another query owns the consumer"))
    assert "OWNER_FENCED" in penstock("query", "list").out
    report(store_url, replace(run, run_id="later"))
    assert "OWNER_FENCED" not in penstock("query", "list").out
    (query,) = penstock("query", "list", "--json").json["queries"]
    assert (query["state"], query["error"]) == ("running", None)
    assert query["last_error"]["condition"] == "OWNER_FENCED"
