"""What a snapshot contains about a store."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.store.records.queries import QueryRun
from penstock.store.url import parse_url
from penstock.ui.history import MAX_POINTS, MAX_TOTAL_POINTS, History, step_for
from penstock.ui.snapshots import Collector
from tests.support.postgres_proxy import proxied
from tests.support.raw_sql import run_sql
from tests.ui.filled import ODD, SCHEMA, begin, fill, rows


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


def test_the_newest_commits_are_listed_by_sink_and_query(collector: Collector, store: penstock.Store) -> None:
    begin(store, QueryRun("app", "run", "large", "micro-batch", 5))

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
            store.create_queue(f"q{number} {each}", SCHEMA, partitions=2).append(rows(5))
            store.create_consumer(f"c{number} {each}").register(f"q{number} {each}")
            begin(store, QueryRun(f"{number} {each}", "run", None, "micro-batch", 5))
        asked.clear()
        collector.collect()
        counts.append(len(asked))
    assert counts[0] == counts[1] <= 14


def test_the_last_snapshot_stays_while_the_database_is_unavailable(
    pg_url: str, store_url: str, store: penstock.Store
) -> None:
    if store_url.startswith("sqlite"):
        path = Path(parse_url(store_url).target)
        fill(store)
        collector = Collector(store_url)
        known = collector.collect()
        away = path.with_suffix(".away")
        path.rename(away)
        found = collector.collect()
        assert found["store"]["error"]
        assert found["queues"] == known["queues"]
        away.rename(path)
        assert collector.collect()["store"]["error"] is None
        collector.close()
        return
    fill(store)
    with proxied(store_url) as proxy:
        collector = Collector(proxy.url)
        known = collector.collect()
        proxy.lose(b"penstock", deliver=False, times=10**6)
        proxy.lose(b"", deliver=False, times=10**6)
        found = collector.collect()
        assert found["store"]["error"]
        assert [secret for secret in parse_url(store_url).secrets if secret in str(found)] == []
        assert found["queues"] == known["queues"]
        proxy.failures = 0
        assert collector.collect()["store"]["error"] is None
        collector.close()


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
    for number in range(MAX_POINTS + 101):
        history.add({"n": number})
    points = [point["n"] for point in history.every_nth(1)]
    assert points == list(range(101, MAX_POINTS + 101))
    thinned = [point["n"] for point in history.every_nth(7)]
    assert set(thinned) <= set(points)
    assert thinned[-1] == points[-1]
    assert len(thinned) <= MAX_POINTS // 7 + 2
    for count in (0, 1, 10, 50, 150):
        assert count * (MAX_POINTS // step_for(count)) <= MAX_TOTAL_POINTS
