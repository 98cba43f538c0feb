"""The metrics, in the format of Prometheus."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.store.records import queries
from penstock.store.records.queries import QueryProgress, QueryRun
from penstock.ui.snapshots import Collector
from tests.ui.filled import ODD, fill
from tests.ui.served import Serve


def test_metrics_are_in_prometheus_format(serve: Serve, store: penstock.Store) -> None:
    fill(store)
    answer = serve().get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    queue, consumer = ("queue", ODD), ("consumer", ODD)
    query = (("id", "id"), ("query", ODD))
    assert values["penstock_store_up",] == 1
    assert values["penstock_queue_rows", queue] == 1
    assert values["penstock_queue_appended_rows_total", queue] == 1
    assert values["penstock_consumer_lag_rows", consumer, queue] == 1
    assert values["penstock_consumer_lag_seconds", consumer, queue] >= 0
    assert values["penstock_consumer_stuck", consumer, queue] == 0
    states = {
        state: values["penstock_query_state", *query, ("state", state)] for state in ("running", "failed")
    }
    assert states == {"running": 0, "failed": 1}
    latency = ("penstock_query_latency_seconds", *sorted([*query, ("quantile", "0.99")]))
    assert values[latency] == pytest.approx(0.003)
    assert values["penstock_query_duration_seconds", *query] == 0.02
    assert (families["penstock_queue_rows"].type, families["penstock_queue_appended_rows"].type) == (
        "gauge",
        "counter",
    )
    assert all(family.documentation for family in families.values())


def test_metrics_contain_the_duration_of_micro_batches_but_not_as_latency(
    serve: Serve, store: penstock.Store
) -> None:
    run = QueryRun("id", "run", "large", "micro-batch", 5)
    store.database.run(lambda tx: queries.begin(tx, run))
    for batch, duration in enumerate((200.0, 400.0)):
        progress = QueryProgress(batch, 10, duration=duration, durations={"triggerExecution": duration})
        store.database.run(lambda tx, progress=progress: queries.report(tx, run, progress))
    families = {
        family.name: family for family in text_string_to_metric_families(serve().get("/metrics").text)
    }
    assert families["penstock_query_latency_seconds"].samples == []
    response = families["penstock_query_micro_batch_duration_seconds"]
    assert "not the latency of rows" in response.documentation
    assert {sample.labels["quantile"]: sample.value for sample in response.samples} == {
        "0.5": 0.2,
        "0.9": 0.4,
        "0.99": 0.4,
        "1": 0.4,
    }
    states = {sample.labels["state"] for sample in families["penstock_query_state"].samples}
    assert states == {"failed", "silent", "running", "files only", "stopped"}


def test_metrics_of_a_store_that_does_not_respond_contain_only_that(
    store: penstock.Store, store_url: str
) -> None:
    from penstock.ui.metrics import exposition

    fill(store)
    collector = Collector(store_url)
    collector.collect()
    text = exposition(collector.stale_snapshot("gone")).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == ["penstock_store_up 0.0"]
    collector.close()
