"""Operator of the simulated query.

The operator creates the queues, starts a driver when none runs, starts a second one when a driver is paused
for too long, and gives up when the query keeps failing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

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
from tests.simulation.machine import Machine
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
from tests.support.auditor import History, Snapshot, Violation

PAUSE_SECONDS = 2.5
"""How long a driver may be paused before the operator starts another one."""
_MAX_FAILURES = 4
"""How often in a row a query may fail without any disturbance before the operator gives up."""

_GENERAL_SUBCONDITIONS = {
    "CHECKPOINT_MISMATCH": ("OTHER_SOURCE", "OTHER_CHECKPOINT", "MOVED_WHILE_RUNNING"),
    "OFFSET_CONFLICT": ("CHECKPOINT", "SINK", "ADVANCE"),
    "DATA_LOST": ("TRIMMED",),
    "COMMIT_REFUSED": ("NOT_REPEATABLE",),
    "CHECKPOINT_REWOUND": (),
    "QUEUE_NOT_FOUND": (),
}
"""The subconditions that are expected when ``expected_conditions`` has a condition without a subcondition."""


class Driver(NamedTuple):
    """Driver process, and its run of the query."""

    process: Process
    run: MicroBatchRun | ContinuousRun


@dataclass
class Backup:
    """Backup of the stores, the checkpoint and the objects."""

    stores: dict[str, tuple[bytes, int]]
    files: dict[str, bytes]
    has_open_plan: bool
    """Whether the consumer's owner had planned rows that the sink had not committed yet."""
    objects: dict[str, tuple[bytes, float]]
    taken_at: float


@dataclass
class LateCommits:
    """Rows that drivers with older checkpoints may still commit after a seek.

    A sink in another store than the source does not know of the seek until a driver with a newer checkpoint
    has committed.
    """

    drivers: set[Process]
    ids: list[int]
    checkpoint: int
    """The number of the first newer checkpoint."""


class Operator:
    """Runs a query for the whole schedule."""

    read_snapshot: Callable[[], Snapshot]
    """Returns what a reader can read at this moment."""

    def __init__(
        self, machine: Machine, scenario: Scenario, history: History, source: Server, sink: Server
    ) -> None:
        self.machine, self.world, self.scenario, self.history = machine, machine.world, scenario, history
        self.source, self.sink = source, sink
        self.process = machine.world.start_process("operator")
        self.engine = scenario.engine
        self.task_limits = scenario.task_limits
        self.enabled_moves: Collection[str] = ()
        """The names of the moves that may be made."""
        self.checkpoint = "/checkpoint0"
        self.drivers: list[Driver] = []
        """All drivers in the order of their start, including those that have ended."""
        self.quiet = False
        """Whether all disturbances are over."""
        self.refusal: Exception | None = None
        """The error with which the query keeps failing, once the operator has given up."""
        self.expected_conditions: set[str] = set()
        """The conditions with which the query may fail, considering the moves so far."""
        self.trimming = False
        """Whether a manual trim is in progress."""
        self.skipped: set[int] = set()
        """The ids that programs took through the query's consumer, or that a dropped queue had."""
        self.producers: list[Producer] = []
        self.programs: list[Program] = []
        self.backup: Backup | None = None
        self._column_changes: list[tuple[Server, Callable[[Any], None]]] = []
        self.clocks_changed = False
        self.is_set_up = False
        self.late_commits: list[LateCommits] = []
        if scenario.two_stores:
            sink.on_ledger_commit = self._allow_late_commit
        self.maybe_unlocked: set[Process] = set()
        """The drivers that may have lost the owner lock of their consumer."""
        self._scheduled_producers = 0
        self.starts_suspended = False
        """Whether the operator starts no drivers for now."""
        self._starts_suspended_until = 0.0
        self._last_ids = 20_000
        self._failures = 0
        self.checkpoints = 0

    # Setup.

    def set_up(self) -> None:
        """Create the queues and consumers, and start the producers, the programs and the query."""
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
            self.backup, self.is_set_up = self.create_backup(), True
            self.start_producer_later(scenario.first_append_delay, 0, scenario.appends)
            for _ in range(scenario.programs):
                self.start_program()
            self.process.spawn(self._supervise, "supervise")
            if scenario.background_maintenance:
                self.process.spawn(self._maintain_in_background, "maintain")

        self.process.spawn(work, "prepare")

    def create_source(self, store: Any) -> None:
        self._create_queue(store, SOURCE, self.scenario.source_partitions)
        self.register_consumers(store)

    def create_sink(self, store: Any) -> None:
        key = ("key",) if self.scenario.sink == "keyed" else ()
        self._create_queue(store, SINK, self.scenario.sink_partitions, key)

    def _create_queue(self, store: Any, name: str, partitions: int, key: Sequence[str] = ()) -> None:
        """Create a queue, retrying while object storage fails.

        A restored store must first take over the objects of its backup.
        """
        payloads = LOCATION if self.scenario.object_storage else None
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
                    if not self._must_take_over(error):
                        raise
                    self._clean_up_objects(store, take_over=True)
                    continue
            return

    def _must_take_over(self, error: StoreError) -> bool:
        """Return whether a restored store must first take over the objects of its backup."""
        return error.condition == "STORE_ERROR.OBJECTS_OF_A_COPY" and self._has_restored()

    def _has_restored(self) -> bool:
        return any(server.restores for server in (self.source, self.sink))

    def _clean_up_objects(self, store: Any, *, take_over: bool) -> None:
        clean_up(store.database, older_than=int(ORPHAN_SECONDS * 1_000_000), take_over=take_over)

    def create_missing(self, *, columns: bool) -> None:
        """Create the queues that a restored backup lacks, and its columns if ``columns`` is set."""
        source, sink = open_store(self.source.url), open_store(self.sink.url)
        if SOURCE in source.queues():
            self.register_consumers(source)
        else:
            self.create_source(source)
        if self.scenario.sink != "table" and SINK not in sink.queues():
            self.create_sink(sink)
        for server, change in self._column_changes if columns else ():
            change(open_store(server.url))

    def change_columns(self, server: Server, change: Callable[[Any], None]) -> None:
        """Add or widen columns of a queue, now and possibly again after a restore."""
        self._column_changes.append((server, change))
        self.with_store(server, change)

    def register_consumers(self, store: Any) -> None:
        """Register the consumers for the source."""
        if self.scenario.consumer:
            store.consumer(CONSUMER).register(SOURCE, vital=self.scenario.vital)
        if self.scenario.programs:
            store.consumer(PROGRAM).register(SOURCE, vital=True)

    def start_program(self) -> None:
        self.programs.append(Program(self.machine, self.history, self.source.url))

    def start_producer(self, queue: str, first_id: int, appends: int) -> None:
        url = (self.source if queue == SOURCE else self.sink).url
        by_key = queue == SINK and self.scenario.sink == "keyed"
        self.producers.append(
            Producer(
                self.machine,
                self.history,
                url,
                queue,
                first_id=first_id,
                appends=appends,
                max_rows_per_append=self.scenario.max_rows_per_append,
                by_key=by_key,
            )
        )

    def start_producer_later(self, seconds: float, first_id: int, appends: int) -> None:
        """Start a producer of the source after some seconds."""
        if not seconds:
            self.start_producer(SOURCE, first_id, appends)
            return
        self._scheduled_producers += 1

        def start() -> None:
            self._scheduled_producers -= 1
            self.start_producer(SOURCE, first_id, appends)

        self.world.call_later(seconds, start)

    @property
    def is_producing(self) -> bool:
        """Whether producers will append more rows."""
        return bool(self._scheduled_producers) or not all(producer.finished for producer in self.producers)

    # Supervision.

    @property
    def current_driver(self) -> Driver | None:
        """The driver that was started last."""
        return self.drivers[-1] if self.drivers else None

    def _supervise(self) -> None:
        paused_seconds = 0.0
        while self.refusal is None:
            driver = self.current_driver
            if self.starts_suspended or self.world.now < self._starts_suspended_until:
                pass
            elif driver is None or not driver.process.alive or driver.run.ended:
                self._handle_end(driver)
                if self.refusal is None:
                    self.start_driver()
                paused_seconds = 0.0
            elif driver.process.paused:
                paused_seconds += 0.5
                if paused_seconds > PAUSE_SECONDS:
                    self.start_driver()
                    paused_seconds = 0.0
            self.world.sleep(0.5)

    def _handle_end(self, driver: Driver | None) -> None:
        """Count the failures of the query, and give up after too many."""
        failure = None if driver is None else driver.run.failure
        if driver is not None:
            driver.process.kill()
        if failure is None:
            self._failures = 0
            return
        self.world.note(f"the query has failed: {type(failure).__name__}: {failure}")
        if not isinstance(failure, PenstockError | SparkError):
            raise failure
        if not self.history.disturbed:
            raise Violation("failed", f"nothing disturbed the query: {type(failure).__name__}: {failure}")
        if not self.quiet:
            self._failures = 0
        elif not isinstance(failure, OwnerFencedError):
            # A driver that resumes after a pause may fence this one, but only once.
            self._failures += 1
        # A real operator would not keep trying until new rows have taken the place of the lost ones.
        is_behind = getattr(failure, "condition", "").endswith("_BEHIND") and self.history.restored
        if self._failures >= _MAX_FAILURES or is_behind:
            self.refusal = failure

    def is_expected(self, condition: str) -> bool:
        """Return whether the query may fail with this condition."""
        general, _, subcondition = condition.partition(".")
        return condition in self.expected_conditions or (
            general in self.expected_conditions and subcondition in _GENERAL_SUBCONDITIONS[general]
        )

    def suspend_starts(self, seconds: float) -> None:
        """Start no drivers for some seconds."""
        self._starts_suspended_until = self.world.now + seconds

    def start_driver(self) -> None:
        is_only_driver = not any(process.alive for process, _ in self.drivers)
        may_switch = self.scenario.switches_engine and self.drivers and is_only_driver
        if may_switch and self.machine.random.random() < 0.5:
            self.switch_engine()
        process = self.world.start_process("driver")
        query = self.scenario.query(self.source.url, self.sink.url, self.checkpoint, self.task_limits)
        run_class = MicroBatchRun if self.engine == MICRO_BATCH else ContinuousRun
        driver = Driver(process, run_class(self.machine, process, query))
        if not is_only_driver:
            # The other driver may still hold the lock, and both may write the same rows.
            self.maybe_unlocked.add(process)
            self.machine.reruns += 1
        self.drivers.append(driver)
        self.world.note(f"{process!r} starts, {self.engine}")
        process.spawn(driver.run.run, "query")

    def switch_engine(self) -> None:
        """Use the other engine for the next run, if it supports the query."""
        if (
            self.scenario.pipeline
            and self.scenario.guarantee != "idempotent"
            and self.scenario.sink != "table"
        ):
            self.engine = CONTINUOUS if self.engine == MICRO_BATCH else MICRO_BATCH

    @property
    def has_committed(self) -> bool:
        """Whether the query has committed anything with its current checkpoint."""
        return bool(self.machine.disk.numbers(f"{self.checkpoint}/commits"))

    def allow_skipped(self, ids: set[int]) -> None:
        """Allow the sink to lack rows from now on, even if another program fails to take them."""
        self.history.may_be_missing |= ids
        self.skipped |= ids

    def allow_late_start(self) -> None:
        """Allow a query without a commit in its checkpoint to start after the trimmed rows."""
        if not self.has_committed and not self.scenario.consumer:
            self.history.may_be_missing |= self.history.trimmed

    def ranges_in_flight(self) -> list[tuple[int, int]] | None:
        """Return the range of each partition in the current micro-batch.

        The result is None unless the driver is running and owns the consumer. It is the same object for as
        long as the same micro-batch runs.
        """
        if self.current_driver is None:
            return None
        process, run = self.current_driver
        is_owner = process.alive and not process.paused and process in self.source.owner_locks.values()
        return run.ranges_in_flight if is_owner and isinstance(run, MicroBatchRun) else None

    def owner(self) -> Process | None:
        """Return the driver's process if it has certainly owned the consumer ever since it took over."""
        if self.current_driver is None or not self.scenario.consumer:
            return None
        process, run = self.current_driver
        is_running = (
            process.alive
            and not process.paused
            and run.owns_consumer
            and not run.ended
            and not self.starts_suspended
        )
        return process if is_running and process not in self.maybe_unlocked else None

    def release_owner_locks(self, server: Server, process: Process | None = None) -> None:
        """Release the owner locks of one process or of all, as lost connections do."""
        self.maybe_unlocked.update(
            driver.process for driver in self.drivers if process in (None, driver.process)
        )
        if process is None:
            server.owner_locks.clear()
        else:
            server.release_owner_locks(process)

    def is_caught_up(self, ends: list[int]) -> bool:
        """Return whether the query reports that it has processed the source up to these ends."""
        driver = self.current_driver
        return (
            driver is not None
            and not self.starts_suspended
            and driver.process.alive
            and not driver.process.paused
            and not driver.run.executors.paused
            and driver.run.is_caught_up(ends)
        )

    def _allow_late_commit(self, process: Process) -> None:
        """Allow the repeats of a driver with an older checkpoint that has just committed to the sink."""
        run = next((driver.run for driver in self.drivers if driver.process is process), None)
        if run is None or not self.late_commits:
            return
        number = int(run.query.checkpoint.removeprefix("/checkpoint"))
        self.late_commits = [late for late in self.late_commits if number < late.checkpoint]
        for late in self.late_commits:
            if process in late.drivers:
                self.history.allowed_repeats.update(late.ids)
                late.ids = []

    def _maintain_in_background(self) -> None:
        """Maintain both stores until all disturbances are over."""
        while not self.quiet:
            self.world.sleep(2.0)
            for server in (self.source, self.sink):
                with suppress(PenstockError):
                    self.maintain(open_store(server.url), timedelta(days=1))

    def maintain(self, store: Any, older_than: timedelta) -> None:
        """Clean up objects, compact segments, apply retention, and delete rows that were staged long ago."""
        # A restored store may not compact objects before it has taken over those of its backup.
        try:
            self._clean_up_objects(store, take_over=self._has_restored())
        except StoreError as error:
            # The store may have been restored during the cleanup.
            if not self._must_take_over(error):
                raise
            self._clean_up_objects(store, take_over=True)
        for name in store.queues():
            record = store.queue(name).record
            compact.compact_all(store.database, record, range(record.partitions))
            maintain_partitions(store.database, record, range(record.partitions))
        clean_staging(store.database, older_than)

    # Helpers of the moves.

    def choose_driver(self, rng: random.Random) -> Driver | None:
        """Choose a driver that is alive."""
        alive = [driver for driver in self.drivers if driver.process.alive]
        return rng.choice(alive) if alive else None

    def pause(self, process: Process, seconds: float) -> None:
        process.paused_until = self.world.now + seconds
        for server in {self.source, self.sink}:
            server.on_process_pause(process)

    def kill_query(self) -> None:
        """Kill every driver and its executors."""
        for process, run in self.drivers:
            process.kill()
            run.executors.kill()

    def use_new_checkpoint(self) -> None:
        """Use an empty checkpoint for the next run."""
        self.checkpoints += 1
        self.checkpoint = f"/checkpoint{self.checkpoints}"

    def create_backup(self) -> Backup:
        stores = {server.url: server.backup() for server in {self.source, self.sink}}
        objects = dict(self.machine.bucket.objects)
        return Backup(
            stores, dict(self.machine.disk.files), self.source.has_open_plan(), objects, self.world.now
        )

    def allocate_ids(self) -> int:
        """Return the first of 1,000 unused ids."""
        self._last_ids += 1000
        return self._last_ids

    def run_later(self, seconds: float, work: Callable[[], None]) -> None:
        """Run a function in a task of the operator after some seconds."""

        def run() -> None:
            self.world.sleep(seconds)
            try:
                work()
            except (PenstockError, SparkError) as error:
                self.world.note(f"the operator got an error: {error}")

        self.process.spawn(run, "operate")

    def with_store(self, server: Server, work: Callable[[Any], None]) -> None:
        """Run a function in a task of the operator, with the store of a server."""
        self.run_later(0.0, lambda: work(open_store(server.url)))

    def apply_move(self, move: Callable[[Operator, random.Random], None], seed: int) -> None:
        self.world.note(f"*** {move.__name__} ({seed})")
        self.history.disturbed = True
        move(self, random.Random(seed))
