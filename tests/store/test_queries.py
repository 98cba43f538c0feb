"""The reports that queries write to a store."""

from __future__ import annotations

import time

import pytest

import penstock
from penstock.errors import StoreNotFoundError
from penstock.store.database import Row, Transaction
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun
from penstock.store.store_schema import open_database
from tests.support.raw_sql import run_sql

RUN = QueryRun("id", "run 1", 'it\'s "big" <script>', "micro-batch", 5, sink="queue 'x'")


def _listed(store: penstock.Store) -> list[Row]:
    return store.database.run(queries.reported_queries, write=False)


def _progress(store: penstock.Store, since: int = 0) -> list[Row]:
    def read(tx: Transaction) -> list[Row]:
        return queries.progress_since(tx, since, upto=tx.now(), max_rows_per_query=queries.MAX_PROGRESS_ROWS)

    return store.database.run(read, write=False)


def _texts(store: penstock.Store) -> list[Row]:
    return store.database.run(lambda tx: queries.newest_texts(tx, 0, upto=tx.now()), write=False)


def test_a_run_is_recorded_from_start_to_end(store: penstock.Store) -> None:
    database = store.database
    before = time.time() * 1e6
    database.run(lambda tx: queries.begin(tx, RUN))
    (row,) = _listed(store)
    assert (row.query_id, row.name, row.engine, row.state) == ("id", RUN.name, "micro-batch", "running")
    assert row.started_at == 5
    assert before - 5e6 < row.reported_at < before + 60e6
    first = QueryProgress(
        7,
        10,
        8,
        {"p50": 1.5, "p90": 2.0, "p99": 3.0, "max": 4.0},
        230.0,
        {"addBatch": 5.0},
        9,
        finalized_until=11,
    )
    for progress in (first, QueryProgress(8, 5)):
        database.run(lambda tx, progress=progress: queries.report(tx, RUN, progress, source="rate"))
        (texts,) = _texts(store)
        assert texts.durations == ('{"addBatch": 5.0}' if progress is first else "{}")
    one, two = _progress(store)
    assert (one.batch_id, one.rows_in, one.rows_out, one.p50, one.max) == (7, 10, 8, 1.5, 4.0)
    assert (one.duration, one.watermark, one.finalized_until) == (230.0, 9, 11)
    assert (two.rows_out, two.p50, two.state_rows) == (None, None, None)
    (row,) = _listed(store)
    assert (row.rows_in, row.rows_out, row.source, row.sink) == (15, 8, "rate", "queue 'x'")
    database.run(lambda tx: queries.end(tx, RUN, QueryError("X", "it broke")))
    (row,) = _listed(store)
    assert (row.state, row.error_condition, row.error_message) == ("failed", "X", "it broke")


def test_a_later_run_replaces_the_earlier_one_whose_reports_are_ignored(store: penstock.Store) -> None:
    later = QueryRun("id", "run 2", "n", "continuous", 6)
    for run in (RUN, later):
        store.database.run(lambda tx, run=run: queries.begin(tx, run))
    assert not store.database.run(lambda tx: queries.report(tx, RUN, QueryProgress(1, 1)))
    store.database.run(lambda tx: queries.end(tx, RUN, None))
    (row,) = _listed(store)
    assert (row.run_id, row.state, row.rows_in) == ("run 2", "running", 0)
    assert _progress(store) == []


def test_the_last_error_stays_when_a_query_runs_again(store: penstock.Store) -> None:
    later = QueryRun("id", "run 2", "n", "continuous", 6)
    store.database.run(lambda tx: queries.begin(tx, RUN))
    store.database.run(lambda tx: queries.end(tx, RUN, QueryError("X", "it broke")))
    store.database.run(lambda tx: queries.begin(tx, later))
    store.database.run(lambda tx: queries.end(tx, later, None))
    (row,) = _listed(store)
    assert (row.state, row.error_condition) == ("stopped", "X")


def test_only_the_newest_progress_is_kept(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_PROGRESS_ROWS", 3)
    other = QueryRun("other", "run", None, "continuous", 6)
    for run in (RUN, other):
        store.database.run(lambda tx, run=run: queries.begin(tx, run))
    store.database.run(lambda tx: queries.report(tx, other, QueryProgress(0, 1)))
    for batch in range(5):
        store.database.run(lambda tx, batch=batch: queries.report(tx, RUN, QueryProgress(batch, 1)))
    assert [(row.query_id, row.batch_id) for row in _progress(store)] == [
        ("id", 2),
        ("id", 3),
        ("id", 4),
        ("other", 0),
    ]
    newest = _progress(store)[2].reported_at
    assert [row.batch_id for row in _progress(store, newest - 1)] == [4]


def test_progress_reported_by_a_clock_far_ahead_is_replaced(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_PROGRESS_ROWS", 3)
    store.database.run(lambda tx: queries.begin(tx, RUN))
    for batch in range(3):
        store.database.run(lambda tx, batch=batch: queries.report(tx, RUN, QueryProgress(batch, 1)))
    text = "update penstock.query_progress set reported_at = reported_at + 86400000000"
    run_sql(store.database, text)
    assert _progress(store) == _texts(store) == []
    for batch in range(3, 5):
        store.database.run(lambda tx, batch=batch: queries.report(tx, RUN, QueryProgress(batch, 1)))
    assert [row.batch_id for row in _progress(store)] == [3, 4]


def test_a_query_that_has_not_reported_for_a_long_time_is_deleted_with_its_progress(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.database.run(lambda tx: queries.begin(tx, RUN))
    store.database.run(lambda tx: queries.report(tx, RUN, QueryProgress(0, 1)))
    monkeypatch.setattr(queries, "RETENTION_SECONDS", 0)
    later = QueryRun("later", "run", None, "continuous", 6)
    store.database.run(lambda tx: queries.begin(tx, later))
    assert [row.query_id for row in _listed(store)] == ["later"]
    assert _progress(store) == []


def test_committed_rows_are_found_in_the_ledger(store: penstock.Store) -> None:
    def enter(tx: Transaction) -> None:
        for batch, rows in ((0, 5), (1, 7), (2, 9)):
            tx.run(
                "insert_ledger",
                sink="s",
                app_id="id",
                batch_id=batch,
                task=-1,
                ranges="",
                row_count=rows,
                logged=None,
                now=1,
            )

    store.database.run(enter)
    found = store.database.run(
        lambda tx: [queries.rows_committed(tx, "s", "id", *ends) for ends in ((-1, 0), (0, 2), (2, 3))]
    )
    assert found == [5, 16, None]


def test_looking_up_a_store_does_not_create_it(store_url: str) -> None:
    with pytest.raises(StoreNotFoundError):
        open_database(store_url, create=False, keep_journal_mode=True)


def test_one_statement_finds_all_live_owners(store: penstock.Store) -> None:
    names = [f"{store.uuid}/1/{name}" for name in ("a", "b <>'", "c")]
    lock = store.database.owner_lock(names[1])
    assert lock.acquire()
    assert store.database.run(lambda tx: tx.owners_alive(names), write=False) == {names[1]}
    lock.release()
    assert store.database.run(lambda tx: tx.owners_alive(names), write=False) == set()
