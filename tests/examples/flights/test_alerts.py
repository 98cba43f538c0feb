"""The delay alerts of the demo and their latency, through each trigger with each guarantee."""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

import penstock
from examples.flights import DemoError
from examples.flights import alerts as module
from examples.flights.alerts import (
    CASES,
    DEPARTURES,
    LATE_MINUTES,
    RATE,
    Latency,
    append_departures,
    choose_departures,
    create_queues,
    describe_store,
    latencies_since,
    measure,
    read_latencies,
    watch_alerts,
    without_fsync,
    write_departures,
)
from examples.flights.dataset import load_flights
from examples.flights.plots import plot_latencies
from examples.flights.proof import prove_alerts
from examples.flights.tables import read_queue

LATENCIES = [Latency(case.trigger, case.guarantee, 500.0, [1.0, 2.0, 4.0, 1234.5]) for case in CASES]


@pytest.fixture(scope="module")
def year() -> pa.Table:
    return load_flights()


@pytest.fixture(scope="module")
def chosen(year: pa.Table) -> pa.Table:
    return choose_departures(year)


@pytest.fixture
def queues(store: penstock.Store) -> penstock.Store:
    create_queues(store)
    return store


def late(table: pa.Table) -> pa.Table:
    return table.filter(pc.greater(table["dep_delay"], LATE_MINUTES))


# --- the departures


def test_the_departures_are_consecutive_flights(year: pa.Table, chosen: pa.Table) -> None:
    flown = year.filter(pc.is_valid(year["departed"])).sort_by(
        [("departed", "ascending"), ("flight_id", "ascending")]
    )
    first = pc.index(flown["flight_id"], chosen["flight_id"][0]).as_py()
    assert flown.slice(first, chosen.num_rows).select(chosen.column_names).equals(chosen)


def test_the_departures_are_those_with_the_most_alerts_in_the_year(year: pa.Table, chosen: pa.Table) -> None:
    flown = year.filter(pc.is_valid(year["departed"]))
    share = late(flown).num_rows / flown.num_rows
    assert late(chosen).num_rows / chosen.num_rows > 3 * share


def test_a_year_with_few_flights_is_used_completely(year: pa.Table) -> None:
    assert choose_departures(year.slice(0, 10)).num_rows == 10


# --- sending and seeing


def test_each_departure_is_one_append_with_the_time_before_it(
    queues: penstock.Store, store_url: str, chosen: pa.Table
) -> None:
    some = chosen.slice(0, 20)
    before = datetime.now(UTC)
    rate = append_departures(store_url, some)
    after = datetime.now(UTC)
    queue = queues.queue(DEPARTURES)
    found = read_queue(queue)
    assert found.sort_by("sent").drop_columns("sent").equals(some)
    assert len(set(found["sent"].to_pylist())) == 20
    assert before <= pc.min(found["sent"]).as_py() <= pc.max(found["sent"]).as_py() <= after
    assert 0 < rate <= RATE * 20 / 19
    # Each has a time of its own, at the rate that was asked for.
    assert (pc.max(found["sent"]).as_py() - pc.min(found["sent"]).as_py()).total_seconds() >= 18 / RATE


def test_alerts_are_seen_after_they_are_sent(
    queues: penstock.Store, store_url: str, chosen: pa.Table
) -> None:
    name, alerts = CASES[0].name, late(chosen).slice(0, 10)
    with ThreadPoolExecutor(1) as beside:
        watched = beside.submit(watch_alerts, store_url, name, 10)
        for number, row in enumerate(alerts.to_pylist()):
            queues.queue(name).append([{**row, "sent": datetime.now(UTC)}], partition=number % 2)
        seen = watched.result()
    ended = time.time_ns() // 1000
    sent_at = read_queue(queues.queue(name))["sent"].cast(pa.int64()).to_pylist()
    assert sorted(seen["sent"].to_pylist()) == sorted(sent_at)
    assert all(sent <= at <= ended for sent, at in zip(*seen.to_pydict().values(), strict=True))


def test_alerts_that_do_not_arrive_are_an_error(
    queues: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0)
    with pytest.raises(DemoError, match="alerts_continuous_exactly_once did not all arrive"):
        watch_alerts(store_url, CASES[0].name, 1)


def test_alerts_sent_during_the_warm_up_do_not_count() -> None:
    alerts = pa.table({"sent": [10_000, 21_000, 20_000], "seen": [90_000, 23_500, 60_000]})
    assert latencies_since(alerts, 20_000) == [2.5, 40.0]


# --- the whole of it


@pytest.mark.soak
@pytest.mark.parametrize("store_url", ["sqlite", "postgresql"], indirect=True)
def test_each_trigger_delivers_every_alert_with_each_guarantee(
    spark: SparkSession,
    queues: penstock.Store,
    store_url: str,
    tmp_path: Path,
    chosen: pa.Table,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WARM_UP", 50)
    some = chosen.take(list(range(0, chosen.num_rows, 10)))
    write_departures(some, tmp_path)
    measure(spark, without_fsync(store_url), tmp_path, tmp_path / "checkpoints")
    latencies = read_latencies(tmp_path)
    assert [(each.trigger, each.guarantee) for each in latencies] == [
        (case.trigger, case.guarantee) for case in CASES
    ]
    counted = late(some.slice(50)).num_rows
    assert counted > 20
    assert all(len(each.milliseconds) == counted and each.milliseconds[0] > 0 for each in latencies)
    proofs = prove_alerts(queues, some)
    assert [proof.name for proof in proofs] == ["alerts, continuous", "alerts, micro_batch"]
    assert all(proof.holds and proof.found for proof in proofs)
    median = {(each.trigger, each.guarantee): statistics.median(each.milliseconds) for each in latencies}
    assert median["continuous", "at_least_once"] < median["micro_batch", "at_least_once"]


# --- what is shown


def test_the_percentiles_of_each_case_are_in_the_result() -> None:
    summary = json.loads(json.dumps(LATENCIES[0].to_dict()))
    assert summary == {
        "trigger": "continuous",
        "guarantee": "exactly_once",
        "rate": 500.0,
        "alerts": 4,
        "p50": 4.0,
        "p90": 1234.5,
        "p99": 1234.5,
    }


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    plot_latencies(LATENCIES, tmp_path / "latencies.png")
    assert (tmp_path / "latencies.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("url", "opened", "called"),
    [
        ("sqlite:///a.db", "sqlite:///a.db?synchronous=normal", "SQLite (synchronous=normal)"),
        ("sqlite:///a.db?synchronous=full", "sqlite:///a.db?synchronous=full", "SQLite"),
        ("postgresql://h/d", "postgresql://h/d", "PostgreSQL"),
    ],
)
def test_a_sqlite_store_fsyncs_commits_only_if_its_url_asks_for_it(
    url: str, opened: str, called: str
) -> None:
    assert (without_fsync(url), describe_store(url)) == (opened, called)


@pytest.mark.parametrize("case", [case for case in CASES if case.guarantee == "exactly_once"])
def test_alerts_that_are_lost_or_repeated_or_wrong_are_counted(
    tmp_path: Path, chosen: pa.Table, case: Any
) -> None:
    alerts = late(chosen).slice(0, 50)
    some = chosen.filter(pc.is_in(chosen["flight_id"], alerts["flight_id"]))
    with penstock.connect(f"sqlite:///{tmp_path}/penstock.db") as store:
        create_queues(store)
        sent = pa.repeat(pa.scalar(datetime.now(UTC)), 50)
        right = alerts.append_column("sent", sent)
        for other in CASES:
            store.queue(other.name).append(right.cast(store.queue(other.name).schema))
        assert all(proof.holds for proof in prove_alerts(store, some))
        queue, name = store.queue(case.name), f"alerts, {case.trigger}"
        queue.append(right.slice(0, 1).cast(queue.schema))
        proofs = {proof.name: proof for proof in prove_alerts(store, some)}
        assert [proof.name for proof in proofs.values() if not proof.holds] == [name]
        assert proofs[name].repeated == 1
