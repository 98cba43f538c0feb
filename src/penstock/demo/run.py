"""The demo: a year of flights becomes a change feed, is streamed exactly once, killed in the middle, and proved."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Console

import penstock as ps
from penstock.demo.alerts import departures, durability, quick
from penstock.demo.begun import Begun
from penstock.demo.feed import Commit, commits, summary
from penstock.demo.flights import flights
from penstock.demo.jobs import Job, running
from penstock.demo.latency import forget, hand_over, measured
from penstock.demo.proof import prove, prove_alerts
from penstock.demo.report import write_report
from penstock.demo.result import DemoResult
from penstock.demo.show import latency_plot, plot, show
from penstock.demo.story import story
from penstock.demo.tables import BOARD, CANCELLED, DELAYS, FLIGHTS, PREVIEW, contents, create
from penstock.errors import QueryFailed
from penstock.store.url import parse_url


def run(
    folder: Path, *, url: str | None = None, until: int | None = None, console: Console | None = None
) -> DemoResult:
    """Run the demo, or carry on one that ended early in the same folder.

    Parameters
    ----------
    folder
        For the store, the checkpoints, the plots and the report; what a finished run left there is replaced.
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
    folder.mkdir(parents=True, exist_ok=True)
    where = url or f"sqlite:///{folder.resolve()}/penstock.db"
    # The feed stands for one that others write: no wait for the disk at each of its commits. The jobs have it as it was given.
    with ps.connect(quick(where)) as store:
        demo = _Demo(folder, where, until, store, out)
        seconds = demo.stream()
        result = demo.found(seconds)
    told = story(result)
    show(told, result, out)
    report = folder / "report.html"
    write_report(told, result, report)
    out.print(f"The story with its plots, on one page: {report}")
    demo.begun.keep(folder)
    return result


class _Demo:
    """One run.

    Parameters
    ----------
    where
        The URL of the store.
    """

    def __init__(
        self, folder: Path, where: str, until: int | None, store: ps.Store, console: Console
    ) -> None:
        self._folder, self._where, self._until = folder, where, until
        self._store, self._out = store, console
        self._checkpoints = folder / "checkpoints"
        anew = Begun(str(parse_url(where)), until)
        left = anew.left(folder)
        self._resumed = left is not None
        if left is None:
            shutil.rmtree(self._checkpoints, ignore_errors=True)
            forget(folder)
            self._feed = create(store, quick(where))
            self.begun = anew.keep(folder)
        else:
            console.print("An earlier run ended early: this one goes on where it stands.")
            self._feed, self.begun = ps.QueueFeed(FLIGHTS, quick(where)), left
        self._year = flights()
        self._departures = departures(self._year)
        self._facts = summary(self._year, until=until)

    def stream(self) -> float:
        """Write the feed and stream it, with a kill in the middle; the seconds from the first job's start to the last row."""
        started = time.perf_counter()
        hand_over(self._departures, self._folder)
        with ThreadPoolExecutor(1) as beside, ExitStack() as jobs:
            over = threading.Event()

            def start() -> Job:
                if over.is_set():
                    raise QueryFailed("the demo ended before its streaming job was started again")
                return jobs.enter_context(running(self._where, self._checkpoints, self._told))

            first = start()
            jobs.callback(over.set)
            self._out.print(
                "Writing a year of flights as a change feed, one commit for each simulated hour …"
            )
            changes = self._changes()
            appending = self._write(islice(changes, self._facts.commits // 5))
            # The first job streams what there is and is killed in the middle of it, and the next one's Spark starts, all while
            # the rest is written.
            last = beside.submit(self._killed, first, start) if self.begun.killed is None else None
            appending += self._write(changes)
            self._out.print(
                f"  {self._facts.rows:,} change rows in {self._facts.commits:,} commits, {appending:.1f} s"
            )
            job = first if last is None else last.result()
            job.begin()
            job.finish(self._look)
        return time.perf_counter() - started

    def _changes(self) -> Iterator[Commit]:
        """What the feed has not got yet."""
        there = self._feed.newest(self._feed.oldest())
        return (commit for commit in commits(self._year, until=self._until) if commit.version > there)

    def _write(self, changes: Iterable[Commit]) -> float:
        """Append commits; the seconds that took."""
        started = time.perf_counter()
        for commit in changes:
            rows = commit.rows.drop_columns(["_commit_version", "_commit_timestamp"])
            self._feed.append_commit(commit.version, commit.timestamp, rows)
        return time.perf_counter() - started

    def _look(self) -> None:
        rows, there = sum(self._facts.changed.values()), self._store.queue(BOARD).info().rows
        if there < rows:
            self._told(f"{there:,} of {rows:,} changes are on the board")

    def _told(self, text: str) -> None:
        self._out.print(f"  {text} …", highlight=False, markup=False)

    def _killed(self, job: Job, start: Callable[[], Job]) -> Job:
        """Kill the job when it has an eighth of all changes on the board: another one, which is to go on."""
        self._out.print(
            "Streaming it exactly once to the departures board and through a stateful aggregate …"
        )
        job.begin()
        # It stands by, since a start of Spark takes longer than anything else here.
        following = start()
        rows = sum(self._facts.changed.values())
        job.wait_until(lambda: self._store.queue(BOARD).info().rows >= rows // 8)
        job.kill()
        done = self._store.queue(BOARD).info().rows
        self.begun = replace(self.begun, killed=done).keep(self._folder)
        self._out.print(
            f"  killed it (SIGKILL, driver and JVM) with {done:,} of {rows:,} changes on the board; another one goes on …"
        )
        return following

    def found(self, seconds: float) -> DemoResult:
        """What has come out, and the proof that it is right."""
        proofs, count = prove(self._store, self._year)
        proofs += prove_alerts(self._store, self._departures)
        delays, latencies = self._folder / "delays.png", self._folder / "latencies.png"
        plot(contents(self._store.queue(DELAYS)), delays)
        found = measured(self._folder)
        latency_plot(found, latencies)
        result = DemoResult(
            proofs,
            count,
            self._facts,
            self.begun.killed,
            seconds,
            self._resumed,
            durability(self._where),
            delays,
            (self._folder / PREVIEW).read_text(),
            (self._folder / PREVIEW).with_suffix(".svg"),
            found,
            latencies,
            contents(self._store.queue(CANCELLED)),
            ps.limits.limit_progress(self._checkpoints / CANCELLED),
        )
        self.begun = replace(self.begun, finished=True)
        return result
