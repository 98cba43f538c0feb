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

import pyarrow as pa
from rich.console import Console

import penstock as ps
from penstock.demo.feed import Summary, commits, summary
from penstock.demo.flights import flights
from penstock.demo.proof import Count, Proof, prove
from penstock.demo.show import plot, table
from penstock.demo.tables import BOARD, DELAYS, HOURS, contents, create
from penstock.errors import QueryFailed

JOB_SECONDS = 600


@dataclass(frozen=True)
class DemoResult:
    """What the demo found."""

    proofs: list[Proof]
    count: Count
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
        year = flights()
        appending = _write_feed(create(store, where), year, until, out)
        streaming, kills = _stream(store, where, checkpoints, summary(year, until=until), out)
        proofs, count = prove(store, year)
        picture = folder / "delays.png"
        plot(contents(store.queue(DELAYS)), picture)
    table(proofs, out)
    result = DemoResult(proofs, count, appending, streaming, kills, picture)
    _conclude(result, out)
    return result


def _write_feed(feed: ps.QueueFeed, year: pa.Table, until: int | None, out: Console) -> float:
    out.print("Writing a year of flights as a change feed, one commit for each simulated hour …")
    started, rows, count = time.perf_counter(), 0, 0
    for commit in commits(year, until=until):
        changes = commit.rows.drop_columns(["_commit_version", "_commit_timestamp"])
        rows += feed.append_commit(commit.version, commit.timestamp, changes).rows
        count += 1
    taken = time.perf_counter() - started
    out.print(f"  {rows:,} change rows in {count:,} commits, {taken:.1f} s: {rows / taken:,.0f} rows/s")
    return taken


def _stream(store: ps.Store, url: str, checkpoints: Path, feed: Summary, out: Console) -> tuple[float, int]:
    out.print("Streaming it exactly once to the departures board and through a stateful aggregate …")
    started = time.perf_counter()
    first = _job(url, checkpoints)
    rows = sum(feed.changed.values())
    _wait_for_half(store, first, rows)
    kills = 0
    if first.poll() is None:
        os.killpg(first.pid, signal.SIGKILL)
        kills = 1
        done = store.queue(BOARD).info().rows
        out.print(
            f"  killed it (SIGKILL, driver and JVM) with {done:,} of {rows:,} changes on the board; starting it again …"
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
    while job.poll() is None and store.queue(BOARD).info().rows < rows // 2:
        if time.monotonic() > deadline:
            raise QueryFailed(f"the streaming job made too little progress in {JOB_SECONDS} s")
        time.sleep(0.05)


def _conclude(result: DemoResult, out: Console) -> None:
    count = result.count
    speed = 2 * count.rows / result.stream_seconds
    out.print(
        f"{count.rows:,} change rows went in, {count.carryovers:,} carry-over rows were dropped, {count.updates:,} updates were "
        "found."
    )
    day = ", ".join(f"{number:,} {kind}" for kind, number in sorted(count.day.items()))
    out.print(f"Net changes of the last {HOURS} hours, as a batch: {day}.")
    out.print(
        f"Two queries in {result.stream_seconds:.1f} s, two Spark starts and {result.kills} kill included: {speed:,.0f} rows/s. "
        f"Plot: {result.plot}"
    )
    verdict = "Every row arrived exactly once." if result.holds else "NOT every row arrived exactly once."
    out.print(verdict, style="bold green" if result.holds else "bold red")
