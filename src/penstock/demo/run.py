"""The demo: a year of flights becomes a change feed, is streamed exactly once, killed in the middle, and proved."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import penstock as ps
from penstock.demo.feed import commits
from penstock.demo.flights import flights
from penstock.demo.proof import Proof, prove
from penstock.demo.show import plot, table
from penstock.demo.tables import CHANGES, DELAYS, ROWS, contents, create
from penstock.errors import QueryFailed

JOB_SECONDS = 600


@dataclass(frozen=True)
class DemoResult:
    """What the demo found."""

    proofs: list[Proof]
    change_rows: int
    append_seconds: float
    stream_seconds: float
    kills: int
    plot: Path

    @property
    def holds(self) -> bool:
        return all(proof.holds for proof in self.proofs) and self.kills == 1


def run(
    folder: Path, *, url: str | None = None, until: int | None = None, console: Console | None = None
) -> DemoResult:
    """Run the demo.

    Parameters
    ----------
    folder
        For the store, the checkpoints and the plot; what an earlier run left there is replaced.
    url
        The store; a SQLite file in the folder when None.
    until
        The last simulated hour; the whole year when None.
    console
        Where to report.

    Raises
    ------
    QueryFailed
        When the streaming job fails by itself.
    """
    out = console or Console()
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    where = url or f"sqlite:///{folder.resolve()}/penstock.db"
    with ps.connect(where) as store:
        create(store)
        rows, appending = _write_feed(store, until, out)
        streaming, kills = _stream(store, where, checkpoints, rows, out)
        proofs = prove(store)
        picture = folder / "delays.png"
        plot(contents(store.queue(DELAYS)), picture)
    table(proofs, out)
    result = DemoResult(proofs, rows, appending, streaming, kills, picture)
    _conclude(result, out)
    return result


def _write_feed(store: ps.Store, until: int | None, out: Console) -> tuple[int, float]:
    queue = store.queue(CHANGES)
    out.print("Writing a year of flights as a change feed, one atomic append for each simulated hour …")
    year = flights()
    started, rows, count = time.perf_counter(), 0, 0
    for commit in commits(year, until=until):
        rows += queue.append(commit.rows).rows
        count += 1
    taken = time.perf_counter() - started
    out.print(f"  {rows:,} change rows in {count:,} commits, {taken:.1f} s: {rows / taken:,.0f} rows/s")
    return rows, taken


def _stream(store: ps.Store, url: str, checkpoints: Path, rows: int, out: Console) -> tuple[float, int]:
    out.print("Streaming it exactly once through a transformation and a stateful aggregate …")
    started = time.perf_counter()
    first = _job(url, checkpoints)
    _wait_for_half(store, first, rows)
    kills = 0
    if first.poll() is None:
        os.killpg(first.pid, signal.SIGKILL)
        kills = 1
        done = store.queue(ROWS).info().rows
        out.print(
            f"  killed it (SIGKILL, driver and JVM) with {done:,} of {rows:,} rows through; starting it again …"
        )
    first.wait()
    second = _job(url, checkpoints)
    if second.wait(JOB_SECONDS):
        raise QueryFailed(
            f"the streaming job ended with exit code {second.returncode}: see {checkpoints.parent}/job.log"
        )
    return time.perf_counter() - started, kills


def _job(url: str, checkpoints: Path) -> subprocess.Popen[bytes]:
    """The job in a process group of its own, together with its JVM and workers."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    with (checkpoints.parent / "job.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock.demo.job", url, str(checkpoints)],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_for_half(store: ps.Store, job: subprocess.Popen[bytes], rows: int) -> None:
    deadline = time.monotonic() + JOB_SECONDS
    while job.poll() is None and store.queue(ROWS).info().rows < rows // 2:
        if time.monotonic() > deadline:
            raise QueryFailed(f"the streaming job made too little progress in {JOB_SECONDS} s")
        time.sleep(0.05)


def _conclude(result: DemoResult, out: Console) -> None:
    speed = 2 * result.change_rows / result.stream_seconds
    out.print(
        f"{result.change_rows:,} change rows through two queries in {result.stream_seconds:.1f} s, two Spark starts and "
        f"{result.kills} kill included: {speed:,.0f} rows/s. Plot: {result.plot}"
    )
    verdict = "Every row arrived exactly once." if result.holds else "NOT every row arrived exactly once."
    out.print(verdict, style="bold green" if result.holds else "bold red")
