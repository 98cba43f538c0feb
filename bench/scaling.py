"""Curves of costs that should not grow with what is there already: a flat line is what is wanted."""

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
from bench.latency import CONTINUOUS, measured
from bench.spark_session import spark

_MEASURED = 200
_TAIL = 1_000
_QUICK = "?synchronous=normal"


@dataclass(frozen=True)
class Curve:
    """What something takes, in milliseconds, by how much is there.

    Parameters
    ----------
    name
        Of the benchmark.
    title, against
        What is measured, and by what it might grow.
    lines
        Points (how much is there, milliseconds) of each line, ascending.
    """

    name: str
    title: str
    against: str
    lines: dict[str, list[tuple[float, float]]]

    def growth(self, line: str) -> tuple[float, float]:
        """How many times as much is there at the end, and how many times as long it takes."""
        first, last = self.lines[line][0], self.lines[line][-1]
        return last[0] / first[0], last[1] / first[1]

    def text(self) -> str:
        """In a line for each of its lines."""
        told = []
        for line in self.lines:
            more, longer = self.growth(line)
            told.append(f"{self.name}, {line}: {more:,.0f} times {self.against}, {longer:.2f} times as long")
        return "\n".join(told)


def reads(pg_url: str) -> Curve:
    """The newest rows of a queue, and its oldest ones, against the rows that are in it."""
    lengths = (20_000, 100_000, 500_000, 2_500_000)
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, url in _stores(pg_url):
        with scratch() as folder, penstock.connect(url.format(folder=folder)) as store:
            queue = store.create_queue("bench_long", SCHEMA)
            there = 0
            for length in lengths:
                for first in range(there, length, 100_000):
                    queue.append(rows(100_000).slice(0, min(100_000, length - first)))
                there = length
                for which, start in (("newest", length - _TAIL), ("oldest", 0)):
                    took = _median(partial(queue.read, 0, start, start + _TAIL))
                    lines.setdefault(f"{which} {_TAIL:,} rows, {kind}", []).append((length, took))
            store.drop_queue("bench_long")
    return Curve("scaling-reads", f"Reading {_TAIL:,} rows", "rows in the queue", lines)


def appends(pg_url: str) -> Curve:
    """A row, against the segments of the queue.

    Maintenance merges them, so there are fewer than there were appends.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, url in _stores(pg_url):
        with scratch() as folder, penstock.connect(url.format(folder=folder)) as store:
            queue = store.create_queue("bench_many", SCHEMA)
            row, many = rows(1), rows(100_000)
            for segments in (10, 40, 160, 640):
                while queue.info().partitions[0].segments < segments:
                    queue.append(many)
                took = _median(partial(queue.append, row))
                lines.setdefault(kind, []).append((segments, took))
            store.drop_queue("bench_many")
    return Curve("scaling-appends", "Appending a row", "segments in the queue", lines)


def partitions(pg_url: str) -> Curve:
    """The median latency of a continuous query, against the partitions of its queues.

    There is one task on each of the machine's cores.
    """
    found = []
    for number in (1, 2, 4, 8):
        latency = measured(
            "sqlite:///{folder}/store.db" + _QUICK,
            "at_least_once",
            CONTINUOUS,
            rate=300,
            seconds=10,
            partitions=number,
        )
        found.append((float(number), latency.p50))
    return Curve(
        "scaling-partitions",
        "Latency of a continuous query, p50",
        "partitions",
        {"SQLite, 300 rows/s": found},
    )


def plans(pg_url: str) -> Curve:
    """The check of output modes, for each operator of the plan."""
    points = []
    for operators in (10, 30, 100, 300):
        frame = _wide(operators)
        took = _median(partial(penstock.modes.check, frame, sink="noop"), times=15)
        points.append((float(operators), took / operators))
    return Curve(
        "scaling-plans", "Checking the output modes, for each operator", "operators", {"check": points}
    )


def _wide(operators: int) -> DataFrame:
    frame = spark().readStream.format("rate").load()
    for number in range(operators - 2):
        frame = frame.where(F.col("value") != number)
    return frame.groupBy("value").count()


def _stores(pg_url: str) -> Iterable[tuple[str, str]]:
    return (("SQLite", "sqlite:///{folder}/store.db" + _QUICK), ("PostgreSQL", pg_url))


def _median(work: Callable[[], object], times: int = _MEASURED) -> float:
    """Milliseconds."""
    for _ in range(times // 10):
        work()
    return median(timed(work) for _ in range(times)) * 1000


CURVES = {"reads": reads, "appends": appends, "partitions": partitions, "plans": plans}


def draw(curve: Curve, file: Path) -> None:
    """The curve, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for line, points in curve.lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=line)
    axes.set(xscale="log", yscale="log", xlabel=curve.against, ylabel="milliseconds", title=curve.title)
    low, high = axes.get_ylim()
    # A flat line is to look flat.
    axes.set_ylim(min(low, high / 30), max(high, low * 30))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=100)
    plt.close(figure)
