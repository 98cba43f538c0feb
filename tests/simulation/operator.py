"""Who runs the query.

It starts a driver where none is, takes over from one that stands still, and gives up where it is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from penstock.errors import (
    CommitOutcomeUnknownError,
    OwnerFencedError,
    PenstockError,
    StoreError,
    StoreUnavailableError,
)
from penstock.queue.maintenance import clean_staging, maintain_partitions
from penstock.queue.store import open_store
from penstock.store.log import compact
from penstock.store.log.object_cleaning import clean_up
from tests.simulation.clients import Producer, Program
from tests.simulation.continuous import ContinuousRun
from tests.simulation.disk import SparkError
from tests.simulation.micro_batch import MicroBatchRun
from tests.simulation.objects import LOCATION, ORPHAN_SECONDS
from tests.simulation.scenario import (
    CONSUMER,
    CONTINUOUS,
    MICRO_BATCH,
    PROGRAM,
    SCHEMA,
    SINK,
    SOURCE,
    Scenario,
)
from tests.simulation.scheduler import Process
from tests.simulation.server import Server
from tests.simulation.virtual import Machine
from tests.support.auditor import History, Violation

PATIENCE = 2.5
"""Seconds for which a driver may stand still before another one is started."""
_TRIES = 4
"""As often in a row a query may be refused, with nothing disturbing it, before its operator gives up."""

_ORDINARY = {
    "CHECKPOINT_MISMATCH": ("OTHER_SOURCE", "OTHER_CHECKPOINT", "MOVED_WHILE_RUNNING"),
    "OFFSET_CONFLICT": ("CHECKPOINT", "SINK", "ADVANCE"),
    "DATA_LOST": ("TRIMMED",),
    "COMMIT_REFUSED": ("NOT_REPEATABLE",),
    "CHECKPOINT_REWOUND": (),
    "QUEUE_NOT_FOUND": (),
}
"""What a condition of ``may_refuse`` without a second part allows."""

Run = MicroBatchRun | ContinuousRun


@dataclass
class Backup:
    """Both stores and the checkpoint, as they were."""

    stores: dict[str, tuple[bytes, int]]
    files: dict[str, bytes]
    planned: bool
    """Whether the consumer's owner has planned rows that its sink has yet to commit."""
    objects: dict[str, tuple[bytes, float]]
    """What its bucket keeps older versions of."""
    taken_at: float


@dataclass
class Late:
    """What may come late after a seek, from drivers of older checkpoints.

    The sink's store, when it is another one, cannot know yet that what such a driver has planned before is
    out of date: not until a driver of a newer checkpoint has committed.
    """

    drivers: set[Process]
    ids: list[int]
    checkpoint: int
    """The number of the first newer one."""


class Operator:
    """One query's life."""

    def __init__(
        self, machine: Machine, scenario: Scenario, history: History, source: Server, sink: Server
    ) -> None:
        self.machine, self.world, self.scenario, self.history = machine, machine.world, scenario, history
        self.source, self.sink = source, sink
        self.process = machine.world.start("operator")
        self.engine = scenario.engine
        self.division = scenario.division
        self.kinds: Collection[str] = ()
        """The kinds of moves that may be made."""
        self.checkpoint = "/checkpoint0"
        self.runs: list[tuple[Process, Run]] = []
        self.quiet = False
        """Whether nothing disturbs any more."""
        self.refused: Exception | None = None
        """What the query is refused with, again and again."""
        self.may_refuse: set[str] = set()
        """The conditions of refusals that are right, for what has been done."""
        self.trimming = False
        """Whether it trims by hand, which it does once at a time."""
        self.passed: set[int] = set()
        """Ids past which programs have moved the query's consumer, or that went with a dropped queue."""
        self.producers: list[Producer] = []
        self.programs: list[Program] = []
        self.backup: Backup | None = None
        self._column_changes: list[tuple[Server, Callable[[Any], None]]] = []
        self.clocks_jumped = False
        self.prepared = False
        self.late: list[Late] = []
        if scenario.two_stores:
            sink.committed = self._committed_late
        self.loose: set[Process] = set()
        """Drivers that may have lost the lock of their consumer."""
        self.waiting = 0
        """How many producers are about to begin."""
        self.halted = False
        """Whether no driver is started for now."""
        self._halted_until = 0.0
        self._ids = 20_000
        self._refusals = 0
        self.checkpoints = 0

    # Before anything is disturbed.

    def prepare(self) -> None:
        scenario = self.scenario

        def work() -> None:
            store = open_store(self.source.url)
            if scenario.consumer:
                store.create_consumer(CONSUMER)
            if scenario.programs:
                store.create_consumer(PROGRAM)
            self.create_source(store)
            if scenario.sink != "table":
                self.create_sink(open_store(self.sink.url))
            self.backup, self.prepared = self.copied(), True
            self.produce_later(scenario.quiet_start, 0, scenario.appends)
            for _ in range(scenario.programs):
                self.run_program()
            self.process.spawn(self._supervise, "supervise")
            if scenario.maintained:
                self.process.spawn(self.maintain_on, "maintain")

        self.process.spawn(work, "prepare")

    def create_source(self, store: Any) -> None:
        self._create(store, SOURCE, self.scenario.source_partitions)
        self.register(store)

    def create_sink(self, store: Any) -> None:
        key = ("key",) if self.scenario.sink == "keyed" else ()
        self._create(store, SINK, self.scenario.sink_partitions, key)

    def _create(self, store: Any, name: str, partitions: int, key: Sequence[str] = ()) -> None:
        """Create a queue; whoever has restored a backup keeps it. While object storage fails, try again."""
        payloads = LOCATION if self.scenario.objects else None
        while True:
            with suppress(CommitOutcomeUnknownError):
                try:
                    store.create_queue(name, SCHEMA, partitions=partitions, key=key, payloads=payloads)
                except StoreUnavailableError as error:
                    if error.condition != "STORE_UNAVAILABLE.OBJECTS":
                        raise
                    self.world.sleep(0.5)
                    continue
                except StoreError as error:
                    if not self._is_to_be_kept(error):
                        raise
                    self._clean_up(store, take_over=True)
                    continue
            return

    def _is_to_be_kept(self, error: StoreError) -> bool:
        """Whether a store is refused as a copy that was restored here: whoever restores a backup keeps it."""
        return error.condition == "STORE_ERROR.OBJECTS_OF_A_COPY" and self._has_restored()

    def _has_restored(self) -> bool:
        return any(server.restores for server in (self.source, self.sink))

    def _clean_up(self, store: Any, *, take_over: bool) -> None:
        clean_up(store.database, older_than=int(ORPHAN_SECONDS * 1_000_000), take_over=take_over)

    def create_missing(self, *, columns: bool) -> None:
        """Create what a restored backup lacks: a queue that was being recreated, and perhaps columns."""
        source, sink = open_store(self.source.url), open_store(self.sink.url)
        if SOURCE in source.queues():
            self.register(source)
        else:
            self.create_source(source)
        if self.scenario.sink != "table" and SINK not in sink.queues():
            self.create_sink(sink)
        for server, change in self._column_changes if columns else ():
            change(open_store(server.url))

    def change_columns(self, server: Server, change: Callable[[Any], None]) -> None:
        """Add columns to a queue or widen them, perhaps again when an older backup is restored."""
        self._column_changes.append((server, change))
        self.with_store(server, change)

    def register(self, store: Any) -> None:
        """Register the consumers on a new source."""
        if self.scenario.consumer:
            store.consumer(CONSUMER).register(SOURCE, vital=self.scenario.vital)
        if self.scenario.programs:
            store.consumer(PROGRAM).register(SOURCE, vital=True)

    def run_program(self) -> None:
        self.programs.append(Program(self.machine, self.history, self.source.url))

    def produce(self, queue: str, first: int, appends: int) -> None:
        url = (self.source if queue == SOURCE else self.sink).url
        by_key = queue == SINK and self.scenario.sink == "keyed"
        self.producers.append(
            Producer(
                self.machine,
                self.history,
                url,
                queue,
                first=first,
                appends=appends,
                most=self.scenario.rows_per_append,
                by_key=by_key,
            )
        )

    def produce_later(self, seconds: float, first: int, appends: int) -> None:
        """Begin to append to the source in so many seconds."""
        if not seconds:
            self.produce(SOURCE, first, appends)
            return
        self.waiting += 1

        def begin() -> None:
            self.waiting -= 1
            self.produce(SOURCE, first, appends)

        self.world.later(seconds, begin)

    @property
    def producing(self) -> bool:
        """Whether rows still come."""
        return bool(self.waiting) or not all(each.ended for each in self.producers)

    # Keeping it going.

    @property
    def current(self) -> tuple[Process, Run] | None:
        return self.runs[-1] if self.runs else None

    def _supervise(self) -> None:
        still = 0.0
        while self.refused is None:
            current = self.current
            if self.halted or self.world.now < self._halted_until:
                pass
            elif current is None or not current[0].alive or current[1].ended:
                self._note_end(current)
                if self.refused is None:
                    self.start()
                still = 0.0
            elif current[0].paused:
                still += 0.5
                if still > PATIENCE:
                    self.start()
                    still = 0.0
            self.world.sleep(0.5)

    def _note_end(self, current: tuple[Process, Run] | None) -> None:
        failure = None if current is None else current[1].failure
        if current is not None:
            current[0].kill()
        if failure is None:
            self._refusals = 0
            return
        self.world.note(f"the query has failed: {type(failure).__name__}: {failure}")
        if not isinstance(failure, PenstockError | SparkError):
            raise failure
        if not self.history.disturbed:
            raise Violation("failed", f"nothing disturbed the query: {type(failure).__name__}: {failure}")
        if not self.quiet:
            self._refusals = 0
        elif not isinstance(failure, OwnerFencedError):
            # A suspended driver that wakes up may fence this one once: another try does.
            self._refusals += 1
        # Nobody goes on trying until rows have come again where the lost ones were.
        behind = getattr(failure, "condition", "").endswith("_BEHIND") and self.history.restored
        if self._refusals >= _TRIES or behind:
            self.refused = failure

    def allows(self, condition: str) -> bool:
        """Whether it is right that the query is refused with a condition."""
        family, _, part = condition.partition(".")
        return condition in self.may_refuse or (family in self.may_refuse and part in _ORDINARY[family])

    def halt(self, seconds: float) -> None:
        """Start no driver for a while."""
        self._halted_until = self.world.now + seconds

    def start(self) -> None:
        alone = not any(other.alive for other, _ in self.runs)
        if self.scenario.switches and self.runs and alone and self.machine.random.random() < 0.5:
            self.switch_engine()
        driver = self.world.start("driver")
        plan = self.scenario.plan(self.source.url, self.sink.url, self.checkpoint, self.engine, self.division)
        kind = MicroBatchRun if self.engine == MICRO_BATCH else ContinuousRun
        run: Run = kind(self.machine, driver, plan)
        if not alone:
            # Another driver may have the lock for now, and both may write the same rows.
            self.loose.add(driver)
            self.machine.repeats += 1
        self.runs.append((driver, run))
        self.world.note(f"{driver!r} starts, {self.engine}")
        driver.spawn(run.run, "query")

    def switch_engine(self) -> None:
        """Let the next run be of the other engine, where that can take the query over."""
        if (
            self.scenario.pipeline
            and self.scenario.guarantee != "idempotent"
            and self.scenario.sink != "table"
        ):
            self.engine = CONTINUOUS if self.engine == MICRO_BATCH else MICRO_BATCH

    @property
    def committed(self) -> bool:
        """Whether the query has committed anything with the checkpoint that it has now."""
        return bool(self.machine.disk.numbers(f"{self.checkpoint}/commits"))

    def pass_over(self, ids: set[int]) -> None:
        """Note rows that the sink may lack from now on, whatever is found out later."""
        self.history.may_lack |= ids
        self.passed |= ids

    def may_begin_late(self) -> None:
        """A query that has committed nothing, by its checkpoint, begins at the first row that is left."""
        if not self.committed and not self.scenario.consumer:
            self.history.may_lack |= self.history.trimmed

    def in_hand(self) -> list[tuple[int, int]] | None:
        """The range of each partition that a micro-batch reads.

        Its driver runs undisturbed and owns the consumer. The object is the same all the while.
        """
        if self.current is None:
            return None
        driver, run = self.current
        alive = driver.alive and not driver.paused and driver in self.source.owners.values()
        return run.hand if alive and isinstance(run, MicroBatchRun) else None

    def owner(self) -> Process | None:
        """The driver that has owned the consumer ever since it took it over, and runs."""
        if self.current is None or not self.scenario.consumer:
            return None
        driver, run = self.current
        runs = driver.alive and not driver.paused and run.owned and not run.ended and not self.halted
        return driver if runs and driver not in self.loose else None

    def lose_locks(self, server: Server, process: Process | None = None) -> None:
        """The connections with the locks of a process, or of all, are gone."""
        self.loose.update(driver for driver, _ in self.runs if process in (None, driver))
        if process is None:
            server.owners.clear()
        else:
            server.forget_owners(process)

    def at_rest(self, ends: list[int]) -> bool:
        """Whether the query says that it has nothing more to do, where the source's partitions end so."""
        current = self.current
        return (
            current is not None
            and not self.halted
            and current[0].alive
            and not current[0].paused
            and not current[1].executors.paused
            and current[1].at_rest(ends)
        )

    def _committed_late(self, process: Process) -> None:
        """A process has committed to the sink's own store."""
        run = next((run for driver, run in self.runs if driver is process), None)
        if run is None or not self.late:
            return
        number = int(run.plan.checkpoint.removeprefix("/checkpoint"))
        self.late = [each for each in self.late if number < each.checkpoint]
        for each in self.late:
            if process in each.drivers:
                self.history.repeats.update(each.ids)
                each.ids = []

    def maintain_on(self) -> None:
        """As every store is looked after in the background, until the end is only waited for."""
        while not self.quiet:
            self.world.sleep(2.0)
            for server in (self.source, self.sink):
                with suppress(PenstockError):
                    self.tend(open_store(server.url), timedelta(days=1))

    def tend(self, store: Any, older: timedelta) -> None:
        """Merge segments, apply retention, and clean up what was staged so long ago."""
        # A restored store may not compact objects before it is said that it is kept.
        try:
            self._clean_up(store, take_over=self._has_restored())
        except StoreError as error:
            # It may have been restored since then.
            if not self._is_to_be_kept(error):
                raise
            self._clean_up(store, take_over=True)
        for name in store.queues():
            record = store.queue(name).record
            compact.compact_all(store.database, record, range(record.partitions))
            maintain_partitions(store.database, record, range(record.partitions))
        clean_staging(store.database, older)

    reader: Callable[[], Any]
    """What everybody can read at this moment."""

    # Help for those who disturb it.

    def some_driver(self, rng: random.Random) -> tuple[Process, Run] | None:
        alive = [pair for pair in self.runs if pair[0].alive]
        return rng.choice(alive) if alive else None

    def stand_still(self, process: Process, seconds: float) -> None:
        process.paused_until = self.world.now + seconds
        for server in {self.source, self.sink}:
            server.stands_still(process)

    def kill_all(self) -> None:
        """End every driver with its executors."""
        for driver, run in self.runs:
            driver.kill()
            run.executors.kill()

    def new_checkpoint(self) -> None:
        self.checkpoints += 1
        self.checkpoint = f"/checkpoint{self.checkpoints}"

    def copied(self) -> Backup:
        stores = {server.url: server.backup() for server in {self.source, self.sink}}
        objects = dict(self.machine.bucket.objects)
        return Backup(stores, dict(self.machine.disk.files), self.source.planned(), objects, self.world.now)

    def fresh_ids(self) -> int:
        self._ids += 1000
        return self._ids

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Do something in a task of its own."""

        def run() -> None:
            self.world.sleep(seconds)
            try:
                work()
            except (PenstockError, SparkError) as error:
                self.world.note(f"the operator gets: {error}")

        self.process.spawn(run, "operate")

    def with_store(self, server: Server, work: Callable[[Any], None]) -> None:
        self.later(0.0, lambda: work(open_store(server.url)))

    def disturb(self, move: Callable[[Operator, random.Random], None], seed: int) -> None:
        self.world.note(f"*** {move.__name__} ({seed})")
        self.history.disturbed = True
        move(self, random.Random(seed))
