"""Real drivers of one query that are disturbed, producers that append all the while, and an auditor that looks every second.

The auditor is the simulation's (`tests.simulation.auditor`). It knows what clients were told and what anybody can read, and nothing of how
Spark or Penstock work.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa

import penstock as ps
from penstock.errors import PenstockError
from penstock.store import catalog, consumers
from penstock.store.database import Transaction
from penstock.store.decoding import Decoder
from penstock.store.url import parse_url
from tests.crash.audited import CONSUMER, CONTINUOUS, MICRO_BATCH, SINK, SOURCE, Query
from tests.simulation.auditor import History, Snapshot, Violation, check, missing, unknown
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until
from tests.tables.support import named

SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64())])
TABLE = "audited"
FOREIGN = 1_000_000
"""From here on ids are those of the producer that appends to the sink itself."""

AUDIT_SECONDS = 1.0
PROGRESS_SECONDS = 90.0
"""Within so many seconds after a disturbance the query has to write rows again, drivers started anew included."""
CATCH_UP_SECONDS = 90.0
"""Within so many seconds after the last disturbance the query has to have caught up."""
ENDING_SECONDS = 90.0
"""Within so many seconds a driver has to end that was asked to, or that another one has taken over from."""
MOST_PARTITIONS = 7


@dataclass(frozen=True)
class Plan:
    """What is run and how long it is disturbed."""

    store: str
    sink: str
    """``keyed`` or ``table``."""
    guarantee: str
    engine: str
    seconds: float
    """How long new disturbances begin."""
    only: Sequence[str] | None = None
    """The kinds of disturbances; all that make sense when None."""

    def __str__(self) -> str:
        return f"{self.store}-{self.sink}-{self.guarantee}-{self.engine}"

    @property
    def kinds(self) -> list[str]:
        if self.only is not None:
            return list(self.only)
        kinds = ["kill_all", "kill_parent", "take_over", "pause_workers", "restart"]
        if self.store == "postgresql":
            kinds.append("end_sessions")
        if self.sink == "keyed":
            kinds.append("grow_sink")
        return kinds


class Log:
    """What happened when."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.lines: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def note(self, text: str) -> None:
        self.lines.append(f"{self.seconds:7.2f} s  {text}")


class Told:
    """The history, which producers write while the auditor reads it."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._lock = threading.Lock()

    def begin(self, ids: Sequence[int], keys: Sequence[int]) -> None:
        """An append is about to be tried."""
        with self._lock:
            self._history.keys.update(zip(ids, keys, strict=True))
            if ids[0] < FOREIGN:
                self._history.appends.append(tuple(ids))

    def acknowledge(self, ids: Sequence[int]) -> None:
        with self._lock:
            (self._history.acknowledged if ids[0] < FOREIGN else self._history.foreign).update(ids)

    def copy(self) -> History:
        with self._lock:
            now = self._history
            return replace(
                now,
                acknowledged=set(now.acknowledged),
                appends=list(now.appends),
                foreign=set(now.foreign),
                keys=dict(now.keys),
            )


class Producer(threading.Thread):
    """Appends to one queue through a producer session, each append until it is acknowledged."""

    def __init__(self, url: str, queue: str, first: int, told: Told, seed: int) -> None:
        super().__init__(name=f"producer of {queue}", daemon=True)
        self._url, self._queue, self._told = url, queue, told
        self._next, self._random = first, random.Random(seed)
        self.ending = threading.Event()
        """Whether it appends nothing more once the append in hand is acknowledged."""
        self.abandoned = threading.Event()
        self.failure: BaseException | None = None
        self.tries = Counter[str]()
        """How often an append came to what."""

    def run(self) -> None:
        try:
            with ps.connect(self._url) as store:
                self._produce(store)
        except BaseException as error:
            self.failure = error

    def _produce(self, store: ps.Store) -> None:
        session: Any = None
        sequence = 0
        draw = self._random
        while not self.ending.is_set():
            # Now and then so many that a continuous query is far behind.
            count = draw.randint(1, 8) if draw.random() < 0.97 else draw.randint(200, 600)
            ids = range(self._next, self._next + count)
            self._next += count
            # New keys all the time, so that some come before the sink grows, some after it, and some both.
            keys = [draw.randrange(4 + sequence // 8) for _ in ids]
            self._told.begin(ids, keys)
            table = pa.table([list(ids), keys], schema=SCHEMA)
            partition = None if self._queue == SINK else draw.choice([None, 0, 1])
            while True:
                try:
                    if session is None:
                        session = store.producer(self._queue, self.name)
                    session.append(table, sequence, partition=partition)
                    break
                except PenstockError as error:
                    self.tries[type(error).__name__] += 1
                    if self.abandoned.wait(0.2):
                        return
            self.tries["appended"] += 1
            self._told.acknowledge(ids)
            sequence += 1
            self.ending.wait(draw.random() * 0.3)


class Reader:
    """Reads offsets, source and sink at one moment.

    All of it is one read transaction: repeatable read in PostgreSQL, and a snapshot of the file in SQLite. So the auditor may demand that
    what the consumer has passed is in the sink and nothing else, whatever commits meanwhile.
    """

    def __init__(self, url: str, sink: str) -> None:
        self._store = ps.connect(url)
        self._table = named(self._store.url, TABLE) if sink == "table" else None

    def snapshot(self) -> Snapshot:
        return self._store.database.run(self._read, write=False)

    def close(self) -> None:
        self._store.close()

    def _read(self, tx: Transaction) -> Snapshot:
        registration = consumers.find_registration(tx, CONSUMER, SOURCE)
        offsets, _ = consumers.read_offsets(tx, registration)
        source = self._rows(tx, SOURCE)
        return Snapshot(
            source=[table["id"].to_pylist() for _, table in source],
            first=[first for first, _ in source],
            sink=self._written(tx),
            offsets=offsets,
        )

    def _written(self, tx: Transaction) -> list[list[tuple[int, int]]]:
        if self._table is None:
            return [
                list(zip(table["id"].to_pylist(), table["key"].to_pylist(), strict=True))
                for _, table in self._rows(tx, SINK)
            ]
        if tx.dialect == "sqlite":
            there = tx.query("select name from sqlite_schema where name = :name", name=self._table)
        else:
            there = tx.query("select 1 where to_regclass(:name) is not null", name=self._table)
        # The query makes the table when it starts for the first time.
        return [tx.query(f"select id, key from {self._table}") if there else []]

    def _rows(self, tx: Transaction, name: str) -> list[tuple[int, pa.Table]]:
        queue = catalog.find_queue(tx, name)
        decoder = Decoder(queue)
        found = []
        for part in catalog.partitions(tx, queue):
            batches, at = [], part.first_index
            while at < part.next_index:
                page = tx.page(
                    queue_id=queue.queue_id,
                    partition=part.partition,
                    start_index=at,
                    end_index=part.next_index,
                    max_segments=1024,
                    max_bytes=8 << 20,
                    with_runs=0,
                )
                for segment in page:
                    if segment.start_index != at:
                        raise Violation(
                            "gap", f"partition {part.partition} of {name!r} has no row {at}, or has it twice"
                        )
                    batches.append(decoder.rows(segment))
                    at = segment.end_index
                if not page:
                    raise Violation("gap", f"partition {part.partition} of {name!r} ends at row {at}")
            found.append((part.first_index, pa.Table.from_batches(batches, schema=queue.schema)))
        return found


class Auditor(threading.Thread):
    """Checks a snapshot every second."""

    def __init__(self, reader: Reader, told: Told, log: Log) -> None:
        super().__init__(name="auditor", daemon=True)
        self._reader, self._told, self._log = reader, told, log
        self.ending = threading.Event()
        self.failure: BaseException | None = None
        self.newest: Snapshot | None = None
        self.snapshots = 0
        self._turn = threading.Lock()

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                self.audit()
                self.ending.wait(AUDIT_SECONDS)
        except BaseException as error:
            self._log.note(f"!!! {type(error).__name__}: {error}")
            self.failure = error

    def audit(self) -> tuple[History, Snapshot]:
        """Read and check once.

        Raises
        ------
        Violation
        """
        with self._turn:
            # What was acknowledged before the snapshot has to be in it; what was tried before the end may be.
            before = self._told.copy()
            now = self._reader.snapshot()
            history = replace(before, keys=self._told.copy().keys)
            check(history, now)
            _check_written(history, now)
            if self.newest is not None:
                _check_kept(self.newest, now, in_order=history.keyed)
            self.newest = now
            self.snapshots += 1
            return history, now


def _check_written(history: History, now: Snapshot) -> None:
    """Rows are those that were appended, with the values that they were appended with."""
    if strangers := unknown(history, now):
        raise Violation("unknown", f"nobody has appended rows {strangers}")
    for rows in now.sink:
        for each, key in rows:
            if history.keys[each] != key:
                raise Violation(
                    "values", f"row {each} has key {key} and was appended with {history.keys[each]}"
                )


def _check_kept(before: Snapshot, now: Snapshot, *, in_order: bool) -> None:
    """What anybody has seen stays where it was, and the consumer does not go back."""
    for name, old, new in (("source", before.source, now.source), ("sink", before.sink, now.sink)):
        for partition, (rows, later) in enumerate(zip(old, new, strict=False)):
            if name == "sink" and not in_order:
                if gone := Counter(rows) - Counter(later):
                    raise Violation("vanished", f"rows {sorted(gone)} were in the sink before")
            elif later[: len(rows)] != rows:
                raise Violation("vanished", f"partition {partition} of the {name} has other rows than before")
    for partition, (old_offset, offset) in enumerate(
        zip(before.offsets or [], now.offsets or [], strict=False)
    ):
        if offset < old_offset:
            raise Violation("back", f"the consumer went back in partition {partition}: {old_offset}, {offset}")


class Driver:
    """A child process that runs the query."""

    def __init__(self, number: int, engine: str, child: ChildProcess) -> None:
        self.number, self.engine, self.child = number, engine, child
        self.paused = False
        self.noted = False
        """Whether its end has been noted."""

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
        said = next((line for line in self.child.output.splitlines() if line.startswith("FAILED ")), "")
        return f"with {self.child.returncode} {said[:300]}".rstrip()

    def workers(self) -> list[psutil.Process]:
        """The Python processes of tasks, of readers and of sinks."""
        found = []
        for process in self.child.processes():
            with suppress(psutil.Error):
                # What is left out are the driver and the process that forks (`tests.support.warm`), which is its child.
                forks = process.ppid() == self.child.pid
                if process.pid != self.child.pid and not forks and process.name() != "java":
                    found.append(process)
        return found


class Audit:
    """One query's life under disturbances."""

    def __init__(
        self, plan: Plan, url: str, folder: Path, run_child: Callable[..., ChildProcess], seed: int
    ) -> None:
        self.plan, self.seed, self._folder, self._run_child = plan, seed, folder, run_child
        self._random = random.Random(seed)
        self.log = Log()
        self._engine = plan.engine
        self.drivers: list[Driver] = []
        self._held = False
        """Whether no driver is to be started."""
        self._application = f"audited-{random.SystemRandom().getrandbits(40):x}"
        self._url = self._tagged(url, self._application)
        exactly = plan.guarantee == "exactly_once"
        keyed = plan.sink == "keyed"
        history = History(plan.guarantee, ordered=exactly and keyed, keyed=keyed, one_store=True)
        history.disturbed = True
        self._told = Told(history)
        with ps.connect(url, create=True) as store:
            store.create_queue(SOURCE, SCHEMA, partitions=2)
            store.create_consumer(CONSUMER).register(SOURCE, vital=True)
            if keyed:
                store.create_queue(SINK, SCHEMA, partitions=2, key=["key"])
        self._table = None if keyed else named(url, TABLE)
        self._reader = Reader(self._tagged(url, "auditor"), plan.sink)
        self.auditor = Auditor(self._reader, self._told, self.log)
        self.producers = [Producer(self._url, SOURCE, 0, self._told, seed)]
        if keyed:
            self.producers.append(Producer(self._url, SINK, FOREIGN, self._told, seed + 1))

    def _tagged(self, url: str, application: str) -> str:
        """The URL with a name by which the server knows whose a session is."""
        return url if self.plan.store == "sqlite" else f"{url}&application_name={application}"

    # From begin to end.

    def run(self) -> None:
        """Disturb the query for as long as the plan says; then it has to catch up.

        Raises
        ------
        Violation
        AssertionError
            When something took longer than its bound.
        """
        with self._explained():
            self.auditor.start()
            for producer in self.producers:
                producer.start()
            self._start()
            self._progress("the query writes its first rows")
            while self.log.seconds < self.plan.seconds or self.plan.only is not None:
                kinds = self.plan.kinds
                # Each kind comes before any comes again.
                for kind in self._random.sample(kinds, len(kinds)):
                    if self.plan.only is None and self.log.seconds >= self.plan.seconds:
                        break
                    self._disturb(kind)
                if self.plan.only is not None:
                    break
            self._settle()

    def close(self) -> None:
        """End everything that was started; the fixture of children does it for these."""
        self.auditor.ending.set()
        for producer in self.producers:
            producer.ending.set()
            producer.abandoned.set()
        for driver in self.drivers:
            driver.child.kill_tree()
        for thread in [self.auditor, *self.producers]:
            if thread.ident is not None:
                thread.join(60)
        self._reader.close()

    def _settle(self) -> None:
        self.log.note("no more disturbances")
        for producer in self.producers:
            producer.ending.set()
        began = time.monotonic()
        self._until(
            lambda: not any(each.is_alive() for each in self.producers),
            CATCH_UP_SECONDS,
            "the producers are acknowledged what they have appended",
        )
        self._until(self._caught_up, CATCH_UP_SECONDS, "the query has caught up")
        self.log.note(f"caught up {time.monotonic() - began:.1f} s after the last disturbance")
        self._held = True
        self._until(
            lambda: len(self._alive) == 1, ENDING_SECONDS, "one driver is left, and those before it end"
        )
        (last,) = self._alive
        os.kill(last.child.pid, signal.SIGTERM)
        self._until(lambda: not last.alive, ENDING_SECONDS, f"{last} ends when it is asked to")
        assert last.child.returncode == 0, f"{last} ended {last.end}"
        self._until(
            lambda: not any(each.child.processes() for each in self.drivers[:-1]),
            ENDING_SECONDS,
            "no process of a driver that has ended is left",
        )
        self.auditor.ending.set()
        self.auditor.join(60)
        self._watch()
        history, now = self.auditor.audit()
        assert missing(history, now) == []
        assert now.offsets == now.ends, f"the consumer is at {now.offsets} and its queue ends at {now.ends}"
        counts = Counter(each for rows in now.sink for each, _ in rows if each < FOREIGN)
        self.log.note(
            f"{sum(map(len, now.source))} rows of the source and {len(history.foreign)} of others are in the sink, "
            f"{counts.total() - len(counts)} of them again; {len(self.drivers)} drivers, {self.auditor.snapshots} snapshots; "
            f"appends: {[dict(each.tries) for each in self.producers]}"
        )

    def _caught_up(self) -> bool:
        newest = self.auditor.newest
        return (
            newest is not None
            and newest.offsets == newest.ends
            and not missing(self._told.copy(), newest)
            # At least once, rows of an epoch are there before its commit.
            and len(self._alive) >= 1
        )

    # Running drivers.

    @property
    def _alive(self) -> list[Driver]:
        return [each for each in self.drivers if each.alive]

    @property
    def _current(self) -> Driver | None:
        """The driver that is to do the work."""
        working = [each for each in self._alive if not each.paused]
        return working[-1] if working else None

    def _start(self) -> Driver:
        number = len(self.drivers)
        query = Query(
            self._url, self.plan.guarantee, self._engine, self._table, str(self._folder / "checkpoint")
        )
        child = self._run_child("tests.crash.audited", self._folder / f"spark-{number}", query.to_json())
        driver = Driver(number, self._engine, child)
        self.drivers.append(driver)
        self.log.note(f"{driver} is started")
        return driver

    def _watch(self) -> None:
        """Fail with what a thread has found; start a driver where none is, as any supervisor of services does."""
        for thread in [self.auditor, *self.producers]:
            if thread.failure is not None:
                raise thread.failure
        for driver in self.drivers:
            if not driver.alive and not driver.noted:
                driver.noted = True
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
        """Wait until rows have come that were not there."""
        before = self._own()
        self._until(lambda: self._own() > before, PROGRESS_SECONDS, text)

    def _own(self) -> int:
        newest = self.auditor.newest
        return 0 if newest is None else sum(each < FOREIGN for rows in newest.sink for each, _ in rows)

    # Disturbing them.

    def _disturb(self, kind: str) -> None:
        getattr(self, f"_{kind}")()
        self._rest(self._random.uniform(0.2, 2.0))
        # Some disturbances meet a driver that is still starting.
        if self._random.random() < 0.7:
            self._progress(f"rows come again after {kind}")

    def _kill_all(self) -> None:
        driver = self._current
        if driver is not None:
            self.log.note(f"*** SIGKILL for {driver} with its JVM and its workers")
            driver.child.kill_tree()

    def _kill_parent(self) -> None:
        """The JVM and the workers notice later that their driver's Python has gone, and go on until then."""
        driver = self._current
        if driver is not None:
            self.log.note(f"*** SIGKILL for the Python of {driver} alone")
            os.kill(driver.child.pid, signal.SIGKILL)
            driver.child.wait(30)

    def _take_over(self) -> None:
        """The driver stands still, as on a machine that is suspended; another one is started, and works when it wakes."""
        old = self._current
        if old is None:
            return
        self.log.note(f"*** SIGSTOP for all of {old}")
        old.paused = True
        old.child.stop_tree()
        new = self._start()
        # Who stands still in the middle of a transaction keeps its locks, so the new one may have to wait for it to wake.
        with suppress(AssertionError):
            wait_until(lambda: new.started or not new.alive, 20, interval=0.1)
        self._rest(self._random.uniform(0.0, 3.0))
        self.log.note(
            f"*** SIGCONT for {old}; driver {new.number} {'works' if new.started else 'is starting'}"
        )
        old.child.continue_tree()
        old.paused = False
        self._until(
            lambda: len(self._alive) == 1, ENDING_SECONDS, f"of {old} and driver {new.number} one ends"
        )

    def _pause_workers(self) -> None:
        driver = self._current
        workers = [] if driver is None else driver.workers()
        if not workers:
            return
        chosen = self._random.sample(workers, self._random.randint(1, min(2, len(workers))))
        self.log.note(f"*** SIGSTOP for workers {[each.pid for each in chosen]} of {driver}")
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
        """Some sessions of drivers, workers and producers, or all of them."""
        with psycopg.connect(parse_url(self._url).target, autocommit=True) as connection:
            connection.execute("set application_name = 'operator'")
            rows = connection.execute(
                "select pid from pg_stat_activity where application_name = %s order by pid",
                [self._application],
            ).fetchall()
            count = self._random.choice([1, 2, len(rows)])
            chosen = self._random.sample(rows, min(count, len(rows)))
            self.log.note(f"*** pg_terminate_backend for {len(chosen)} of {len(rows)} sessions")
            for (pid,) in chosen:
                connection.execute("select pg_terminate_backend(%s)", [pid])

    def _grow_sink(self) -> None:
        with ps.connect(self._url) as store:
            sink = store.queue(SINK)
            if sink.partitions < MOST_PARTITIONS:
                self.log.note(f"*** the sink gets partition {sink.partitions}")
                sink.add_partitions(1)

    def _restart(self) -> None:
        """A graceful stop and a start; of a queue's query with the other trigger, since its checkpoint is for both engines."""
        driver = self._current
        if driver is None:
            return
        with suppress(AssertionError):
            wait_until(lambda: driver.started or not driver.alive, 30)
        if self.plan.sink == "keyed":
            self._engine = MICRO_BATCH if self._engine == CONTINUOUS else CONTINUOUS
        self.log.note(f"*** SIGTERM for {driver}, to go on as {self._engine}")
        self._held = True
        if driver.alive:
            os.kill(driver.child.pid, signal.SIGTERM)
        self._until(lambda: not driver.alive, ENDING_SECONDS, f"{driver} ends when it is asked to")
        self._held = False

    # Telling.

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
            for driver in self._alive:
                if not driver.paused:
                    os.kill(driver.child.pid, signal.SIGUSR1)
            time.sleep(1.0)
            print(self.story)
            for driver in self.drivers[-3:]:
                print(f"--- the end of the output of {driver}:\n{driver.child.output[-6000:]}")
            raise
        print(self.story)

    @property
    def story(self) -> str:
        head = f"audit of {self.plan}; PENSTOCK_AUDIT_SEED={self.seed} repeats the choices, though not their timing"
        return "\n".join([head, *self.log.lines])
