"""A snapshot for Prometheus, in its text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.ui.collector import Snapshot

Value = Callable[[Mapping[str, Any]], float | None]
_STATES = ("running", "stopped", "failed", "silent")


class _Registered:
    """What a registry asks: the metrics of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return _metrics(self._snapshot)


def exposition(snapshot: Snapshot) -> bytes:
    """The metrics of a snapshot; of a store that does not answer no more than that."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Registered(snapshot))
    return generate_latest(registry)


def _metrics(snapshot: Snapshot) -> Iterator[Metric]:
    answers = snapshot["store"]["error"] is None
    yield GaugeMetricFamily("penstock_store_up", "Whether the store answers.", value=float(answers))
    if answers:
        yield from _of_queues(snapshot["queues"])
        yield from _of_consumers(snapshot["consumers"])
        yield from _of_queries(snapshot["queries"])
        yield _family(
            GaugeMetricFamily(
                "penstock_dead_letter_rows", "Rows in a queue of dead letters.", labels=["queue"]
            ),
            snapshot["dead_letters"],
            lambda each: each["rows"],
        )


def _of_queues(queues: list[Any]) -> Iterator[Metric]:
    labels = ["queue"]
    yield _gauge("queue_rows", "Rows that a queue holds.", labels, queues, lambda each: each["rows"])
    yield _gauge(
        "queue_bytes", "Compressed bytes that a queue holds.", labels, queues, lambda each: each["bytes"]
    )
    yield _gauge(
        "queue_segments", "Segments that a queue has.", labels, queues,
        lambda each: sum(part["segments"] for part in each["partitions"]),
    )  # fmt: skip
    yield _gauge(
        "queue_oldest_seconds",
        "Age of a queue's oldest row.",
        labels,
        queues,
        lambda each: each["oldest_seconds"],
    )
    yield _family(
        CounterMetricFamily(
            "penstock_queue_appended_rows", "Rows that were ever appended to a queue.", labels=labels
        ),
        queues,
        lambda each: sum(part["next_index"] for part in each["partitions"]),
    )


def _of_consumers(consumers: list[Any]) -> Iterator[Metric]:
    labels = ["consumer", "queue"]
    gauges: list[tuple[str, str, Value]] = [
        ("lag_rows", "Rows that a consumer has not processed.", lambda each: each["lag_rows"]),
        ("lag_bytes", "Their compressed size, about.", lambda each: each["lag_bytes"]),
        ("lag_seconds", "Age of the oldest of them.", lambda each: each["lag_seconds"]),
        ("stuck", "Whether rows wait and an offset has not moved for a minute.", lambda each: each["stuck"]),
        (
            "owned",
            "Whether a living query owns the consumer.",
            lambda each: bool((each["owner"] or {}).get("alive")),
        ),
    ]
    for name, text, value in gauges:
        yield _gauge(f"consumer_{name}", text, labels, consumers, value)


def _of_queries(queries: list[Any]) -> Iterator[Metric]:
    named = [{**each, "query": each["name"] or each["id"]} for each in queries]
    labels = ["query", "id"]
    states = [{**each, "state": state, "is": each["state"] == state} for each in named for state in _STATES]
    yield _gauge(
        "query_state",
        "1 for the state that a query is in.",
        [*labels, "state"],
        states,
        lambda each: each["is"],
    )
    gauges: list[tuple[str, str, Value]] = [
        ("batch", "The newest micro-batch or epoch.", lambda each: each["batch"]),
        (
            "rows_in_per_second",
            "Rows that a query takes in a second.",
            lambda each: each["rows_in_per_second"],
        ),
        ("duration_seconds", "Of the newest micro-batch or epoch.", _duration),
        ("state_rows", "Rows in a query's state.", lambda each: each["state_rows"]),
        ("state_bytes", "Bytes of a query's state.", lambda each: each["state_bytes"]),
        ("watermark_timestamp_seconds", "A query's watermark.", lambda each: _moment(each["watermark"])),
        (
            "updated_timestamp_seconds",
            "When a query was last heard of.",
            lambda each: _moment(each["updated_at"]),
        ),
    ]
    for name, text, value in gauges:
        yield _gauge(f"query_{name}", text, labels, named, value)
    latencies = [
        {**each, "quantile": quantile, "ms": (each["latency_ms"] or {}).get(key)}
        for each in named
        for quantile, key in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99"), ("1", "max"))
    ]
    yield _gauge(
        "query_latency_seconds", "From a row's making to its being seen, in the newest epoch.", [*labels, "quantile"], latencies,
        lambda each: None if each["ms"] is None else each["ms"] / 1000,
    )  # fmt: skip


def _gauge(name: str, text: str, labels: list[str], found: Iterable[Any], value: Value) -> Metric:
    return _family(GaugeMetricFamily(f"penstock_{name}", text, labels=labels), found, value)


def _family(family: Any, found: Iterable[Any], value: Value) -> Metric:
    for each in found:
        number = value(each)
        if number is not None:
            family.add_metric([str(each[label]) for label in family._labelnames], float(number))
    metric: Metric = family
    return metric


def _duration(query: Mapping[str, Any]) -> float | None:
    found = query["duration_ms"] or {}
    whole = found.get("triggerExecution", sum(found.values()) if found else None)
    return None if whole is None else whole / 1000


def _moment(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()
