"""Continuous queries, against micro-batches as fast as they go.

What is measured is the time from before a row's append to its being visible in the output queue. The rows
come from a process of their own and are looked for in another one, so that neither shares the driver's
interpreter.
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
CONTINUOUS, QUICK = penstock.Trigger.continuous("100 ms"), penstock.Trigger.continuous("10 ms")
MICRO_BATCH = penstock.Trigger.processing_time()


@dataclass(frozen=True)
class Latency:
    """Milliseconds."""

    p50: float
    p99: float
    rows: int


def work(frame: DataFrame) -> DataFrame:
    """A filter and two expressions."""
    kept = frame.where("id % 10 != 3")
    return kept.withColumns({"name": F.upper("name"), "amount": F.col("amount") * 2})


def at_least_once(url: str, name: str, *, p50: float, p99: float) -> list[Result]:
    """Visible when written; goals in milliseconds."""
    return _compare(url, name, "at_least_once", CONTINUOUS, p50=p50, p99=p99, faster=10.0)


def exactly_once(url: str, name: str) -> list[Result]:
    """Visible when the epoch of 10 ms commits."""
    return _compare(url, name, "exactly_once", QUICK, p50=15.0, p99=50.0, faster=4.0)


def _compare(
    url: str, name: str, guarantee: str, trigger: penstock.Trigger, *, p50: float, p99: float, faster: float
) -> list[Result]:
    ours, peer = measured(url, guarantee, trigger), measured(url, guarantee, MICRO_BATCH)
    what, note = f"{guarantee}, {RATE} appends/s, {name}", f"{ours.rows} rows"
    ratio = peer.p50 / ours.p50
    return [
        Result(f"p50 {what}", ours.p50 / 1e3, peer.p50 / 1e3, ratio, f"<= {p50} ms", ours.p50 <= p50, note),
        Result(
            f"p99 {what}",
            ours.p99 / 1e3,
            peer.p99 / 1e3,
            peer.p99 / ours.p99,
            f"<= {p99} ms",
            ours.p99 <= p99,
        ),
        Result(
            f"p50 against micro-batches, {what}",
            ours.p50 / 1e3,
            peer.p50 / 1e3,
            ratio,
            f">= {faster}",
            ratio >= faster,
        ),
    ]


def at_rest(url: str, name: str) -> Result:
    """The share of a core that a query takes which has nothing to do, with all processes of its Spark."""
    with _queues(url) as (where, source, out, folder):
        query = _query(where, "exactly_once", QUICK, folder)
        try:
            source.append(_rows(0, 1000))
            _await(out, 900)
            time.sleep(WARM_UP)
            before, began = _processor_seconds(), time.perf_counter()
            time.sleep(SECONDS)
            share = (_processor_seconds() - before) / (time.perf_counter() - began) * 100
        finally:
            query.stop()
    what = f"continuous query at rest, epochs of 10 ms, {name}"
    return Result(what, share, None, None, "<= 2 % of a core", share <= 2, unit="%")


def _processor_seconds() -> float:
    own = psutil.Process()
    taken = 0.0
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            taken += times.user + times.system
    return taken


def rates(stores: Mapping[str, str]) -> list[Result]:
    """Against the rate that is offered, with both triggers, in stores by name.

    Above 2,000 rows a second they come in 200 appends a second.
    """
    results: list[Result] = []
    lines: dict[str, list[Latency]] = {}
    for name, url in stores.items():
        found: dict[str, list[Latency]] = {"continuous": [], "micro-batches": []}
        for rate in RATES:
            rows_each = 1 if rate <= 2_000 else rate // 200
            for what, trigger in (("continuous", CONTINUOUS), ("micro-batches", MICRO_BATCH)):
                found[what].append(
                    measured(url, "at_least_once", trigger, rate=rate, rows_each=rows_each, seconds=10)
                )
        lines |= {f"{what}, {name}": latencies for what, latencies in found.items()}
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
            for rate, ours, peer in zip(RATES, found["continuous"], found["micro-batches"], strict=True)
        ]
    _draw(RATES, lines, "rows offered a second", RATES_PLOT)
    return results


def intervals(stores: Mapping[str, str]) -> list[Result]:
    """Exactly once, against the interval of epochs, in stores by name."""
    results: list[Result] = []
    lines: dict[str, list[Latency]] = {}
    for name, url in stores.items():
        found = [
            measured(url, "exactly_once", penstock.Trigger.continuous(f"{each} ms"), seconds=15)
            for each in INTERVALS
        ]
        lines[name] = found
        results += [
            Result(
                f"p50 exactly_once, epochs of {each} ms, {name}",
                latency.p50 / 1e3,
                None,
                None,
                "none",
                met=True,
                note=f"p99 {latency.p99:.1f} ms",
            )
            for each, latency in zip(INTERVALS, found, strict=True)
        ]
    _draw(INTERVALS, lines, "milliseconds between epochs", INTERVALS_PLOT)
    return results


def _draw(against: Sequence[float], lines: Mapping[str, Sequence[Latency]], what: str, plot: Path) -> None:
    """Into one of the report's plots."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, latencies in lines.items():
        (line,) = axes.loglog(against, [each.p50 for each in latencies], marker="o", label=f"{name}, p50")
        axes.loglog(
            against, [each.p99 for each in latencies], ls="--", color=line.get_color(), label=f"{name}, p99"
        )
    axes.set(xlabel=what, ylabel="append to visible, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot, dpi=100)
    plt.close(figure)


def measured(
    url: str,
    guarantee: str,
    trigger: penstock.Trigger,
    *,
    rate: int = RATE,
    rows_each: int = 1,
    seconds: int = SECONDS,
    partitions: int = 2,
) -> Latency:
    """One query, at a rate of rows a second in appends of some rows each; what it takes after the warm-up."""
    with scratch() as folder:
        where = url.format(folder=folder)
        with penstock.connect(where) as store:
            for queue in ("in", "out"):
                store.create_queue(queue, SCHEMA, partitions=partitions)
            store.create_consumer("bench").register("in")
            query = _query(where, guarantee, trigger, folder)
            try:
                return _watched(where, rate, rows_each, seconds)
            finally:
                query.stop()
                for queue in ("in", "out"):
                    store.drop_queue(queue, force=True)
                store.drop_consumer("bench")


def _query(url: str, guarantee: str, trigger: penstock.Trigger, folder: Path) -> penstock.Query:
    stream = penstock.stream(
        spark(pipelined=True), penstock.QueueSource("in", consumer="bench", url=url)
    ).transform(work)
    pipeline = stream.write(penstock.QueueSink("out", url=url), guarantee=guarantee)
    return pipeline.start(checkpoint=folder / "checkpoint", trigger=trigger)


def _watched(url: str, rate: int, rows_each: int, seconds: int) -> Latency:
    total = rate * (seconds + WARM_UP)
    observer = _process("observe", url, total)
    producer = _process("produce", url, rate, rows_each, total)
    producer.communicate()
    try:
        out, _ = observer.communicate(timeout=120)
    finally:
        observer.kill()
    taken = json.loads(out)
    # Of the same rows in each query.
    later = sorted(taken[len(taken) * WARM_UP // (seconds + WARM_UP) :])
    return Latency(statistics.median(later), later[int(len(later) * 0.99)], len(later))


def _process(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.latency", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def produce(url: str, rate: int, rows_each: int, total: int) -> None:
    """Appends on time, whatever an append takes."""
    queue = penstock.connect(url).queue("in")
    began = time.time()
    for first in range(0, total, rows_each):
        due = began + first / rate
        if (early := due - time.time()) > 0:
            time.sleep(early)
        queue.append(_rows(first, rows_each), partition=first // rows_each % queue.partitions)


def _rows(first: int, count: int) -> pa.Table | list[dict[str, object]]:
    now = time.time()
    if count == 1:
        return [{"id": first, "name": f"name {first}", "amount": first / 7, "sent": now}]
    ids = pa.array(np.arange(first, first + count))
    return pa.table([ids, ids.cast(pa.string()), ids.cast(pa.float64()), np.full(count, now)], schema=SCHEMA)


def observe(url: str, total: int) -> None:
    """The milliseconds of each row, in the order in which they were seen."""
    queue = penstock.connect(url).queue("out")
    positions, seen = dict.fromkeys(range(queue.partitions), 0), []
    missing = total - sum(1 for i in range(total) if i % 10 == 3)
    with queue.watch() as watch:
        while missing > 0:  # rows may come twice
            ends = watch.wait(positions, 1.0).ends
            now = time.time()
            for partition, end in ends.items():
                seen.append((now, partition, positions[partition], end))
                missing -= end - positions[partition]
            positions |= ends
    # Only now: while the query runs an observer has to cost little.
    sent = {part: queue.read(part, 0, end)["sent"].to_numpy() for part, end in positions.items()}
    taken = [(now - sent[partition][start:end]) * 1000 for now, partition, start, end in seen]
    print(json.dumps(np.concatenate(taken).round(3).tolist()))


def backlog(url: str, name: str) -> list[Result]:
    """Rows a second, the other way round, of five million rows.

    They are there when one query starts, and come all at once for one that runs.
    """
    numbers = pa.array(np.arange(BACKLOG))
    amounts = numbers.cast(pa.float64())
    rows = pa.table([numbers, numbers.cast(pa.string()), amounts, amounts], schema=SCHEMA)
    return [
        speed(
            f"backlog of {BACKLOG:,} rows / micro-batches, {name}, {when}",
            partial(drained, url, CONTINUOUS, rows),
            partial(drained, url, MICRO_BATCH, rows),
            least=1.0,
            rounds=3,
        )
        for when, drained in (
            ("for a query that starts", _drained),
            ("for one that runs", _drained_meanwhile),
        )
    ]


def _drained(url: str, trigger: penstock.Trigger, rows: pa.Table) -> float:
    """From the start of the query to the last row."""
    with _queues(url) as (where, source, out, folder):
        source.append(rows)
        began = time.perf_counter()
        query = _query(where, "at_least_once", trigger, folder)
        try:
            _await(out, _kept(rows))
            return time.perf_counter() - began
        finally:
            query.stop()


def _drained_meanwhile(url: str, trigger: penstock.Trigger, rows: pa.Table) -> float:
    """From the append to the last row."""
    with _queues(url) as (where, source, out, folder):
        query = _query(where, "at_least_once", trigger, folder)
        try:
            # Not for the start of Spark's workers, nor for their first steps.
            for warm in range(1, 11):
                source.append(rows.slice(0, 1000))
                _await(out, warm * 900)
            source.append(rows)
            began = time.perf_counter()
            _await(out, 9000 + _kept(rows))
            return time.perf_counter() - began
        finally:
            query.stop()


@contextmanager
def _queues(url: str) -> Iterator[tuple[str, penstock.Queue, penstock.Queue, Path]]:
    """The source, whose rows have keys and so lie in both of its partitions, and the sink."""
    with scratch() as folder:
        where = url.format(folder=folder)
        with penstock.connect(where) as store:
            source = store.create_queue("in", SCHEMA, partitions=2, key=["id"])
            out = store.create_queue("out", SCHEMA, partitions=2)
            store.create_consumer("bench").register("in")
            try:
                yield where, source, out, folder
            finally:
                for queue in ("in", "out"):
                    store.drop_queue(queue, force=True)
                store.drop_consumer("bench")


def _kept(rows: pa.Table) -> int:
    """What the transformation lets through."""
    return int(rows.num_rows - rows.num_rows // 10)


def _await(queue: penstock.Queue, rows: int) -> None:
    while sum(part.next_index for part in queue.info().partitions) < rows:
        time.sleep(0.005)


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    commands: dict[str, Callable[..., object]] = {"produce": produce, "observe": observe}
    commands[kind](given[0], *map(int, given[1:]))
