"""Delay alerts, and their latency from the append of a row until its alert is visible in the output queue.

Each trigger runs with each guarantee, one after the other, on the same departures at the same rate. One
process appends the rows and another one watches for the alerts, so that neither shares an interpreter with
the query's driver."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather

import penstock
from examples.flights import DemoError
from examples.flights.dataset import FLIGHTS_SCHEMA, INSTANT
from penstock.errors import AlreadyExistsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEPARTURES = "departures"
"""The queue of departures."""
RATE = 300
"""Departures a second, each an append of its own."""
WARM_UP, MEASURED = 100, 900
"""Departures before the measurement, and those measured."""
LATE_MINUTES = 60
EPOCH = "100 ms"
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TIMEOUT_SECONDS = 60

_COLUMNS = ("flight_id", "carrier", "flight", "origin", "dest", "dep_delay")
_DEPARTURE = pa.schema([FLIGHTS_SCHEMA.field(name) for name in _COLUMNS])
_DEPARTURES_SCHEMA = pa.schema([*_DEPARTURE, pa.field("sent", INSTANT, nullable=False)])
"""With the time just before the append."""
_DEPARTURES_FILE, _RESULT_FILE = "departures.arrow", "latencies.json"


@dataclass(frozen=True)
class Case:
    """A trigger with a guarantee."""

    trigger: str
    guarantee: str

    @property
    def name(self) -> str:
        """The name of the query and of its output queue."""
        return f"alerts_{self.trigger}_{self.guarantee}"

    def to_trigger(self) -> penstock.Trigger:
        """Return the trigger: epochs, or micro-batches without a pause between them."""
        if self.trigger == "continuous":
            return penstock.Trigger.continuous(EPOCH)
        return penstock.Trigger.processing_time()


CASES = [
    Case(trigger, guarantee)
    for guarantee in ("exactly_once", "at_least_once")
    for trigger in ("continuous", "micro_batch")
]


@dataclass(frozen=True)
class Latency:
    """The measured latencies of one case."""

    trigger: str
    guarantee: str
    rate: float
    """Departures appended per second."""
    milliseconds: list[float]
    """Of each alert after the warm-up, in ascending order."""

    def percentile(self, share: float) -> float:
        """Return a percentile of the milliseconds; the share is from 0 to 1."""
        return self.milliseconds[min(int(len(self.milliseconds) * share), len(self.milliseconds) - 1)]

    def to_dict(self) -> dict[str, object]:
        """Return a summary for JSON."""
        return {
            "trigger": self.trigger,
            "guarantee": self.guarantee,
            "rate": round(self.rate, 1),
            "alerts": len(self.milliseconds),
            **{name: round(self.percentile(share), 3) for name, share in SHARES.items()},
        }


def late(departures: DataFrame) -> DataFrame:
    """Keep the departures that are more than an hour late."""
    return departures.where(f"dep_delay > {LATE_MINUTES}")


def choose_departures(year: pa.Table) -> pa.Table:
    """Return the consecutive departures for the queries, from where the year has the most alerts."""
    departed = year.filter(pc.is_valid(year["departed"])).sort_by(
        [("departed", "ascending"), ("flight_id", "ascending")]
    )
    count = min(WARM_UP + MEASURED, departed.num_rows)
    alerts = np.concatenate([[0], np.cumsum(departed["dep_delay"].to_numpy() > LATE_MINUTES)])
    first = int(np.argmax(alerts[count:] - alerts[: len(alerts) - count]))
    return departed.slice(first, count).select(_COLUMNS).cast(_DEPARTURE).combine_chunks()


def without_fsync(url: str) -> str:
    """Return a SQLite URL without an fsync at each commit (most of the latency), or another URL unchanged."""
    return f"{url}?synchronous=normal" if url.startswith("sqlite:") and "?" not in url else url


def describe_store(url: str) -> str:
    """Describe the kind of store in a few words."""
    kind = "SQLite" if url.startswith("sqlite:") else "PostgreSQL"
    return f"{kind} (synchronous=normal)" if "synchronous=normal" in without_fsync(url) else kind


def create_queues(store: penstock.Store) -> None:
    """Create the queue of departures and one of alerts for each case, empty."""
    for name in (DEPARTURES, *[case.name for case in CASES]):
        if name in store.queues():
            store.drop_queue(name, force=True)
        store.create_queue(name, _DEPARTURES_SCHEMA, partitions=2)


def write_departures(departures: pa.Table, folder: Path) -> None:
    """Write the departures for the job that measures."""
    pyarrow.feather.write_feather(departures, folder / _DEPARTURES_FILE, compression="uncompressed")


def read_latencies(folder: Path) -> list[Latency]:
    """Read what `measure` has written."""
    return [Latency(**fields) for fields in json.loads((folder / _RESULT_FILE).read_text())]


def delete_latencies(folder: Path) -> None:
    """Delete what `measure` has written, so that it measures again."""
    (folder / _RESULT_FILE).unlink(missing_ok=True)


def measure(spark: SparkSession, url: str, folder: Path, checkpoints: Path) -> None:
    """Run all cases and write their latencies, unless the folder has them."""
    result = folder / _RESULT_FILE
    if result.exists():
        return
    for case in CASES:
        shutil.rmtree(checkpoints / case.name, ignore_errors=True)
    departures = pyarrow.feather.read_table(folder / _DEPARTURES_FILE)
    with penstock.connect(url) as store, ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        create_queues(store)
        latencies = [_measure(spark, store, url, departures, case, checkpoints, pool) for case in CASES]
    written = result.with_suffix(".new")
    written.write_text(json.dumps([asdict(latency) for latency in latencies]))
    written.replace(result)


def _measure(
    spark: SparkSession,
    store: penstock.Store,
    url: str,
    departures: pa.Table,
    case: Case,
    checkpoints: Path,
    pool: Executor,
) -> Latency:
    with suppress(AlreadyExistsError):
        store.create_consumer(case.name)
    # After the departures of the cases before this one.
    store.consumer(case.name).register(DEPARTURES, start="latest")
    expected = pc.sum(pc.greater(departures["dep_delay"], LATE_MINUTES)).as_py()
    with _running(spark, url, case, checkpoints) as query:
        watching = pool.submit(watch_alerts, url, case.name, expected)
        pool.submit(append_departures, url, departures.slice(0, WARM_UP)).result()
        # The first micro-batch, or epoch, of a query takes longer than any other.
        query.processAllAvailable()
        start = time.time_ns() // 1000
        rate = pool.submit(append_departures, url, departures.slice(WARM_UP)).result()
        alerts = watching.result()
    return Latency(case.trigger, case.guarantee, rate, latencies_since(alerts, start))


@contextmanager
def _running(spark: SparkSession, url: str, case: Case, checkpoints: Path) -> Iterator[penstock.Query]:
    departures = penstock.stream(spark, penstock.QueueSource(DEPARTURES, consumer=case.name, url=url))
    pipeline = departures.transform(late).write(
        penstock.QueueSink(case.name, url=url), guarantee=case.guarantee
    )
    query = pipeline.start(name=case.name, checkpoint=checkpoints / case.name, trigger=case.to_trigger())
    try:
        yield query
    finally:
        query.stop()


def append_departures(url: str, departures: pa.Table) -> float:
    """Append departures on schedule, however long an append takes, and return the rate per second."""
    rows = departures.to_pylist()
    with penstock.connect(url) as store:
        queue = store.queue(DEPARTURES)
        start = time.monotonic()
        for number, row in enumerate(rows):
            early = start + number / RATE - time.monotonic()
            if early > 0:
                time.sleep(early)
            queue.append([{**row, "sent": datetime.now(UTC)}], partition=number % queue.partitions)
        return len(rows) / (time.monotonic() - start)


def watch_alerts(url: str, name: str, expected: int) -> pa.Table:
    """Return when each alert was `sent` and when it was `seen`, both in microseconds since the epoch."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with penstock.connect(url) as store:
        queue = store.queue(name)
        positions = dict.fromkeys(range(queue.partitions), 0)
        ranges: list[tuple[int, int, int, int]] = []
        with queue.watch() as watch:
            while sum(positions.values()) < expected:
                if time.monotonic() > deadline:
                    raise DemoError(f"The alerts of {name} did not all arrive within {TIMEOUT_SECONDS} s.")
                ends = watch.wait(positions, 1.0).ends
                now = time.time_ns() // 1000
                ranges += [(now, partition, positions[partition], end) for partition, end in ends.items()]
                positions |= ends
        # Rows are read only now: a watcher has to cost little while the query runs.
        tables = [
            pa.table({"sent": sent, "seen": pa.repeat(now, len(sent))})
            for now, partition, start, end in ranges
            for sent in [queue.read(partition, start, end)["sent"].cast(pa.int64())]
        ]
    return pa.concat_tables(tables)


def latencies_since(alerts: pa.Table, start: int) -> list[float]:
    """Return the milliseconds from `sent` to `seen`, of alerts sent since a time in microseconds, sorted."""
    later = alerts.filter(pc.greater_equal(alerts["sent"], start))
    micros = pc.subtract(later["seen"], later["sent"]).cast(pa.float64())
    milliseconds: list[float] = pc.divide(micros, 1000).sort().to_pylist()
    return milliseconds
