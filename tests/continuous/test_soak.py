"""Continuous queries over a long time: their resource usage does not grow, and every row is written once.

Idle ones cost next to nothing. PENSTOCK_SOAK_SECONDS says how long the long one takes (`make test-soak`), an
hour by default.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import penstock
from tests.continuous.usage import MEGABYTE, PARTS, Sample, growth_an_hour, load, rise, sample, slope
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

PATIENCE = 120
SECONDS = int(os.environ.get("PENSTOCK_SOAK_SECONDS", "3600"))
SOURCE, SINK = pa.schema([("id", pa.int64())]), pa.schema([("id", pa.int64()), ("twice", pa.int64())])
ROWS, EACH_SECONDS = 3, 0.01
"""Rows appended to each queue at a time, and how often: 300 a second."""
LEAK_AN_HOUR = 20.0
"""Megabytes from which growth is a leak, however much memory wanders."""
WANDERS_SHORT, WANDERS_LONG = 12.0, 30.0
"""Megabytes by which the memory of each part may differ for no reason that lasts: merging takes more as
segments grow, up to their full size after tens of thousands of rows, and allocators give back what it took
at some other time."""
FILES_SHORT, FILES_LONG = 12, 2
"""So many more may be open: each of four writers opens another connection, of three files, when maintenance
and its task first meet, which may be late in a short test."""
RESTING = 0.05


@dataclass
class Copied:
    """A queue, and the one that a query copies it to."""

    store: penstock.Store
    guarantee: str
    rows: int = 0

    def __post_init__(self) -> None:
        self.queue = self.store.create_queue(f"{self.guarantee} in", SOURCE, partitions=2)
        self.sink = self.store.create_queue(self.guarantee, SINK, partitions=2)
        self.store.create_consumer(self.guarantee).register(f"{self.guarantee} in")

    def add(self) -> None:
        ids = range(self.rows, self.rows + ROWS)
        self.queue.append([{"id": i} for i in ids], partition=self.rows // ROWS % 2)
        self.rows += ROWS

    def expected(self) -> np.ndarray:
        ids = np.arange(self.rows)
        return ids[ids % 3 != 0]

    def complete(self) -> bool:
        return sum(part.next_index for part in self.sink.info().partitions) >= len(self.expected())

    def found(self) -> pa.Table:
        return pa.concat_tables([self.sink.read(partition, 0) for partition in range(2)]).sort_by("id")


@dataclass(frozen=True)
class Usage:
    """Samples after the warm-up."""

    parts: dict[str, list[Sample]]
    heap: list[tuple[float, float]]
    """The time in seconds, and the megabytes of the JVM's live heap."""

    def growths(self) -> dict[str, float]:
        """Return the growth in megabytes an hour."""
        found = {part: growth_an_hour(self.parts[part], lambda each: each.megabytes) for part in PARTS}
        return found | {"heap": slope(*zip(*self.heap, strict=True)) * 3600}

    def rises(self) -> dict[str, float]:
        return {
            f"{what} of {part}": rise([getattr(each, what) for each in self.parts[part]])
            for part in PARTS
            for what in ("files", "processes", "threads")
        }

    @property
    def hours(self) -> float:
        samples = self.parts["driver"]
        return (samples[-1].at - samples[0].at) / 3600


@pytest.fixture
def store(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.connect(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


def soaked(child: ChildProcess, copies: list[Copied], seconds: float) -> Usage:
    """Add rows for some seconds; return the usage after a warm-up of a third of it, ten minutes at most."""
    began = time.monotonic()
    warm, ended = began + min(seconds / 3, 600), began + seconds
    each = max(0.5, seconds / 400)
    sampled, next_at = [], warm
    for number in range(10**9):
        now = time.monotonic()
        if now >= ended:
            break
        if now >= next_at:
            sampled.append(sample(child))
            next_at += each
        for copy in copies:
            copy.add()
        time.sleep(max(0.0, began + (number + 1) * EACH_SECONDS - time.monotonic()))
    reported = [line.split() for line in child.output.splitlines() if line.startswith("HEAP ")]
    heap = [(float(at), int(used) / MEGABYTE) for _, at, used in reported if warm <= float(at) <= ended]
    return Usage({part: [found[part] for found in sampled] for part in PARTS}, heap)


@pytest.mark.parametrize(
    ("seconds", "wanders", "files"),
    [
        pytest.param(
            20, WANDERS_SHORT, FILES_SHORT, id="short", marks=[pytest.mark.soak, pytest.mark.timeout(400)]
        ),
        pytest.param(
            SECONDS,
            WANDERS_LONG,
            FILES_LONG,
            id="long",
            marks=[pytest.mark.soak, pytest.mark.timeout(SECONDS + 900)],
        ),
    ],
)
def test_resource_usage_does_not_grow_and_every_row_is_written_once(
    store: penstock.Store,
    tmp_path: Path,
    run_child: Callable[..., ChildProcess],
    seconds: int,
    wanders: float,
    files: int,
) -> None:
    copies = [Copied(store, guarantee) for guarantee in ("exactly_once", "at_least_once")]
    texts = [json.dumps([copy.guarantee, store.url, copy.guarantee, None]) for copy in copies]
    heap_seconds = 2 if seconds < 600 else 10
    # A heap that is there as a whole from the start leaves the JVM's memory to what is beside it; what is
    # alive in it is distinguished.
    options = {"SPARK_SUBMIT_OPTS": "-Xms1g -XX:+AlwaysPreTouch", "INTERVAL": "100 ms"}
    child = run_child(
        "tests.continuous.soaking", heap_seconds, tmp_path / "spark", "local[5]", *texts, env=options
    )
    child.wait_for_line("STARTED", PATIENCE)
    usage = soaked(child, copies, seconds)
    assert child.returncode is None, child.output
    wait_until(lambda: all(copy.complete() for copy in copies), PATIENCE, "all rows are through")
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(PATIENCE) == 0, child.output
    growths, rises = usage.growths(), usage.rises()
    last = {part: samples[-1] for part, samples in usage.parts.items()}
    print(f"\n{copies[0].rows:,} rows each; megabytes an hour: {growths}; rises: {rises}; last: {last}")
    for copy in copies:
        found = copy.found()
        assert np.array_equal(found["id"].to_numpy(), copy.expected())
        assert np.array_equal(found["twice"].to_numpy(), 2 * copy.expected())
    allowed = LEAK_AN_HOUR + wanders / usage.hours
    assert {name: value for name, value in growths.items() if value > allowed} == {}, allowed
    assert {name: value for name, value in rises.items() if value > files} == {}


@pytest.mark.soak
def test_an_idle_query_uses_almost_no_resources(
    store: penstock.Store, tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    copy = Copied(store, "exactly_once")
    text = json.dumps([copy.guarantee, store.url, copy.guarantee, None])
    child = run_child(
        "tests.continuous.soaking", "rest", tmp_path / "spark", "local[3]", text, env={"INTERVAL": "100 ms"}
    )
    child.wait_for_line("READY", PATIENCE)
    without = at_rest(child)
    os.kill(child.pid, signal.SIGUSR1)
    child.wait_for_line("STARTED", PATIENCE)
    copy.add()
    wait_until(copy.complete, PATIENCE, "the first rows are through")
    cost = at_rest(child) - without
    print(f"\nof one core: {without:.4f} without the query, {cost:.4f} more with it")
    assert child.returncode is None, child.output
    assert cost < RESTING


def at_rest(child: ChildProcess) -> float:
    """Return the processor time of some seconds: that of the middle third, as work may still be ending."""
    return statistics.median(load(child, 3.0) for _ in range(3))


def test_a_slope_is_not_affected_by_outliers() -> None:
    at = list(range(100))
    values = [50 + 0.5 * x for x in at]
    values[3], values[60], values[99] = 900.0, 0.0, 1234.0
    assert slope(at, values) == pytest.approx(0.5)
