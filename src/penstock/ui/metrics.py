"""A snapshot for Prometheus, in its text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.ui.collector import Snapshot
from penstock.ui.queries import RECENT_BATCHES, STATES, WHOLE_BATCH

Thing = Mapping[str, Any]
_QUANTILES = {"0.5": "p50", "0.9": "p90", "0.99": "p99", "1": "max"}


@dataclass(frozen=True)
class _Kind:
    """A metric of things of one kind: a number of each, None for what is not known."""

    name: str
    text: str
    number: Callable[[Thing], float | None]
    counts: bool = False
    """Whether it only grows."""

    def of(self, things: Iterable[Thing], labels: tuple[str, ...]) -> Metric:
        make = CounterMetricFamily if self.counts else GaugeMetricFamily
        family: Any = make(f"penstock_{self.name}", self.text, labels=labels)
        for thing in things:
            number = self.number(thing)
            if number is not None:
                family.add_metric([str(thing[label]) for label in labels], float(number))
        metric: Metric = family
        return metric


_OF_QUEUES = (
    _Kind("queue_rows", "Rows that a queue holds.", lambda queue: queue["rows"]),
    _Kind("queue_bytes", "Compressed bytes that a queue holds.", lambda queue: queue["bytes"]),
    _Kind("queue_segments", "Segments that a queue has.", lambda queue: _sum(queue, "segments")),
    _Kind("queue_oldest_seconds", "Age of a queue's oldest row.", lambda queue: queue["oldest_seconds"]),
    _Kind(
        "queue_appended_rows",
        "Rows that were ever appended to a queue.",
        lambda queue: _sum(queue, "next_index"),
        counts=True,
    ),
)
_OF_CONSUMERS = (
    _Kind("consumer_lag_rows", "Rows that a consumer has not processed.", lambda each: each["lag_rows"]),
    _Kind("consumer_lag_bytes", "Their compressed size, about.", lambda each: each["lag_bytes"]),
    _Kind("consumer_lag_seconds", "Age of the oldest of them.", lambda each: each["lag_seconds"]),
    _Kind(
        "consumer_stuck",
        "Whether rows wait and an offset has not moved for a minute.",
        lambda each: each["stuck"],
    ),
    _Kind(
        "consumer_owned",
        "Whether a living query owns the consumer.",
        lambda each: bool(each["owner"] and each["owner"]["alive"]),
    ),
)
_OF_QUERIES = (
    _Kind("query_batch", "The newest micro-batch or epoch.", lambda query: query["batch"]),
    _Kind(
        "query_rows_in_per_second",
        "Rows that a query takes in a second.",
        lambda query: query["rows_in_per_second"],
    ),
    _Kind("query_duration_seconds", "Of the newest micro-batch or epoch.", lambda query: _duration(query)),
    _Kind("query_state_rows", "Rows in a query's state.", lambda query: query["state_rows"]),
    _Kind("query_state_bytes", "Bytes of a query's state.", lambda query: query["state_bytes"]),
    _Kind(
        "query_watermark_timestamp_seconds", "A query's watermark.", lambda query: _moment(query["watermark"])
    ),
    _Kind(
        "query_updated_timestamp_seconds",
        "When a query was last heard of.",
        lambda query: _moment(query["updated_at"]),
    ),
)
_STATE = _Kind("query_state", "1 for the state that a query is in.", lambda each: each["state"] == each["is"])
_LATENCY = _Kind(
    "query_latency_seconds",
    "From a row's making to its being seen, in the newest epoch.",
    lambda each: each["taken"],
)
_BATCH_DURATION = _Kind(
    "query_micro_batch_duration_seconds",
    f"How long micro-batches took, of the newest {RECENT_BATCHES} that were told; no row's latency.",
    lambda each: each["taken"],
)
_LETTERS = _Kind("dead_letter_rows", "Rows in a queue of dead letters.", lambda each: each["rows"])


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
    if not answers:
        return
    queues = [{**each, "queue": each["name"]} for each in snapshot["queues"]]
    queries = [{**each, "query": each["name"] or each["id"]} for each in snapshot["queries"]]
    yield from (kind.of(queues, ("queue",)) for kind in _OF_QUEUES)
    yield from (kind.of(snapshot["consumers"], ("consumer", "queue")) for kind in _OF_CONSUMERS)
    yield from (kind.of(queries, ("query", "id")) for kind in _OF_QUERIES)
    states = [{**query, "is": query["state"], "state": state} for query in queries for state in STATES]
    yield _STATE.of(states, ("query", "id", "state"))
    yield _LATENCY.of(_by_quantile(queries, "latency_ms"), ("query", "id", "quantile"))
    yield _BATCH_DURATION.of(_by_quantile(queries, "batch_duration_ms"), ("query", "id", "quantile"))
    yield _LETTERS.of(snapshot["dead_letters"], ("queue",))


def _by_quantile(queries: Iterable[Thing], spread: str) -> list[Thing]:
    """Seconds by quantile, where milliseconds are known by percentile."""
    return [
        {**query, "quantile": quantile, "taken": query[spread][key] / 1000}
        for query in queries
        if query[spread] is not None
        for quantile, key in _QUANTILES.items()
    ]


def _sum(queue: Thing, name: str) -> int:
    return sum(partition[name] for partition in queue["partitions"])


def _duration(query: Thing) -> float | None:
    """Of all phases; Spark's own sum where it has one."""
    found = query["duration_ms"]
    if not found:
        return None
    return float(found.get(WHOLE_BATCH, sum(found.values()))) / 1000


def _moment(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()
