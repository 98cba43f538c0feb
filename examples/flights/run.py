"""A run of the demo: write the change feed, stream it, kill the job midway, and prove the outputs."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from rich.console import Console

import penstock
from examples.flights import DemoError
from examples.flights.alerts import (
    choose_departures,
    delete_latencies,
    describe_store,
    read_latencies,
    without_fsync,
    write_departures,
)
from examples.flights.change_feed import Commit, commits, summary
from examples.flights.dataset import load_flights
from examples.flights.job_process import JobProcess
from examples.flights.plots import plot_delays, plot_latencies
from examples.flights.proof import prove, prove_alerts
from examples.flights.report import print_story, write_report
from examples.flights.story import DemoResult, story
from examples.flights.tables import BOARD, CANCELLED, DELAYS, FLIGHTS, PREVIEW, create, read_queue


@dataclass(frozen=True)
class RunState:
    """The state of a run in its folder, by which the next run resumes one that was interrupted.

    Parameters
    ----------
    store
        The URL of the store, without its password.
    until
        The last simulated hour.
    killed
        The changes on the board when the job was killed; None before that.
    finished
        Whether the run was completed.
    """

    store: str
    until: int | None
    killed: int | None = None
    finished: bool = False

    def save(self, folder: Path) -> RunState:
        """Write the state to a folder."""
        file = _state_file(folder)
        written = file.with_suffix(".new")
        written.write_text(json.dumps(asdict(self)))
        written.replace(file)
        return self

    def load_interrupted(self, folder: Path) -> RunState | None:
        """Load the state of an interrupted run with the same store and last hour; None if there is none."""
        try:
            state = RunState(**json.loads(_state_file(folder).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        same = (state.store, state.until) == (self.store, self.until)
        return state if same and not state.finished else None


def _state_file(folder: Path) -> Path:
    return folder / "demo.json"


def run(
    folder: Path, *, url: str | None = None, until: int | None = None, console: Console | None = None
) -> DemoResult:
    """Run the demo, or resume an interrupted run in the same folder.

    Parameters
    ----------
    folder
        For the store, the checkpoints, the plots and the report; a finished run there is replaced.
    url
        The store; a SQLite file in the folder when None.
    until
        The last simulated hour; the whole year when None.
    console
        Where to print progress and the story.

    Raises
    ------
    DemoError
        When the streaming job fails.
    """
    console = console or Console()
    folder.mkdir(parents=True, exist_ok=True)
    url = url or f"sqlite:///{folder.resolve()}/penstock.db"
    # The feed stands for one that others write: its commits are not fsynced. The jobs get the URL as it is.
    with penstock.connect(without_fsync(url)) as store:
        demo = _Demo(folder, url, until, store, console)
        seconds = demo.stream()
        result = demo.collect(seconds)
    steps = story(result)
    print_story(steps, result, console)
    report = folder / "report.html"
    write_report(steps, result, report)
    console.print(f"The story with its plots, on one page: {report}")
    replace(demo.state, finished=True).save(folder)
    return result


class _Demo:
    """One run."""

    def __init__(
        self, folder: Path, url: str, until: int | None, store: penstock.Store, console: Console
    ) -> None:
        self._folder, self._url, self._until = folder, url, until
        self._store, self._console = store, console
        self._checkpoints = folder / "checkpoints"
        fresh = RunState(store.url, until)
        interrupted = fresh.load_interrupted(folder)
        self._resumed = interrupted is not None
        if interrupted is None:
            shutil.rmtree(self._checkpoints, ignore_errors=True)
            delete_latencies(folder)
            self._feed = create(store, without_fsync(url))
            self.state = fresh.save(folder)
        else:
            console.print("Resuming an earlier run that was interrupted.")
            self._feed, self.state = penstock.QueueFeed(FLIGHTS, without_fsync(url)), interrupted
        self._year = load_flights()
        self._departures = choose_departures(self._year)
        self._summary = summary(self._year, until=until)
        self._changes = sum(self._summary.changed.values())

    def stream(self) -> float:
        """Write the feed and stream it, with a kill in the middle; return the seconds until the last row."""
        started = time.perf_counter()
        write_departures(self._departures, self._folder)
        with ThreadPoolExecutor(1) as killer, ExitStack() as jobs:
            stopping = threading.Event()

            def start() -> JobProcess:
                if stopping.is_set():
                    raise DemoError("The demo ended before its streaming job was started again.")
                return jobs.enter_context(JobProcess(self._url, self._checkpoints, self._print_progress))

            first = start()
            jobs.callback(stopping.set)
            self._console.print(
                "Writing a year of flights as a change feed, one commit for each simulated hour …"
            )
            unwritten = self._unwritten()
            seconds = self._write(islice(unwritten, self._summary.commits // 5))
            # While the rest is written, the first job streams what there is and is killed in the middle of
            # it.
            successor = killer.submit(self._kill_midway, first, start) if self.state.killed is None else None
            seconds += self._write(unwritten)
            self._console.print(
                f"  {self._summary.rows:,} change rows in {self._summary.commits:,} commits, {seconds:.1f} s"
            )
            job = first if successor is None else successor.result()
            job.begin()
            job.wait(self._print_board)
        return time.perf_counter() - started

    def _unwritten(self) -> Iterator[Commit]:
        """Generate the commits that the feed does not have yet."""
        newest = self._feed.newest(-1)
        return (commit for commit in commits(self._year, until=self._until) if commit.version > newest)

    def _write(self, changes: Iterable[Commit]) -> float:
        """Append commits to the feed and return the seconds that took."""
        started = time.perf_counter()
        for commit in changes:
            rows = commit.rows.drop_columns(["_commit_version", "_commit_timestamp"])
            self._feed.append_commit(commit.version, commit.timestamp, rows)
        return time.perf_counter() - started

    def _on_board(self) -> int:
        return self._store.queue(BOARD).info().rows

    def _print_board(self) -> None:
        rows = self._on_board()
        if rows < self._changes:
            self._print_progress(f"{rows:,} of {self._changes:,} changes are on the board")

    def _print_progress(self, text: str) -> None:
        self._console.print(f"  {text} …", highlight=False, markup=False)

    def _kill_midway(self, job: JobProcess, start: Callable[[], JobProcess]) -> JobProcess:
        """Kill the job when an eighth of all changes are on the board, and return its successor."""
        self._console.print(
            "Streaming it exactly once to the departures board and through a stateful aggregate …"
        )
        job.begin()
        # The successor starts Spark already, since that takes longer than anything else here.
        successor = start()
        job.wait_until(lambda: self._on_board() >= self._changes // 8)
        job.kill()
        killed = self._on_board()
        self.state = replace(self.state, killed=killed).save(self._folder)
        self._console.print(
            f"  killed it (SIGKILL, driver and JVM) with {killed:,} of {self._changes:,} changes on the "
            "board; another one resumes …"
        )
        return successor

    def collect(self, seconds: float) -> DemoResult:
        """Collect the outputs, plot them, and prove that they are right."""
        proofs, count = prove(self._store, self._year)
        proofs += prove_alerts(self._store, self._departures)
        delays_plot, latency_plot = self._folder / "delays.png", self._folder / "latencies.png"
        plot_delays(read_queue(self._store.queue(DELAYS)), delays_plot)
        latencies = read_latencies(self._folder)
        plot_latencies(latencies, latency_plot)
        return DemoResult(
            proofs=proofs,
            count=count,
            feed=self._summary,
            killed=self.state.killed,
            seconds=seconds,
            resumed=self._resumed,
            store=describe_store(self._url),
            plot=delays_plot,
            preview=(self._folder / PREVIEW).read_text(),
            preview_picture=(self._folder / PREVIEW).with_suffix(".svg"),
            latencies=latencies,
            latency_plot=latency_plot,
            cancelled=read_queue(self._store.queue(CANCELLED)),
            limit=penstock.limits.limit_progress(self._checkpoints / CANCELLED),
        )
