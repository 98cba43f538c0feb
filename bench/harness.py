"""Measures Penstock and a peer in turn, and reports the median of each and the ratio of the medians."""

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
    """Comparison with a peer, or a figure without a peer.

    The values are medians. The ratio is peer / ours, so Penstock is faster if it is above 1.
    """

    name: str
    ours: float
    peer: float | None
    ratio: float | None
    bar: str
    """The bar for the ratio, or for our own value if the bar has a unit."""
    met: bool
    note: str = ""
    unit: str = "s"

    def line(self) -> str:
        verdict = "met" if self.met else "MISSED"
        ratio = "" if self.ratio is None else f"ratio {self.ratio:>5.2f} "
        return (
            f"{self.name:<44} ours {format_value(self.ours, self.unit):>10}   "
            f"peer {format_value(self.peer, self.unit):>10}   "
            f"{ratio}(bar {self.bar}: {verdict}) {self.note}"
        )


def format_value(value: float | None, unit: str) -> str:
    """Format a value with its unit."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value:,.2f} s" if value >= 1 else f"{value * 1000:,.1f} ms"
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:,.1f} {unit}"


def speed(
    name: str, ours: Callable[[], float], peer: Callable[[], float], *, least: float, rounds: int = ROUNDS
) -> Result:
    """Compare speeds. Ours must be at least ``least`` times the peer's."""
    our_seconds, peer_seconds = pairs(ours, peer, rounds)
    return Result(
        name,
        our_seconds,
        peer_seconds,
        peer_seconds / our_seconds,
        f">= {least}",
        peer_seconds / our_seconds >= least,
    )


def bounded(
    name: str, ours: float, most: float | None, unit: str, *, peer: float | None = None, note: str = ""
) -> Result:
    """Report a value that must be at most ``most``, unless that is None. A peer has no bar."""
    ratio = None if peer is None else peer / ours
    bar = "none" if most is None else f"<= {most:g} {unit}"
    return Result(name, ours, peer, ratio, bar, most is None or ours <= most, note, unit)


def pairs(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Run both in turn after a warm-up, and return their medians. Each call returns its seconds."""
    ours(), peer()
    seconds = [(ours(), peer()) for _ in range(rounds)]
    return statistics.median(pair[0] for pair in seconds), statistics.median(pair[1] for pair in seconds)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory() -> int:
    """Return the peak memory of this process in bytes.

    ``ru_maxrss`` would include the memory of the parent process before ``exec``.
    """
    return _peak_of(Path("/proc/self"))


def _peak_of(process: Path) -> int:
    return int((process / "status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def worker_peaks() -> dict[int, int]:
    """Return the peak memory of each Python worker of Spark on this machine in bytes, by process id."""
    peaks = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"pyspark.daemon" in (folder / "cmdline").read_bytes():
                peaks[int(folder.name)] = _peak_of(folder)
    return peaks


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary folder, and delete it in the end."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
