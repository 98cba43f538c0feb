"""Timing in pairs: ours and the peer in turn, the median of each, and the ratio of the medians."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 7


@dataclass(frozen=True)
class Result:
    """One comparison, or a figure without a peer.

    What is measured are medians; the ratio is peer / ours: more than 1 is faster than the peer.
    """

    name: str
    ours: float
    peer: float | None
    ratio: float | None
    bar: str
    """Of the ratio; of ours where it has a unit."""
    met: bool
    note: str = ""
    unit: str = "s"

    def line(self) -> str:
        verdict = "met" if self.met else "MISSED"
        ratio = "" if self.ratio is None else f"ratio {self.ratio:>5.2f} "
        return (
            f"{self.name:<44} ours {shown(self.ours, self.unit):>10}   "
            f"peer {shown(self.peer, self.unit):>10}   "
            f"{ratio}(bar {self.bar}: {verdict}) {self.note}"
        )


def shown(value: float | None, unit: str) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value:,.2f} s" if value >= 1 else f"{value * 1000:,.1f} ms"
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:,.1f} {unit}"


def speed(
    name: str, ours: Callable[[], float], peer: Callable[[], float], *, least: float, rounds: int = ROUNDS
) -> Result:
    """Ours must reach ``least`` times the peer's speed."""
    mine, other = pairs(ours, peer, rounds)
    return Result(name, mine, other, other / mine, f">= {least}", other / mine >= least)


def bounded(
    name: str, ours: float, most: float | None, unit: str, *, peer: float | None = None, note: str = ""
) -> Result:
    """Ours must be at most ``most``, unless there is no bar; a peer is only compared with it."""
    ratio = None if peer is None else peer / ours
    bar = "none" if most is None else f"<= {most:g} {unit}"
    return Result(name, ours, peer, ratio, bar, most is None or ours <= most, note, unit)


def pairs(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[float, float]:
    """The medians of both, run in turn after one warm-up; each call returns the seconds that count."""
    ours(), peer()
    taken = [(ours(), peer()) for _ in range(rounds)]
    return statistics.median(t[0] for t in taken), statistics.median(t[1] for t in taken)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory() -> int:
    """The most bytes that this process has had in memory.

    ``ru_maxrss`` would count those of its parent from before ``exec``.
    """
    return _peak(Path("/proc/self"))


def _peak(process: Path) -> int:
    return int((process / "status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def worker_peaks() -> dict[int, int]:
    """The most bytes that each Python worker of this machine's Spark has had in memory, by process id."""
    peaks = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"pyspark.daemon" in (folder / "cmdline").read_bytes():
                peaks[int(folder.name)] = _peak(folder)
    return peaks


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
