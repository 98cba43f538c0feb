"""Resource usage of an application over time: memory, files, threads and CPU time, by kind of process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from tests.support.processes import ChildProcess

MEGABYTE = 2**20
PARTS = ("driver", "jvm", "workers")


@dataclass(frozen=True)
class Sample:
    """Resource usage of all processes of one kind, at a time in seconds."""

    at: float
    megabytes: float
    """Resident memory."""
    files: int
    processes: int
    threads: int
    """The largest number of any process. A sum would grow with the number of processes."""


def part_of(process: psutil.Process, driver: int) -> str:
    """Return whether a process is the driver, a JVM, or a Python worker or its daemon."""
    if process.pid == driver:
        return "driver"
    return "jvm" if process.name() == "java" else "workers"


def sample(child: ChildProcess) -> dict[str, Sample]:
    """Return the current usage of each kind of process."""
    used = {part: np.zeros(3) for part in PARTS}
    threads = dict.fromkeys(PARTS, 0)
    for process in child.processes():
        try:
            with process.oneshot():
                memory = process.memory_info().rss / MEGABYTE
                part, count = part_of(process, child.pid), process.num_threads()
                used[part] += (memory, process.num_fds(), 1)
            threads[part] = max(threads[part], count)
        except psutil.Error:
            continue
    now = time.monotonic()
    return {
        part: Sample(now, float(megabytes), int(files), int(processes), threads[part])
        for part, (megabytes, files, processes) in used.items()
    }


def cpu_seconds(child: ChildProcess) -> dict[int, float]:
    """Return the CPU time of each process so far."""
    seconds = {}
    for process in child.processes():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds[process.pid] = times.user + times.system
    return seconds


def load(child: ChildProcess, seconds: float) -> float:
    """Return the share of one core that all processes use during some seconds."""
    before, start = cpu_seconds(child), time.monotonic()
    time.sleep(seconds)
    after, end = cpu_seconds(child), time.monotonic()
    return sum(used - before.get(pid, 0.0) for pid, used in after.items()) / (end - start)


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the growth per unit of time, as the median over all pairs (Theil-Sen estimator)."""
    x, y = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def increase(values: Sequence[float]) -> float:
    """Return the difference between the medians of the last and the first third."""
    third = max(len(values) // 3, 1)
    return float(np.median(values[-third:]) - np.median(values[:third]))


def growth_per_hour(samples: Sequence[Sample], value_of: Callable[[Sample], float]) -> float:
    """Return the slope of a sampled value per hour."""
    return slope([sample.at for sample in samples], [value_of(sample) for sample in samples]) * 3600
