"""How long a delay alert takes: from before its row is appended to its being visible in the output queue.

Each trigger works with each guarantee, one after the other, on the same departures at the same rate. The rows come from a process
of their own and are looked for in another one, so that neither shares an interpreter with the query's driver.
"""

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
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather

import penstock as ps
from penstock.demo.alerts import CASES, DEPARTURES, LATE_MINUTES, RATE, WARM_UP, Case, create_queues, late
from penstock.errors import AlreadyExists, QueryFailed
from penstock.instants import now_micros

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FLIGHTS, _MEASURED = "departures.arrow", "latencies.json"
PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class Latency:
    """What the alerts of one case took."""

    trigger: str
    guarantee: str
    rate: float
    """Departures a second that were appended indeed."""
    milliseconds: list[float]
    """Of each alert after the warm-up, in ascending order."""

    def percentile(self, share: float) -> float:
        """Of the milliseconds; the share is from 0 to 1."""
        return self.milliseconds[min(int(len(self.milliseconds) * share), len(self.milliseconds) - 1)]

    def to_dict(self) -> dict[str, Any]:
        """In short, as JSON has it."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {
            "trigger": self.trigger,
            "guarantee": self.guarantee,
            "rate": round(self.rate, 1),
            "alerts": len(self.milliseconds),
            **{name: round(self.percentile(share), 3) for name, share in shares.items()},
        }


def forget(folder: Path) -> None:
    """Measure anew."""
    (folder / _MEASURED).unlink(missing_ok=True)


def hand_over(departures: pa.Table, folder: Path) -> None:
    """Leave the departures to the job that will measure."""
    pyarrow.feather.write_feather(departures, folder / _FLIGHTS, compression="uncompressed")


def measured(folder: Path) -> list[Latency]:
    """What the job has found."""
    return [Latency(**each) for each in json.loads((folder / _MEASURED).read_text())]


def measure(spark: SparkSession, url: str, folder: Path, checkpoints: Path) -> None:
    """Run the alerts through each trigger with each guarantee, and leave what they took in the folder, if it is not there."""
    if (folder / _MEASURED).exists():
        return
    for case in CASES:
        shutil.rmtree(checkpoints / case.name, ignore_errors=True)
    flights = pyarrow.feather.read_table(folder / _FLIGHTS)
    with ps.connect(url) as store, ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as others:
        create_queues(store)
        found = [_measure(spark, store, url, flights, case, checkpoints, others) for case in CASES]
    anew = (folder / _MEASURED).with_suffix(".new")
    anew.write_text(json.dumps([asdict(each) for each in found]))
    anew.replace(folder / _MEASURED)


def _measure(
    spark: SparkSession,
    store: ps.Store,
    url: str,
    flights: pa.Table,
    case: Case,
    checkpoints: Path,
    others: Executor,
) -> Latency:
    with suppress(AlreadyExists):
        store.create_consumer(case.name)
    # Behind the departures of the cases before.
    store.consumer(case.name).register(DEPARTURES, start="latest")
    expected = pc.sum(pc.greater(flights["dep_delay"], LATE_MINUTES)).as_py()
    with _running(spark, url, case, checkpoints) as query:
        watched = others.submit(observe, url, case.name, expected)
        others.submit(offer, url, flights.slice(0, WARM_UP)).result()
        # The first micro-batch, or epoch, of a query takes longer than any other.
        query.processAllAvailable()
        began = now_micros()
        rate = others.submit(offer, url, flights.slice(WARM_UP)).result()
        alerts = watched.result()
    return Latency(case.trigger, case.guarantee, rate, taken(alerts, began))


@contextmanager
def _running(spark: SparkSession, url: str, case: Case, checkpoints: Path) -> Iterator[ps.Query]:
    departures = ps.stream(spark, ps.QueueSource(DEPARTURES, consumer=case.name, url=url))
    pipeline = departures.transform(late).write(ps.QueueSink(case.name, url=url), guarantee=case.guarantee)
    query = pipeline.start(name=case.name, checkpoint=checkpoints / case.name, trigger=case.made())
    try:
        yield query
    finally:
        query.stop()


def offer(url: str, flights: pa.Table) -> float:
    """Append departures on time, whatever an append takes; how many a second it were."""
    rows = flights.to_pylist()
    with ps.connect(url) as store:
        queue = store.queue(DEPARTURES)
        began = time.monotonic()
        for number, row in enumerate(rows):
            early = began + number / RATE - time.monotonic()
            if early > 0:
                time.sleep(early)
            queue.append([{**row, "sent": datetime.now(UTC)}], partition=number % queue.partitions)
        return len(rows) / (time.monotonic() - began)


def observe(url: str, name: str, expected: int) -> pa.Table:
    """When each alert was sent and when it was seen, both in microseconds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with ps.connect(url) as store:
        queue = store.queue(name)
        positions = dict.fromkeys(range(queue.partitions), 0)
        seen: list[tuple[int, int, int, int]] = []
        with queue.watch() as watch:
            while sum(positions.values()) < expected:
                if time.monotonic() > deadline:
                    raise QueryFailed(f"the alerts of {name} did not all come within {PATIENCE_SECONDS} s")
                ends = watch.wait(positions, 1.0).ends
                now = now_micros()
                seen += [(now, partition, positions[partition], end) for partition, end in ends.items()]
                positions |= ends
        # Only now: while the query runs an observer has to cost little.
        tables = [
            pa.table({"sent": sent, "seen": pa.repeat(now, len(sent))})
            for now, partition, start, end in seen
            for sent in [queue.read(partition, start, end)["sent"].cast(pa.int64())]
        ]
    return pa.concat_tables(tables)


def taken(alerts: pa.Table, since: int) -> list[float]:
    """The milliseconds between `sent` and `seen`, in ascending order, of what was sent since then (in microseconds)."""
    later = alerts.filter(pc.greater_equal(alerts["sent"], since))
    micros = pc.subtract(later["seen"], later["sent"]).cast(pa.float64())
    milliseconds: list[float] = pc.divide(micros, 1000).sort().to_pylist()
    return milliseconds
