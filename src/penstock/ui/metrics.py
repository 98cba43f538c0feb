"""Metrics of a snapshot in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.json_text import Json
from penstock.ui.queries import RECENT_BATCHES, STATES, WHOLE_BATCH
from penstock.ui.snapshots import Snapshot

_QUANTILES = {"0.5": "p50", "0.9": "p90", "0.99": "p99", "1": "max"}


@dataclass(frozen=True)
class _MetricKind:
    """A metric of rows of one kind, with a number for each row, or None if the number is unknown."""

    name: str
    text: str
    number: str | Callable[[Json], float | None]
    """The key of the number in a row, or a function that computes it."""
    is_counter: bool = False

    def of(self, rows: Iterable[Json], labels: tuple[str, ...]) -> Metric:
        family: CounterMetricFamily | GaugeMetricFamily
        metric_class = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        family = metric_class(f"penstock_{self.name}", self.text, labels=labels)
        label_sets: set[tuple[str, ...]] = set()
        for row in rows:
            number = row[self.number] if isinstance(self.number, str) else self.number(row)
            values = tuple(str(row[label]) for label in labels)
            # Truncated names may be equal, and Prometheus refuses a page with duplicate series.
            if number is not None and values not in label_sets:
                label_sets.add(values)
                family.add_metric(values, float(number))
        return family


def _partition_sum(name: str) -> Callable[[Json], float]:
    return lambda queue: sum(partition[name] for partition in queue["partitions"])


def _timestamp(name: str) -> Callable[[Json], float | None]:
    return lambda query: None if query[name] is None else datetime.fromisoformat(query[name]).timestamp()


def _is_owned(consumer: Json) -> bool:
    return bool(consumer["owner"] and consumer["owner"]["alive"])


def _duration(query: Json) -> float | None:
    """Return Spark's total duration, or the sum of the phases if there is none."""
    phases = query["duration_ms"]
    if not phases:
        return None
    return float(phases.get(WHOLE_BATCH, sum(phases.values()))) / 1000


_QUEUE_METRICS = (
    _MetricKind("queue_rows", "Rows that a queue holds.", "rows"),
    _MetricKind("queue_bytes", "Compressed bytes that a queue holds.", "bytes"),
    _MetricKind("queue_segments", "Segments of a queue.", _partition_sum("segments")),
    _MetricKind("queue_oldest_seconds", "Age of a queue's oldest row.", "oldest_seconds"),
    _MetricKind(
        "queue_appended_rows", "Rows ever appended to a queue.", _partition_sum("next_index"), is_counter=True
    ),
)
_CONSUMER_METRICS = (
    _MetricKind("consumer_lag_rows", "Rows that a consumer has not processed.", "lag_rows"),
    _MetricKind("consumer_lag_bytes", "Approximate compressed size of these rows.", "lag_bytes"),
    _MetricKind("consumer_lag_seconds", "Age of the oldest of these rows.", "lag_seconds"),
    _MetricKind("consumer_stuck", "Whether rows wait and an offset has not moved for a minute.", "stuck"),
    _MetricKind("consumer_owned", "Whether a living query owns the consumer.", _is_owned),
)
_QUERY_METRICS = (
    _MetricKind("query_batch", "The newest micro-batch or epoch.", "batch"),
    _MetricKind("query_rows_in_per_second", "Rows that a query reads per second.", "rows_in_per_second"),
    _MetricKind("query_duration_seconds", "Duration of the newest micro-batch or epoch.", _duration),
    _MetricKind("query_state_rows", "Rows in a query's state.", "state_rows"),
    _MetricKind("query_state_bytes", "Bytes of a query's state.", "state_bytes"),
    _MetricKind("query_watermark_timestamp_seconds", "A query's watermark.", _timestamp("watermark")),
    _MetricKind(
        "query_finalized_until_timestamp_seconds",
        "Time before which a query has all commits of its change feeds.",
        _timestamp("finalized_until"),
    ),
    _MetricKind(
        "query_updated_timestamp_seconds", "Time of a query's last report.", _timestamp("updated_at")
    ),
)
_QUERY_STATE = _MetricKind("query_state", "1 for the state that a query is in.", "is_in_state")
_LATENCY = _MetricKind(
    "query_latency_seconds", "Time from a row's append until it is visible, in the newest epoch.", "seconds"
)
_BATCH_DURATION = _MetricKind(
    "query_micro_batch_duration_seconds",
    f"Duration of micro-batches, of the newest {RECENT_BATCHES} that were reported; not the latency of rows.",
    "seconds",
)
_OMITTED = _MetricKind(
    "left_out_records", "Records of a kind that are not shown, because there are too many of them.", "count"
)
_DEAD_LETTERS = _MetricKind("dead_letter_rows", "Rows in a queue of dead letters.", "rows")


class _SnapshotCollector:
    """The metrics of one snapshot, for a registry."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return _metrics(self._snapshot)


def exposition(snapshot: Snapshot) -> bytes:
    """Return the metrics of a snapshot; if the store does not answer, only ``penstock_store_up``."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry)


def _metrics(snapshot: Snapshot) -> Iterator[Metric]:
    answers = snapshot["store"]["error"] is None
    yield GaugeMetricFamily("penstock_store_up", "Whether the store answers.", value=float(answers))
    if not answers:
        return
    yield GaugeMetricFamily(
        "penstock_unreadable_records",
        "Records of the store that are not shown, because they are not what Penstock writes.",
        value=float(snapshot["unreadable"]),
    )
    omitted = [{"kind": kind, "count": count} for kind, count in snapshot["left_out"].items()]
    yield _OMITTED.of(omitted, ("kind",))
    queues = [{**queue, "queue": queue["name"]} for queue in snapshot["queues"]]
    queries = [{**query, "query": query["name"] or query["id"]} for query in snapshot["queries"]]
    yield from (kind.of(queues, ("queue",)) for kind in _QUEUE_METRICS)
    yield from (kind.of(snapshot["consumers"], ("consumer", "queue")) for kind in _CONSUMER_METRICS)
    yield from (kind.of(queries, ("query", "id")) for kind in _QUERY_METRICS)
    states = [
        {**query, "state": state, "is_in_state": query["state"] == state}
        for query in queries
        for state in STATES
    ]
    yield _QUERY_STATE.of(states, ("query", "id", "state"))
    yield _LATENCY.of(_by_quantile(queries, "latency_ms"), ("query", "id", "quantile"))
    yield _BATCH_DURATION.of(_by_quantile(queries, "batch_duration_ms"), ("query", "id", "quantile"))
    yield _DEAD_LETTERS.of(snapshot["dead_letters"], ("queue",))


def _by_quantile(queries: Iterable[Json], percentiles_key: str) -> list[Json]:
    """Return a row in seconds for each quantile, from milliseconds by percentile."""
    return [
        {**query, "quantile": quantile, "seconds": query[percentiles_key][key] / 1000}
        for query in queries
        if query[percentiles_key] is not None
        for quantile, key in _QUANTILES.items()
        if query[percentiles_key][key] is not None
    ]
