"""A query whose real drivers are killed, suspended, taken over from and disconnected during an audit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg

import penstock
from penstock.store.url import parse_url
from tests.crash.audit_clients import (
    SCHEMA,
    Auditor,
    EventLog,
    Producer,
    SharedHistory,
    SnapshotReader,
)
from tests.crash.audited import CONSUMER, CONTINUOUS, MICRO_BATCH, SINK, SOURCE, Query
from tests.support.auditor import FIRST_FOREIGN_ID, History, missing_rows
from tests.support.processes import ChildProcess
from tests.support.sql_tables import named
from tests.support.waiting import wait_until

TABLE = "audited"
PROGRESS_SECONDS = 90.0
"""How soon after a disturbance the query has to write rows again, the start of a driver included."""
CATCH_UP_SECONDS = 90.0
"""How soon after the last disturbance the query has to have caught up."""
ENDING_SECONDS = 90.0
"""How soon a driver has to end that was asked to, or that another one has taken over from."""
TAKE_OVER_SECONDS = 45.0
"""How long a suspended driver waits at most for its successor to start."""
AIMING_SECONDS = 3.0
MOST_PARTITIONS = 9
RERUNS = 2
"""How often a disturbance may make a living driver write rows again: it may break two attempts."""


@dataclass(frozen=True)
class Plan:
    """What is run, and how long it is disturbed."""

    store: str
    sink: str
    """``keyed`` or ``table``."""
    guarantee: str
    engine: str
    """The first one."""
    seconds: float = 0.0
    """For how long new disturbances begin."""
    order: Sequence[str] | None = None
    """These kinds of disturbances, once; when None, all that make sense, in rounds."""
    aimed: float = 0.6
    """How many of the kills and pauses wait for a commit."""

    def __str__(self) -> str:
        return f"{self.store}-{self.sink}-{self.guarantee}-{self.engine}"

    @property
    def ends(self) -> list[str]:
        """What ends a driver, so that another one has to start."""
        return ["kill_all", "kill_all", "kill_parent", "take_over", "restart"]

    @property
    def hindrances(self) -> list[str]:
        """What a driver lives through."""
        kinds = ["pause_all", "pause_workers"]
        if self.store == "postgresql":
            kinds.append("end_sessions")
        if self.sink == "keyed":
            kinds.append("grow_sink")
        return kinds


class Driver:
    """A child process that runs the query."""

    def __init__(self, number: int, engine: str, child: ChildProcess) -> None:
        self.number, self.engine, self.child = number, engine, child
        self.paused = False
        self.end_noted = False

    def __str__(self) -> str:
        return f"driver {self.number} ({self.engine}, process {self.child.pid})"

    @property
    def alive(self) -> bool:
        return self.child.returncode is None

    @property
    def started(self) -> bool:
        return "\nSTARTED " in self.child.output

    @property
    def end(self) -> str:
        """How it ended, in a line."""
        lines = self.child.output.splitlines()
        failure = next((line for line in lines if line.startswith("FAILED ")), "")
        return f"with {self.child.returncode} {failure[:400]}".rstrip()

    def workers(self) -> list[psutil.Process]:
        """The Python processes of tasks, of readers and of sinks."""
        workers = []
        for process in self.child.processes():
            with suppress(psutil.Error):
                # The driver's own children are the JVM and the process that forks workers
                # (`tests.support.warm`).
                if process.pid != self.child.pid and process.ppid() != self.child.pid:
                    workers.append(process)
        return workers


class Audit:
    """One query under disturbances.

    A driver that ends is started again with the same checkpoint, as by any supervisor of services; nothing
    else is done for the query.
    """

    def __init__(
        self, plan: Plan, url: str, folder: Path, run_child: Callable[..., ChildProcess], seed: int
    ) -> None:
        self.plan, self.seed, self._folder, self._run_child = plan, seed, folder, run_child
        self._random = random.Random(seed)
        self.log = EventLog()
        self._engine = plan.engine
        self.drivers: list[Driver] = []
        self._held = False
        """Whether no driver is to be started."""
        self._application = f"audited-{random.SystemRandom().getrandbits(40):x}"
        self._url = self._tagged(url, self._application)
        keyed = plan.sink == "keyed"
        self._table = None if keyed else named(url, TABLE)
        ordered = keyed and plan.guarantee == "exactly_once"
        self._history = SharedHistory(
            History(plan.guarantee, ordered=ordered, keyed=keyed, one_store=True, disturbed=True)
        )
        with penstock.connect(url, create=True) as store:
            store.create_queue(SOURCE, SCHEMA, partitions=2)
            store.create_consumer(CONSUMER).register(SOURCE, vital=True)
            if keyed:
                store.create_queue(SINK, SCHEMA, partitions=2, key=["key"])
        self._reader = SnapshotReader(self._tagged(url, "auditor"), self._table)
        self.auditor = Auditor(self._reader, self._history, self.log)
        self.producers = [Producer(self._url, SOURCE, 0, self._history, seed)]
        if keyed:
            self.producers.append(Producer(self._url, SINK, FIRST_FOREIGN_ID, self._history, seed + 1))

    def _tagged(self, url: str, application: str) -> str:
        """The URL with a name by which a PostgreSQL server knows whose a session is."""
        return url if self.plan.store == "sqlite" else f"{url}&application_name={application}"

    # From begin to end.

    def run(self) -> None:
        """Disturb the query as planned, and see that it catches up afterwards.

        Raises
        ------
        Violation
            When rows are lost, repeated, out of order or in part there.
        AssertionError
            When something takes longer than its bound.
        """
        with self._explained():
            self.auditor.start()
            for producer in self.producers:
                producer.start()
            self._start()
            self._progress("the query writes its first rows")
            for kind in self._disturbances():
                self._disturb(kind)
            self._settle()

    def close(self) -> None:
        """End everything that was started."""
        self.auditor.ending.set()
        for producer in self.producers:
            producer.ending.set()
            producer.abandoned.set()
        with ExitStack() as stack:
            stack.callback(self._reader.close)
            for thread in [self.auditor, *self.producers]:
                if thread.ident is not None:
                    stack.callback(thread.join, 60)
            # The last comes first, whatever becomes of the others.
            for driver in self.drivers:
                stack.callback(driver.child.kill_tree)

    def _disturbances(self) -> Iterator[str]:
        if self.plan.order is not None:
            yield from self.plan.order
            return
        ends, hindrances = self._rounds(self.plan.ends), self._rounds(self.plan.hindrances)
        began = self.log.seconds
        while True:
            yield next(hindrances)
            yield next(hindrances)
            yield next(ends)
            # However slow the machine is, there has been one of these.
            if self.log.seconds - began >= self.plan.seconds:
                return

    def _rounds(self, kinds: Sequence[str]) -> Iterator[str]:
        """All kinds in any order, again and again."""
        while True:
            yield from self._random.sample(kinds, len(kinds))

    def _settle(self) -> None:
        self.log.note("no more disturbances")
        began = time.monotonic()
        for producer in self.producers:
            producer.ending.set()
        self._until(
            lambda: not any(producer.is_alive() for producer in self.producers),
            CATCH_UP_SECONDS,
            "all appends are acknowledged",
        )
        self._until(self._caught_up, CATCH_UP_SECONDS, "the query has caught up")
        self.log.note(f"caught up {time.monotonic() - began:.1f} s after the last disturbance")
        self._held = True
        self._until(lambda: len(self._alive) == 1, ENDING_SECONDS, "one driver is left")
        (last,) = self._alive
        os.kill(last.child.pid, signal.SIGTERM)
        self._until(lambda: not last.alive, ENDING_SECONDS, f"{last} ends when it is asked to")
        assert last.child.returncode == 0, f"{last} ended {last.end}"
        self._until(
            lambda: not any(driver.child.processes() for driver in self.drivers),
            ENDING_SECONDS,
            "the processes of all drivers have ended",
        )
        self.auditor.ending.set()
        self.auditor.join(60)
        self._watch()
        history, now = self.auditor.audit()
        lost = missing_rows(history, now)
        assert not lost, f"rows {lost} are not in the sink"
        assert now.offsets == now.ends, f"the consumer is at {now.offsets} and its queue ends at {now.ends}"
        rows = Counter(row for partition in now.sink for row, _ in partition if row < FIRST_FOREIGN_ID)
        self.log.note(
            f"{sum(map(len, now.source))} rows of the source and {len(history.foreign)} of others are in the "
            "sink, "
            f"{rows.total() - len(rows)} of them again; {len(self.drivers)} drivers, "
            f"{self.auditor.snapshots} snapshots, "
            f"appends {[dict(producer.outcomes) for producer in self.producers]}"
        )

    def _caught_up(self) -> bool:
        newest = self.auditor.newest
        return (
            newest is not None
            and newest.offsets == newest.ends
            and not missing_rows(self._history.copy(), newest)
            and bool(self._alive)
        )

    # Running drivers.

    @property
    def _alive(self) -> list[Driver]:
        return [driver for driver in self.drivers if driver.alive]

    @property
    def _current(self) -> Driver | None:
        """The driver that is to do the work."""
        working = [driver for driver in self._alive if not driver.paused]
        return working[-1] if working else None

    def _start(self) -> Driver:
        number = len(self.drivers)
        query = Query(
            self._url, self.plan.guarantee, self._engine, self._table, str(self._folder / "checkpoint")
        )
        child = self._run_child("tests.crash.audited", self._folder / f"spark-{number}", query.to_json())
        driver = Driver(number, self._engine, child)
        self.drivers.append(driver)
        self._history.interrupt(1)
        self.log.note(f"{driver} is started")
        return driver

    def _watch(self) -> None:
        """Raise what a thread has found; start a driver when none is left."""
        for thread in [self.auditor, *self.producers]:
            if thread.failure is not None:
                raise thread.failure
        for driver in self.drivers:
            if not driver.alive and not driver.end_noted:
                driver.end_noted = True
                self.log.note(f"{driver} has ended {driver.end}")
        if not self._held and not self._alive:
            self._start()

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._watch()
            time.sleep(0.1)

    def _until(self, reached: Callable[[], Any], seconds: float, text: str) -> None:
        def look() -> Any:
            self._watch()
            return reached()

        wait_until(look, seconds, text, interval=0.1)

    def _progress(self, text: str) -> None:
        """Wait until the query has written rows that were not in the sink."""
        before = self._written()
        self._until(lambda: self._written() > before, PROGRESS_SECONDS, text)

    def _written(self) -> int:
        """How many rows of the source the sink had a moment ago, repeats left out."""
        newest = self.auditor.newest
        if newest is None:
            return 0
        return len({row for partition in newest.sink for row, _ in partition if row < FIRST_FOREIGN_ID})

    # Disturbing them.

    def _disturb(self, kind: str) -> None:
        self._history.interrupt(RERUNS)
        getattr(self, f"_{kind}")()
        self._rest(self._random.uniform(0.2, 2.0))
        # Some disturbances are to meet a driver that is still starting.
        if self._random.random() < 0.7:
            self._progress(f"the query writes rows after {kind}")

    def _aim(self, driver: Driver, number: signal.Signals, *, parent_alone: bool = False) -> str:
        """Maybe send a signal when the consumer moves: with the sink's commit, before the checkpoint logs it.

        It takes a tenth of a second to find a driver's processes, so they are found before.
        """
        if self._random.random() >= self.plan.aimed:
            return "at any moment"
        pids = [driver.child.pid]
        if not parent_alone:
            pids += [process.pid for process in driver.child.processes() if process.pid != driver.child.pid]
        before, until = self._reader.offsets(), time.monotonic() + AIMING_SECONDS
        while time.monotonic() < until and driver.alive:
            if self._reader.offsets() != before:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                return "right after a commit"
            time.sleep(0.001)
        return "at a moment without a commit"

    def _kill_all(self) -> None:
        driver = self._current
        if driver is not None:
            when = self._aim(driver, signal.SIGSTOP)
            self.log.note(f"*** SIGKILL for {driver} with its JVM and its workers, {when}")
            driver.child.kill_tree()

    def _kill_parent(self) -> None:
        """Kill the driver's Python; its JVM and workers notice that later, and work until then."""
        driver = self._current
        if driver is not None:
            when = self._aim(driver, signal.SIGKILL, parent_alone=True)
            self.log.note(f"*** SIGKILL for the Python of {driver} alone, {when}")
            driver.child.popen.kill()
            driver.child.wait(30)

    def _pause_all(self) -> None:
        """Suspend the driver for some seconds."""
        driver = self._current
        if driver is not None:
            when = self._aim(driver, signal.SIGSTOP)
            self._suspend(driver, when)
            self._rest(self._random.uniform(0.5, 4.0))
            self._wake(driver)

    def _take_over(self) -> None:
        """Suspend the driver until another one has been started and works; then the first one wakes."""
        old = self._current
        if old is None:
            return
        when = self._aim(old, signal.SIGSTOP)
        self._suspend(old, when)
        new = self._start()
        # A driver that is suspended inside a transaction keeps its locks, so the new one may have to wait
        # until it wakes.
        with suppress(AssertionError):
            self._until(lambda: new.started or not new.alive, TAKE_OVER_SECONDS, "the new driver works")
        self._rest(self._random.uniform(0.0, 3.0))
        self._wake(old)
        self.log.note(f"driver {new.number} {'works' if new.started else 'does not work yet'}")
        self._until(lambda: len(self._alive) == 1, ENDING_SECONDS, f"{old} or {new} ends")

    def _suspend(self, driver: Driver, when: str) -> None:
        self.log.note(f"*** SIGSTOP for all of {driver}, {when}")
        driver.paused = True
        driver.child.stop_tree()

    def _wake(self, driver: Driver) -> None:
        self.log.note(f"*** SIGCONT for {driver}")
        driver.child.continue_tree()
        driver.paused = False

    def _pause_workers(self) -> None:
        driver = self._current
        workers = [] if driver is None else driver.workers()
        if not workers:
            return
        chosen = self._random.sample(workers, self._random.randint(1, min(3, len(workers))))
        self.log.note(f"*** SIGSTOP for workers {[worker.pid for worker in chosen]} of {driver}")
        try:
            for worker in chosen:
                with suppress(psutil.NoSuchProcess):
                    worker.suspend()
            self._rest(self._random.uniform(0.5, 4.0))
        finally:
            self.log.note("*** SIGCONT for these workers")
            for worker in chosen:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()

    def _end_sessions(self) -> None:
        """Terminate some sessions of drivers, workers and producers, or all of them."""
        with psycopg.connect(parse_url(self._url).target, autocommit=True) as connection:
            connection.execute("set application_name = 'operator'")
            sessions = connection.execute(
                "select pid from pg_stat_activity where application_name = %s order by pid",
                [self._application],
            ).fetchall()
            count = min(self._random.choice([1, 2, 1000]), len(sessions))
            self.log.note(f"*** pg_terminate_backend for {count} of {len(sessions)} sessions")
            for (pid,) in self._random.sample(sessions, count):
                connection.execute("select pg_terminate_backend(%s)", [pid])

    def _grow_sink(self) -> None:
        with penstock.connect(self._url) as store:
            sink = store.queue(SINK)
            if sink.partitions < MOST_PARTITIONS:
                self.log.note(f"*** the sink gets partition {sink.partitions}")
                sink.add_partitions(1)

    def _restart(self) -> None:
        """Stop the driver gracefully and start one.

        Of a queue's query with the other trigger, whose checkpoint is the same.
        """
        driver = self._current
        if driver is None:
            return
        with suppress(AssertionError):
            self._until(lambda: driver.started or not driver.alive, 30, "the driver works")
        if self.plan.sink == "keyed":
            self._engine = MICRO_BATCH if self._engine == CONTINUOUS else CONTINUOUS
        self.log.note(f"*** SIGTERM for {driver}, to go on as {self._engine}")
        self._held = True
        if driver.alive:
            os.kill(driver.child.pid, signal.SIGTERM)
        self._until(lambda: not driver.alive, ENDING_SECONDS, f"{driver} ends when it is asked to")
        self._held = False

    # Reporting.

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
            print(self.report)
            self._print_drivers()
            raise
        print(self.report)

    @property
    def report(self) -> str:
        repeat = f"PENSTOCK_AUDIT_SEED={self.seed} repeats the choices, though not their timing"
        head = f"audit of {self.plan}; {repeat}"
        return "\n".join([head, *self.log.lines])

    def _print_drivers(self) -> None:
        for driver in self._alive:
            if driver.started and not driver.paused:
                # Where its threads are.
                os.kill(driver.child.pid, signal.SIGUSR1)
        time.sleep(1.0)
        for driver in self.drivers[-3:]:
            lines = [line for line in driver.child.output.splitlines() if not line.startswith("\tat ")]
            print(
                "\n".join([f"--- the end of the output of {driver}, without the JVM's stack:", *lines[-80:]])
            )
