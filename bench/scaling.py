"""Curves of costs that should not grow with the amount of existing data: a flat line is best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from bench.data import SCHEMA, rows
from bench.harness import scratch, timed
from bench.latency import CONTINUOUS, measure_latency
from bench.spark_session import spark

_REPETITIONS = 200
_READ_ROWS = 1_000
_SQLITE_OPTIONS = "?synchronous=normal"


@dataclass(frozen=True)
class Curve:
    """Milliseconds of an operation, by an amount of existing data.

    Parameters
    ----------
    name
        The name of the benchmark.
    title, against
        The operation, and the amount that it might depend on.
    lines
        Points (amount, milliseconds) of each line, in ascending order.
    """

    name: str
    title: str
    against: str
    lines: dict[str, list[tuple[float, float]]]

    def growth(self, line: str) -> tuple[float, float]:
        """Return by which factors the amount and the time grow from the first point to the last."""
        first, last = self.lines[line][0], self.lines[line][-1]
        return last[0] / first[0], last[1] / first[1]

    def text(self) -> str:
        """Describe the growth of each line in a line of text."""
        descriptions = []
        for line in self.lines:
            more, longer = self.growth(line)
            descriptions.append(
                f"{self.name}, {line}: {more:,.0f} times {self.against}, {longer:.2f} times as long"
            )
        return "\n".join(descriptions)


def reads(pg_url: str) -> Curve:
    """Measure reads of the newest and the oldest rows of a queue, by its number of rows."""
    lengths = (20_000, 100_000, 500_000, 2_500_000)
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, url in _stores(pg_url):
        with scratch() as folder, penstock.connect(url.format(folder=folder)) as store:
            queue = store.create_queue("bench_long", SCHEMA)
            existing = 0
            for length in lengths:
                for first in range(existing, length, 100_000):
                    queue.append(rows(100_000).slice(0, min(100_000, length - first)))
                existing = length
                for position, start in (("newest", length - _READ_ROWS), ("oldest", 0)):
                    milliseconds = _median_milliseconds(partial(queue.read, 0, start, start + _READ_ROWS))
                    lines.setdefault(f"{position} {_READ_ROWS:,} rows, {kind}", []).append(
                        (length, milliseconds)
                    )
            store.drop_queue("bench_long")
    return Curve("scaling-reads", f"Reading {_READ_ROWS:,} rows", "rows in the queue", lines)


def appends(pg_url: str) -> Curve:
    """Measure the append of a row, by the number of the queue's segments.

    Maintenance compacts segments, so there are fewer than appends.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, url in _stores(pg_url):
        with scratch() as folder, penstock.connect(url.format(folder=folder)) as store:
            queue = store.create_queue("bench_many", SCHEMA)
            row, large_append = rows(1), rows(100_000)
            for segments in (10, 40, 160, 640):
                while queue.info().partitions[0].segments < segments:
                    queue.append(large_append)
                milliseconds = _median_milliseconds(partial(queue.append, row))
                lines.setdefault(kind, []).append((segments, milliseconds))
            store.drop_queue("bench_many")
    return Curve("scaling-appends", "Appending a row", "segments in the queue", lines)


def partitions(pg_url: str) -> Curve:
    """Measure the median latency of a continuous query, by the number of partitions of its queues.

    There is a task for each core of the machine.
    """
    points = []
    for number in (1, 2, 4, 8):
        latency = measure_latency(
            "sqlite:///{folder}/store.db" + _SQLITE_OPTIONS,
            "at_least_once",
            CONTINUOUS,
            rate=300,
            seconds=10,
            partitions=number,
        )
        points.append((float(number), latency.p50))
    return Curve(
        "scaling-partitions",
        "Latency of a continuous query, p50",
        "partitions",
        {"SQLite, 300 rows/s": points},
    )


def plans(pg_url: str) -> Curve:
    """Measure the check of output modes for each operator of a plan."""
    points = []
    for operators in (10, 30, 100, 300):
        frame = _plan_of(operators)
        milliseconds = _median_milliseconds(partial(penstock.modes.check, frame, sink="noop"), times=15)
        points.append((float(operators), milliseconds / operators))
    return Curve(
        "scaling-plans", "Checking the output modes, for each operator", "operators", {"check": points}
    )


def _plan_of(operators: int) -> DataFrame:
    frame = spark().readStream.format("rate").load()
    for number in range(operators - 2):
        frame = frame.where(F.col("value") != number)
    return frame.groupBy("value").count()


def _stores(pg_url: str) -> Iterable[tuple[str, str]]:
    return (("SQLite", "sqlite:///{folder}/store.db" + _SQLITE_OPTIONS), ("PostgreSQL", pg_url))


def _median_milliseconds(work: Callable[[], object], times: int = _REPETITIONS) -> float:
    """Return the median time in milliseconds."""
    for _ in range(times // 10):
        work()
    return median(timed(work) for _ in range(times)) * 1000


CURVES = {"reads": reads, "appends": appends, "partitions": partitions, "plans": plans}


def draw(curve: Curve, file: Path) -> None:
    """Draw a curve with two logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for line, points in curve.lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=line)
    axes.set(xscale="log", yscale="log", xlabel=curve.against, ylabel="milliseconds", title=curve.title)
    low, high = axes.get_ylim()
    # Make sure that a flat line looks flat.
    axes.set_ylim(min(low, high / 30), max(high, low * 30))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=100)
    plt.close(figure)
