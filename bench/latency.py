"""Continuous queries, compared with micro-batches without a pause between them.

The latency of a row is the time from just before its append until it is visible in the output queue. One
process appends the rows and another one observes the output, so that neither shares the driver's interpreter.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from bench.harness import Result, scratch, speed
from bench.spark_session import spark

RATE = 1_000
SECONDS, WARM_UP = 60, 15
RATES = (100, 300, 1_000, 2_000, 5_000, 20_000, 50_000, 100_000, 200_000)
INTERVALS = (5, 10, 20, 50, 100)
"""Milliseconds between epochs."""
BACKLOG = 5_000_000
RATES_PLOT = Path("bench/plots/latency-rates.png")
INTERVALS_PLOT = Path("bench/plots/latency-intervals.png")
SCHEMA = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64()), ("sent", pa.float64())]
)
CONTINUOUS, CONTINUOUS_10_MS = penstock.Trigger.continuous("100 ms"), penstock.Trigger.continuous("10 ms")
MICRO_BATCH = penstock.Trigger.processing_time()


@dataclass(frozen=True)
class Latency:
    """Percentiles in milliseconds."""

    p50: float
    p99: float
    rows: int


def transform(frame: DataFrame) -> DataFrame:
    """Apply a filter and two expressions."""
    filtered = frame.where("id % 10 != 3")
    return filtered.withColumns({"name": F.upper("name"), "amount": F.col("amount") * 2})


def at_least_once(url: str, name: str, *, p50: float, p99: float) -> list[Result]:
    """Compare latencies with at_least_once, where rows are visible when written. Bars are in milliseconds."""
    return _compare(url, name, "at_least_once", CONTINUOUS, p50=p50, p99=p99, min_ratio=10.0)


def exactly_once(url: str, name: str) -> list[Result]:
    """Compare latencies with exactly_once, where rows are visible when their epoch of 10 ms commits."""
    return _compare(url, name, "exactly_once", CONTINUOUS_10_MS, p50=15.0, p99=50.0, min_ratio=4.0)


def _compare(
    url: str,
    name: str,
    guarantee: str,
    trigger: penstock.Trigger,
    *,
    p50: float,
    p99: float,
    min_ratio: float,
) -> list[Result]:
    ours, peer = measure_latency(url, guarantee, trigger), measure_latency(url, guarantee, MICRO_BATCH)
    setup, note = f"{guarantee}, {RATE} appends/s, {name}", f"{ours.rows} rows"
    ratio = peer.p50 / ours.p50
    return [
        Result(f"p50 {setup}", ours.p50 / 1e3, peer.p50 / 1e3, ratio, f"<= {p50} ms", ours.p50 <= p50, note),
        Result(
            f"p99 {setup}",
            ours.p99 / 1e3,
            peer.p99 / 1e3,
            peer.p99 / ours.p99,
            f"<= {p99} ms",
            ours.p99 <= p99,
        ),
        Result(
            f"p50 against micro-batches, {setup}",
            ours.p50 / 1e3,
            peer.p50 / 1e3,
            ratio,
            f">= {min_ratio}",
            ratio >= min_ratio,
        ),
    ]


def idle(url: str, name: str) -> Result:
    """Measure the share of a core that an idle query uses, with all processes of its Spark application."""
    with _queues(url) as (store_url, source, out, folder):
        query = _query(store_url, "exactly_once", CONTINUOUS_10_MS, folder)
        try:
            source.append(_rows(0, 1000))
            _await_rows(out, 900)
            time.sleep(WARM_UP)
            before, start = _cpu_seconds(), time.perf_counter()
            time.sleep(SECONDS)
            share = (_cpu_seconds() - before) / (time.perf_counter() - start) * 100
        finally:
            query.stop()
    what = f"continuous query at rest, epochs of 10 ms, {name}"
    return Result(what, share, None, None, "<= 2 % of a core", share <= 2, unit="%")


def _cpu_seconds() -> float:
    own = psutil.Process()
    seconds = 0.0
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def rates(stores: Mapping[str, str]) -> list[Result]:
    """Measure latencies by the rate of appended rows, with both triggers, in several stores.

    Above 2,000 rows a second, there are 200 appends a second of several rows.
    """
    results: list[Result] = []
    lines: dict[str, list[Latency]] = {}
    for name, url in stores.items():
        latencies_by_kind: dict[str, list[Latency]] = {"continuous": [], "micro-batches": []}
        for rate in RATES:
            rows_per_append = 1 if rate <= 2_000 else rate // 200
            for kind, trigger in (("continuous", CONTINUOUS), ("micro-batches", MICRO_BATCH)):
                latencies_by_kind[kind].append(
                    measure_latency(
                        url, "at_least_once", trigger, rate=rate, rows_per_append=rows_per_append, seconds=10
                    )
                )
        lines |= {f"{kind}, {name}": latencies for kind, latencies in latencies_by_kind.items()}
        results += [
            Result(
                f"p50 at {rate:,} rows/s, {name}",
                ours.p50 / 1e3,
                peer.p50 / 1e3,
                peer.p50 / ours.p50,
                "none",
                met=True,
                note=f"p99 {ours.p99:.1f} ms against {peer.p99:.1f} ms",
            )
            for rate, ours, peer in zip(
                RATES, latencies_by_kind["continuous"], latencies_by_kind["micro-batches"], strict=True
            )
        ]
    _draw(RATES, lines, "rows offered a second", RATES_PLOT)
    return results


def intervals(stores: Mapping[str, str]) -> list[Result]:
    """Measure latencies with exactly_once by the interval of epochs, in several stores."""
    results: list[Result] = []
    lines: dict[str, list[Latency]] = {}
    for name, url in stores.items():
        latencies = [
            measure_latency(url, "exactly_once", penstock.Trigger.continuous(f"{interval} ms"), seconds=15)
            for interval in INTERVALS
        ]
        lines[name] = latencies
        results += [
            Result(
                f"p50 exactly_once, epochs of {interval} ms, {name}",
                latency.p50 / 1e3,
                None,
                None,
                "none",
                met=True,
                note=f"p99 {latency.p99:.1f} ms",
            )
            for interval, latency in zip(INTERVALS, latencies, strict=True)
        ]
    _draw(INTERVALS, lines, "milliseconds between epochs", INTERVALS_PLOT)
    return results


def _draw(
    x_values: Sequence[float], lines: Mapping[str, Sequence[Latency]], x_label: str, plot: Path
) -> None:
    """Draw a plot of the report."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, latencies in lines.items():
        (line,) = axes.loglog(
            x_values, [latency.p50 for latency in latencies], marker="o", label=f"{name}, p50"
        )
        axes.loglog(
            x_values,
            [latency.p99 for latency in latencies],
            ls="--",
            color=line.get_color(),
            label=f"{name}, p99",
        )
    axes.set(xlabel=x_label, ylabel="append to visible, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot, dpi=100)
    plt.close(figure)


def measure_latency(
    url: str,
    guarantee: str,
    trigger: penstock.Trigger,
    *,
    rate: int = RATE,
    rows_per_append: int = 1,
    seconds: int = SECONDS,
    partitions: int = 2,
) -> Latency:
    """Run a query at a rate of rows a second, and return its latency after the warm-up."""
    with scratch() as folder:
        store_url = url.format(folder=folder)
        with penstock.connect(store_url) as store:
            for queue in ("in", "out"):
                store.create_queue(queue, SCHEMA, partitions=partitions)
            store.create_consumer("bench").register("in")
            query = _query(store_url, guarantee, trigger, folder)
            try:
                return _observe_query(store_url, rate, rows_per_append, seconds)
            finally:
                query.stop()
                for queue in ("in", "out"):
                    store.drop_queue(queue, force=True)
                store.drop_consumer("bench")


def _query(url: str, guarantee: str, trigger: penstock.Trigger, folder: Path) -> penstock.Query:
    stream = penstock.stream(
        spark(pipelined=True), penstock.QueueSource("in", consumer="bench", url=url)
    ).transform(transform)
    pipeline = stream.write(penstock.QueueSink("out", url=url), guarantee=guarantee)
    return pipeline.start(checkpoint=folder / "checkpoint", trigger=trigger)


def _observe_query(url: str, rate: int, rows_per_append: int, seconds: int) -> Latency:
    total = rate * (seconds + WARM_UP)
    observer = _start_process("observe", url, total)
    producer = _start_process("produce", url, rate, rows_per_append, total)
    producer.communicate()
    try:
        out, _ = observer.communicate(timeout=120)
    finally:
        observer.kill()
    latencies = json.loads(out)
    # Skip the same rows in each query.
    measured = sorted(latencies[len(latencies) * WARM_UP // (seconds + WARM_UP) :])
    return Latency(statistics.median(measured), measured[int(len(measured) * 0.99)], len(measured))


def _start_process(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.latency", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def produce(url: str, rate: int, rows_per_append: int, total: int) -> None:
    """Append rows on schedule, however long an append takes."""
    queue = penstock.connect(url).queue("in")
    start = time.time()
    for first in range(0, total, rows_per_append):
        due = start + first / rate
        if (early := due - time.time()) > 0:
            time.sleep(early)
        queue.append(_rows(first, rows_per_append), partition=first // rows_per_append % queue.partitions)


def _rows(first: int, count: int) -> pa.Table | list[dict[str, object]]:
    now = time.time()
    if count == 1:
        return [{"id": first, "name": f"name {first}", "amount": first / 7, "sent": now}]
    ids = pa.array(np.arange(first, first + count))
    return pa.table([ids, ids.cast(pa.string()), ids.cast(pa.float64()), np.full(count, now)], schema=SCHEMA)


def observe(url: str, total: int) -> None:
    """Print the latency of each row in milliseconds, in the order in which the rows were seen."""
    queue = penstock.connect(url).queue("out")
    positions, seen = dict.fromkeys(range(queue.partitions), 0), []
    missing = total - sum(1 for i in range(total) if i % 10 == 3)
    with queue.watch() as watch:
        while missing > 0:  # rows may be repeated
            ends = watch.wait(positions, 1.0).ends
            now = time.time()
            for partition, end in ends.items():
                seen.append((now, partition, positions[partition], end))
                missing -= end - positions[partition]
            positions |= ends
    # Read the rows only now, because the observer must use little CPU while the query runs.
    sent = {part: queue.read(part, 0, end)["sent"].to_numpy() for part, end in positions.items()}
    latencies = [(now - sent[partition][start:end]) * 1000 for now, partition, start, end in seen]
    print(json.dumps(np.concatenate(latencies).round(3).tolist()))


def backlog(url: str, name: str) -> list[Result]:
    """Measure the seconds to process five million rows.

    The rows exist when the query starts, or are appended at once while it runs.
    """
    numbers = pa.array(np.arange(BACKLOG))
    amounts = numbers.cast(pa.float64())
    rows = pa.table([numbers, numbers.cast(pa.string()), amounts, amounts], schema=SCHEMA)
    return [
        speed(
            f"backlog of {BACKLOG:,} rows / micro-batches, {name}, {case}",
            partial(drain, url, CONTINUOUS, rows),
            partial(drain, url, MICRO_BATCH, rows),
            least=1.0,
            rounds=3,
        )
        for case, drain in (
            ("for a query that starts", _drain_at_start),
            ("for one that runs", _drain_while_running),
        )
    ]


def _drain_at_start(url: str, trigger: penstock.Trigger, rows: pa.Table) -> float:
    """Return the seconds from the start of the query to the last row."""
    with _queues(url) as (store_url, source, out, folder):
        source.append(rows)
        start = time.perf_counter()
        query = _query(store_url, "at_least_once", trigger, folder)
        try:
            _await_rows(out, _output_rows(rows))
            return time.perf_counter() - start
        finally:
            query.stop()


def _drain_while_running(url: str, trigger: penstock.Trigger, rows: pa.Table) -> float:
    """Return the seconds from the append to the last row."""
    with _queues(url) as (store_url, source, out, folder):
        query = _query(store_url, "at_least_once", trigger, folder)
        try:
            # Exclude the start and the warm-up of Spark's workers.
            for number in range(1, 11):
                source.append(rows.slice(0, 1000))
                _await_rows(out, number * 900)
            source.append(rows)
            start = time.perf_counter()
            _await_rows(out, 9000 + _output_rows(rows))
            return time.perf_counter() - start
        finally:
            query.stop()


@contextmanager
def _queues(url: str) -> Iterator[tuple[str, penstock.Queue, penstock.Queue, Path]]:
    """Create the source and the sink. The source has a key, so its rows are in both partitions."""
    with scratch() as folder:
        store_url = url.format(folder=folder)
        with penstock.connect(store_url) as store:
            source = store.create_queue("in", SCHEMA, partitions=2, key=["id"])
            out = store.create_queue("out", SCHEMA, partitions=2)
            store.create_consumer("bench").register("in")
            try:
                yield store_url, source, out, folder
            finally:
                for queue in ("in", "out"):
                    store.drop_queue(queue, force=True)
                store.drop_consumer("bench")


def _output_rows(rows: pa.Table) -> int:
    """Return the number of rows that pass the transformation."""
    return int(rows.num_rows - rows.num_rows // 10)


def _await_rows(queue: penstock.Queue, rows: int) -> None:
    while sum(part.next_index for part in queue.info().partitions) < rows:
        time.sleep(0.005)


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    commands: dict[str, Callable[..., object]] = {"produce": produce, "observe": observe}
    commands[kind](arguments[0], *map(int, arguments[1:]))
