"""Long runs of continuous queries: resource usage does not grow, and every row is written once.

PENSTOCK_SOAK_SECONDS is the duration of the long test of `make test-soak`, an hour by default.
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
from tests.continuous.resource_usage import (
    MEGABYTE,
    PARTS,
    Sample,
    growth_per_hour,
    increase,
    load,
    sample,
    slope,
)
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

TIMEOUT = 120
SECONDS = int(os.environ.get("PENSTOCK_SOAK_SECONDS", "3600"))
SOURCE, SINK = pa.schema([("id", pa.int64())]), pa.schema([("id", pa.int64()), ("twice", pa.int64())])
APPENDED_ROWS, APPEND_SECONDS = 3, 0.01
"""Rows of one append to each queue, and the seconds between two: 300 rows a second."""
LEAK_PER_HOUR = 20.0
"""Growth in megabytes per hour that is a leak, beyond all fluctuation."""
FLUCTUATION_SHORT, FLUCTUATION_LONG = 12.0, 30.0
"""Megabytes by which the memory of each part may fluctuate. Compaction needs more as segments grow, up to
their full size after tens of thousands of rows, and allocators return memory late."""
FILES_SHORT, FILES_LONG = 12, 2
"""Number of additional open files that is allowed. When maintenance and a task first run at once, each of
four writers opens another connection with three files. In a short test, that may be late."""
MAX_IDLE_LOAD = 0.05


@dataclass
class SoakedCopy:
    """Queue, and the queue that a query copies it to."""

    store: penstock.Store
    guarantee: str
    rows: int = 0

    def __post_init__(self) -> None:
        self.queue = self.store.create_queue(f"{self.guarantee} in", SOURCE, partitions=2)
        self.sink = self.store.create_queue(self.guarantee, SINK, partitions=2)
        self.store.create_consumer(self.guarantee).register(f"{self.guarantee} in")

    def add(self) -> None:
        ids = range(self.rows, self.rows + APPENDED_ROWS)
        self.queue.append([{"id": i} for i in ids], partition=self.rows // APPENDED_ROWS % 2)
        self.rows += APPENDED_ROWS

    def expected(self) -> np.ndarray:
        ids = np.arange(self.rows)
        return ids[ids % 3 != 0]

    def is_complete(self) -> bool:
        return sum(part.next_index for part in self.sink.info().partitions) >= len(self.expected())

    def read_sink(self) -> pa.Table:
        return pa.concat_tables([self.sink.read(partition, 0) for partition in range(2)]).sort_by("id")


@dataclass(frozen=True)
class Usage:
    """Samples after the warm-up."""

    parts: dict[str, list[Sample]]
    heap: list[tuple[float, float]]
    """Times in seconds, with the megabytes of the JVM's live heap."""

    def memory_growth(self) -> dict[str, float]:
        """Return the memory growth of each part in megabytes per hour."""
        growth = {part: growth_per_hour(self.parts[part], lambda sample: sample.megabytes) for part in PARTS}
        return growth | {"heap": slope(*zip(*self.heap, strict=True)) * 3600}

    def resource_increases(self) -> dict[str, float]:
        return {
            f"{resource} of {part}": increase([getattr(sample, resource) for sample in self.parts[part]])
            for part in PARTS
            for resource in ("files", "processes", "threads")
        }

    @property
    def hours(self) -> float:
        samples = self.parts["driver"]
        return (samples[-1].at - samples[0].at) / 3600


@pytest.fixture
def store(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.connect(f"sqlite:///{tmp_path}/store.db") as store:
        yield store


def append_and_sample(child: ChildProcess, copies: list[SoakedCopy], seconds: float) -> Usage:
    """Append rows for some seconds, and return the usage after a warm-up.

    The warm-up takes a third of the time, but at most ten minutes.
    """
    start = time.monotonic()
    warm_end, end = start + min(seconds / 3, 600), start + seconds
    interval = max(0.5, seconds / 400)
    samples, next_at = [], warm_end
    for number in range(10**9):
        now = time.monotonic()
        if now >= end:
            break
        if now >= next_at:
            samples.append(sample(child))
            next_at += interval
        for copy in copies:
            copy.add()
        time.sleep(max(0.0, start + (number + 1) * APPEND_SECONDS - time.monotonic()))
    reports = [line.split() for line in child.output.splitlines() if line.startswith("HEAP ")]
    heap = [(float(at), int(used) / MEGABYTE) for _, at, used in reports if warm_end <= float(at) <= end]
    return Usage({part: [usage[part] for usage in samples] for part in PARTS}, heap)


@pytest.mark.parametrize(
    ("seconds", "fluctuation", "files"),
    [
        pytest.param(
            20, FLUCTUATION_SHORT, FILES_SHORT, id="short", marks=[pytest.mark.soak, pytest.mark.timeout(400)]
        ),
        pytest.param(
            SECONDS,
            FLUCTUATION_LONG,
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
    fluctuation: float,
    files: int,
) -> None:
    copies = [SoakedCopy(store, guarantee) for guarantee in ("exactly_once", "at_least_once")]
    arguments = [json.dumps([copy.guarantee, store.url, copy.guarantee, None]) for copy in copies]
    heap_seconds = 2 if seconds < 600 else 10
    # If the whole heap is allocated at the start, growth of the JVM's memory is growth outside the heap. The
    # live heap is measured separately.
    options = {"SPARK_SUBMIT_OPTS": "-Xms1g -XX:+AlwaysPreTouch", "INTERVAL": "100 ms"}
    child = run_child(
        "tests.continuous.soak_child", heap_seconds, tmp_path / "spark", "local[5]", *arguments, env=options
    )
    child.wait_for_line("STARTED", TIMEOUT)
    usage = append_and_sample(child, copies, seconds)
    assert child.returncode is None, child.output
    wait_until(lambda: all(copy.is_complete() for copy in copies), TIMEOUT, "all rows are copied")
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(TIMEOUT) == 0, child.output
    memory_growth, resource_increases = usage.memory_growth(), usage.resource_increases()
    last = {part: samples[-1] for part, samples in usage.parts.items()}
    print(
        f"\n{copies[0].rows:,} rows each; megabytes per hour: {memory_growth}; "
        f"increases: {resource_increases}; last: {last}"
    )
    for copy in copies:
        table = copy.read_sink()
        assert np.array_equal(table["id"].to_numpy(), copy.expected())
        assert np.array_equal(table["twice"].to_numpy(), 2 * copy.expected())
    allowed = LEAK_PER_HOUR + fluctuation / usage.hours
    assert {name: value for name, value in memory_growth.items() if value > allowed} == {}, allowed
    assert {name: value for name, value in resource_increases.items() if value > files} == {}


@pytest.mark.soak
def test_an_idle_query_uses_almost_no_resources(
    store: penstock.Store, tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    copy = SoakedCopy(store, "exactly_once")
    argument = json.dumps([copy.guarantee, store.url, copy.guarantee, None])
    child = run_child(
        "tests.continuous.soak_child",
        "idle",
        tmp_path / "spark",
        "local[3]",
        argument,
        env={"INTERVAL": "100 ms"},
    )
    child.wait_for_line("READY", TIMEOUT)
    baseline = idle_load(child)
    os.kill(child.pid, signal.SIGUSR1)
    child.wait_for_line("STARTED", TIMEOUT)
    copy.add()
    wait_until(copy.is_complete, TIMEOUT, "the first rows are copied")
    cost = idle_load(child) - baseline
    print(f"\nof one core: {baseline:.4f} without the query, {cost:.4f} more with it")
    assert child.returncode is None, child.output
    assert cost < MAX_IDLE_LOAD


def idle_load(child: ChildProcess) -> float:
    """Return the median load of three periods, because work may still be ending in the first one."""
    return statistics.median(load(child, 3.0) for _ in range(3))


def test_a_slope_is_not_affected_by_outliers() -> None:
    times = list(range(100))
    values = [50 + 0.5 * x for x in times]
    values[3], values[60], values[99] = 900.0, 0.0, 1234.0
    assert slope(times, values) == pytest.approx(0.5)
