"""Resources of an application over time: memory, files, threads and processor time by kind of process."""

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
    """Resources of all processes of one kind at a time in seconds."""

    at: float
    megabytes: float
    """Resident memory."""
    files: int
    processes: int
    threads: int
    """The largest of all processes: a sum would grow with their number."""


def part_of(process: psutil.Process, driver: int) -> str:
    """Whether it is the driver's Python, a JVM, or a Python worker, those that make workers included."""
    if process.pid == driver:
        return "driver"
    return "jvm" if process.name() == "java" else "workers"


def sample(child: ChildProcess) -> dict[str, Sample]:
    """Return what each kind of process uses now."""
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


def processor_seconds(child: ChildProcess) -> dict[int, float]:
    """Return the processor time so far, by process."""
    found = {}
    for process in child.processes():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        found[process.pid] = times.user + times.system
    return found


def load(child: ChildProcess, seconds: float) -> float:
    """Return the share of one core that all processes take over some seconds."""
    before, began = processor_seconds(child), time.monotonic()
    time.sleep(seconds)
    after, ended = processor_seconds(child), time.monotonic()
    return sum(used - before.get(pid, 0.0) for pid, used in after.items()) / (ended - began)


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Return the growth per unit of time: the median over all pairs (Theil and Sen)."""
    x, y = np.asarray(at, dtype=float), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def rise(values: Sequence[float]) -> float:
    """How much more the last third usually is than the first one."""
    third = max(len(values) // 3, 1)
    return float(np.median(values[-third:]) - np.median(values[:third]))


def growth_an_hour(samples: Sequence[Sample], of: Callable[[Sample], float]) -> float:
    """Return the slope of a sampled value."""
    return slope([each.at for each in samples], [of(each) for each in samples]) * 3600
