"""The demo: a year of flights becomes a change feed, is streamed exactly once, killed in the middle, and proved."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

import penstock as ps
from penstock.demo.alerts import departures, durability, quick
from penstock.demo.feed import Commit, Summary, commits, summary
from penstock.demo.flights import flights
from penstock.demo.latency import Latency, hand_over, measured
from penstock.demo.proof import Count, Proof, prove, prove_alerts
from penstock.demo.show import cancelled, latencies, latency_plot, plot, table
from penstock.demo.tables import BOARD, CANCELLED, DELAYS, HOURS, PREVIEW, contents, create
from penstock.errors import QueryFailed

JOB_SECONDS = 600


@dataclass(frozen=True)
class DemoResult:
    """What the demo found."""

    proofs: list[Proof]
    count: Count
    seconds: float
    """From the start of the first job, before the first commit, to the last row."""
    plot: Path
    latencies: list[Latency]
    """Of the delay alerts, by trigger and guarantee."""
    latency_plot: Path
    first_cancelled: ps.limits.LimitProgress
    """Of the query that takes the first cancelled flights, by its checkpoint."""

    @property
    def holds(self) -> bool:
        return all(proof.holds for proof in self.proofs)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {
            "holds": self.holds,
            "outputs": [asdict(proof) for proof in self.proofs],
            "rows": self.count.rows,
            "carryovers": self.count.carryovers,
            "updates": self.count.updates,
            "last_day": self.count.day,
            "seconds": round(self.seconds, 3),
            "plot": str(self.plot),
            "latencies": [each.to_dict() for each in self.latencies],
            "latency_plot": str(self.latency_plot),
            "first_cancelled": self.first_cancelled.to_dict(),
        }


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
    # The feed stands for one that others write: no wait for the disk at each of its commits. The jobs have it as it was given.
    with ps.connect(quick(where)) as store:
        started = time.perf_counter()
        feed = create(store, quick(where))
        with ThreadPoolExecutor(1) as beside, ExitStack() as jobs:
            over = threading.Event()

            def start() -> subprocess.Popen[bytes]:
                if over.is_set():
                    raise QueryFailed("the demo ended before its streaming job was started again")
                return jobs.enter_context(_job(where, checkpoints))

            first = start()
            jobs.callback(over.set)
            year = flights()
            alerted = departures(year)
            hand_over(alerted, folder)
            facts = summary(year, until=until)
            out.print("Writing a year of flights as a change feed, one commit for each simulated hour …")
            changes = commits(year, until=until)
            appending = _write(feed, islice(changes, facts.commits // 5))
            # The first job streams what there is and is killed in the middle of it, and the next one's Spark starts, all while
            # the rest is written.
            replacing = beside.submit(_replace, first, start, store, facts, out)
            appending += _write(feed, changes)
            out.print(f"  {facts.rows:,} change rows in {facts.commits:,} commits, {appending:.1f} s")
            last = replacing.result()
            _finish(last, checkpoints)
        seconds = time.perf_counter() - started
        proofs, count = prove(store, year)
        proofs += prove_alerts(store, alerted)
        picture = folder / "delays.png"
        plot(contents(store.queue(DELAYS)), picture)
        flown_not = contents(store.queue(CANCELLED))
    table(proofs, out)
    out.print("\nWhat the delays by carrier and hour would be in each output mode (ps.modes.preview):\n")
    out.print((folder / PREVIEW).read_text(), highlight=False, markup=False, soft_wrap=True)
    found, latency_picture = measured(folder), folder / "latencies.png"
    latencies(found, durability(where), out)
    latency_plot(found, latency_picture)
    out.print(f"Plot: {latency_picture}\n")
    taken = ps.limits.limit_progress(checkpoints / CANCELLED)
    cancelled(flown_not, taken, out)
    result = DemoResult(proofs, count, seconds, picture, found, latency_picture, taken)
    _conclude(result, out)
    return result


def _write(feed: ps.QueueFeed, changes: Iterable[Commit]) -> float:
    """Append commits; the seconds that took."""
    started = time.perf_counter()
    for commit in changes:
        rows = commit.rows.drop_columns(["_commit_version", "_commit_timestamp"])
        feed.append_commit(commit.version, commit.timestamp, rows)
    return time.perf_counter() - started


def _replace(
    job: subprocess.Popen[bytes],
    start: Callable[[], subprocess.Popen[bytes]],
    store: ps.Store,
    feed: Summary,
    out: Console,
) -> subprocess.Popen[bytes]:
    """Kill the job when it has an eighth of all changes on the board: another one, which is to go on."""
    out.print("Streaming it exactly once to the departures board and through a stateful aggregate …")
    _begin(job)
    # It stands by, since a start of Spark takes longer than anything else here.
    following = start()
    rows = sum(feed.changed.values())
    _wait_for(store, job, rows // 8)
    if job.poll() is not None:
        raise QueryFailed(
            "the streaming job ended by itself, before it was killed: see job.log beside the checkpoints"
        )
    _kill(job)
    done = store.queue(BOARD).info().rows
    out.print(
        f"  killed it (SIGKILL, driver and JVM) with {done:,} of {rows:,} changes on the board; another one goes on …"
    )
    return following


@contextmanager
def _job(url: str, checkpoints: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job in a process group of its own, together with its JVM and workers; it does not outlive the block.

    It starts Spark at once, and its queries when it is told to begin.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    with (checkpoints.parent / "job.log").open("ab") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "penstock.demo.job", url, str(checkpoints)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            _kill(job)


def _begin(job: subprocess.Popen[bytes]) -> None:
    assert job.stdin is not None
    with suppress(BrokenPipeError):
        job.stdin.close()


def _kill(job: subprocess.Popen[bytes]) -> None:
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _finish(job: subprocess.Popen[bytes], checkpoints: Path) -> None:
    _begin(job)
    if job.wait(JOB_SECONDS):
        raise QueryFailed(
            f"the streaming job ended with exit code {job.returncode}: see {checkpoints.parent}/job.log"
        )


def _wait_for(store: ps.Store, job: subprocess.Popen[bytes], rows: int) -> None:
    deadline = time.monotonic() + JOB_SECONDS
    while job.poll() is None and store.queue(BOARD).info().rows < rows:
        if time.monotonic() > deadline:
            raise QueryFailed(f"the streaming job made too little progress in {JOB_SECONDS} s")
        time.sleep(0.05)


def _conclude(result: DemoResult, out: Console) -> None:
    count = result.count
    out.print(
        f"{count.rows:,} change rows went in, {count.carryovers:,} carry-over rows were dropped, {count.updates:,} updates were "
        "found."
    )
    day = ", ".join(f"{number:,} {kind}" for kind, number in sorted(count.day.items()))
    out.print(f"Net changes of the last {HOURS} hours, as a batch: {day}.")
    out.print(
        f"All of it took {result.seconds:.1f} s ({count.rows / result.seconds:,.0f} change rows a second), the year through four queries, the alerts "
        f"through four more, two Spark starts and a kill included. Plot: {result.plot}"
    )
    verdict = "Every row arrived exactly once." if result.holds else "NOT every row arrived exactly once."
    out.print(verdict, style="bold green" if result.holds else "bold red")
