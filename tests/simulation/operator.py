"""Who runs the query and disturbs it: starts a driver where none is, takes over from one that stands still, and does what was drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa

from penstock.errors import CommitOutcomeUnknown, PenstockError
from penstock.queue.maintenance import sweep_staging, trim_partition, upkeep
from penstock.queue.opened import open_store
from penstock.store import merge
from tests.simulation.auditor import History, Violation
from tests.simulation.clients import Producer
from tests.simulation.continuous import ContinuousRun
from tests.simulation.database import Server
from tests.simulation.disk import SparkError
from tests.simulation.micro_batch import MicroBatchRun
from tests.simulation.scenario import (
    ADDED,
    CONSUMER,
    CONTINUOUS,
    FOREIGN,
    MICRO_BATCH,
    SCHEMA,
    SINK,
    SOURCE,
    Scenario,
)
from tests.simulation.scheduler import Process
from tests.simulation.virtual import Machine

PATIENCE = 2.5
"""Seconds for which a driver may stand still before another one is started."""
_TRIES = 4
"""As often in a row a query may be refused, with nothing disturbing it, before its operator gives up."""

Run = MicroBatchRun | ContinuousRun


@dataclass
class Backup:
    """Both stores and the checkpoint, as they were."""

    stores: dict[str, tuple[bytes, int]]
    files: dict[str, bytes]


class Operator:
    """One query's life."""

    def __init__(
        self, machine: Machine, scenario: Scenario, history: History, source: Server, sink: Server
    ) -> None:
        self.machine, self.world, self.scenario, self.history = machine, machine.world, scenario, history
        self.source, self.sink = source, sink
        self.process = machine.world.start("operator")
        self.engine = scenario.engine
        self.rows_per_task = scenario.rows_per_task
        self.checkpoint = "/checkpoint0"
        self.runs: list[tuple[Process, Run]] = []
        self.quiet = False
        """Whether nothing disturbs any more."""
        self.refused: Exception | None = None
        """What the query is refused with, again and again."""
        self.may_refuse: set[str] = set()
        """What has been done for which a refusal by name is right."""
        self.producers: list[Producer] = []
        self.backup: Backup | None = None
        self.prepared = False
        self._waiting = 0
        self._ids = 20_000
        self._refusals = 0
        self._halted = False
        self._checkpoints = 0

    # Before anything is disturbed.

    def prepare(self) -> None:
        scenario = self.scenario

        def work() -> None:
            store = open_store(self.source.url)
            store.create_queue(SOURCE, SCHEMA, partitions=scenario.source_partitions)
            if scenario.consumer:
                store.create_consumer(CONSUMER).register(SOURCE, vital=scenario.vital)
            if scenario.sink != "table":
                key = ("key",) if scenario.sink == "keyed" else ()
                open_store(self.sink.url).create_queue(
                    SINK, SCHEMA, partitions=scenario.sink_partitions, key=key
                )
            self.backup, self.prepared = self._copied(), True
            self._produce(SOURCE, 0, scenario.appends)
            self.process.spawn(self._supervise, "supervise")
            if scenario.maintained:
                self.process.spawn(self._maintain_on, "maintain")

        self.process.spawn(work, "prepare")

    def _produce(self, queue: str, first: int, appends: int) -> None:
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

    @property
    def producing(self) -> bool:
        """Whether rows still come."""
        return bool(self._waiting) or not all(each.ended for each in self.producers)

    # Keeping it going.

    @property
    def current(self) -> tuple[Process, Run] | None:
        return self.runs[-1] if self.runs else None

    def _supervise(self) -> None:
        still = 0.0
        while self.refused is None:
            current = self.current
            if self._halted:
                pass
            elif current is None or not current[0].alive or current[1].ended:
                self._note_end(current)
                if self.refused is None:
                    self._start()
                still = 0.0
            elif current[0].paused:
                still += 0.5
                if still > PATIENCE:
                    self._start()
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
        self._refusals = self._refusals + 1 if self.quiet else 0
        # Nobody goes on trying until rows have come again where the lost ones were.
        behind = getattr(failure, "condition", "").endswith("_BEHIND") and self.history.restored
        if self._refusals >= _TRIES or behind:
            self.refused = failure

    def _start(self) -> None:
        driver = self.world.start("driver")
        plan = self.scenario.plan(
            self.source.url, self.sink.url, self.checkpoint, self.engine, self.rows_per_task
        )
        kind = MicroBatchRun if self.engine == MICRO_BATCH else ContinuousRun
        run: Run = kind(self.machine, driver, plan)
        self.runs.append((driver, run))
        self.world.note(f"{driver!r} starts, {self.engine}")
        driver.spawn(run.run, "query")

    @property
    def committed(self) -> bool:
        """Whether the query has committed anything with the checkpoint that it has now."""
        return bool(self.machine.disk.numbers(f"{self.checkpoint}/commits"))

    def at_rest(self, ends: list[int]) -> bool:
        """Whether the query says that it has nothing more to do, where the source's partitions end so."""
        current = self.current
        return (
            current is not None
            and not self._halted
            and current[0].alive
            and not current[0].paused
            and current[1].at_rest(ends)
        )

    # Disturbing it. Each is called between two tasks, with random numbers of its own.

    def disturb(self, kind: str, seed: int) -> None:
        rng = random.Random(seed)
        self.world.note(f"*** {kind} ({seed})")
        self.history.disturbed = True
        getattr(self, f"_{kind}")(rng)

    def _some_driver(self, rng: random.Random) -> tuple[Process, Run] | None:
        alive = [pair for pair in self.runs if pair[0].alive]
        return rng.choice(alive) if alive else None

    def _pause(self, rng: random.Random) -> None:
        found = self._some_driver(rng)
        if found is not None:
            self._stand_still(found[0], rng.choice([0.3, 4.0, 6.0, 9.0, 25.0]))

    def _stand_still(self, process: Process, seconds: float) -> None:
        process.paused_until = self.world.now + seconds
        for server in {self.source, self.sink}:
            server.stands_still(process)

    def _pause_producer(self, rng: random.Random) -> None:
        self._stand_still(rng.choice(self.producers).process, rng.choice([0.3, 4.0, 25.0]))

    def _pause_executors(self, rng: random.Random) -> None:
        found = self._some_driver(rng)
        if found is not None:
            self._stand_still(found[1].executors, rng.choice([0.3, 4.0, 9.0, 25.0]))

    def _crash(self, rng: random.Random) -> None:
        found = self._some_driver(rng)
        if found is not None:
            found[0].kill()

    def _disconnect(self, rng: random.Random) -> None:
        """A process loses its connections to a server, with the locks that they hold."""
        server = rng.choice([self.source, self.sink])
        found = self._some_driver(rng)
        if found is not None and server.rows:
            process = rng.choice([found[0], found[1].executors])
            server.break_all(lambda tx: tx.process is process)
            server.forget_owners(process)

    def _lose_reply(self, rng: random.Random) -> None:
        """Transactions in hand commit, and nobody is told."""
        server = rng.choice([self.source, self.sink])
        if server.rows:
            for tx in server.open:
                tx.lose_reply = tx.write

    def _restart_server(self, rng: random.Random) -> None:
        server = rng.choice([self.source, self.sink])
        if server.rows:
            server.break_all(lambda tx: True)
            server.owners.clear()

    def _clock(self, rng: random.Random) -> None:
        jump = rng.choice([-3600.0, -1.0, 60.0, 86400.0 * 400])
        found = self._some_driver(rng)
        if rng.random() < 0.5 and found is not None:
            found[0].clock_offset += jump
        else:
            rng.choice([self.source, self.sink]).clock_offset += jump

    def _take_over(self, rng: random.Random) -> None:
        """A rolling restart: the new query starts, and the old one is stopped once the new one runs."""
        old = self.current
        if old is None or not old[0].alive:
            return
        self._start()
        self._later(rng.choice([0.0, 0.4, 2.0]), lambda: old[1].stop())

    def _stop(self, rng: random.Random) -> None:
        """A graceful stop, and a start a while later, perhaps on the other engine."""
        old = self.current
        if old is None or not old[0].alive or self._halted:
            return
        self._halted = True

        def work() -> None:
            try:
                old[1].stop()
            finally:
                self._halted = False

        self._change_engine(rng)
        self._later(0.0, work)

    def _change_engine(self, rng: random.Random) -> None:
        table = self.scenario.sink == "table"
        if self.scenario.guarantee != "idempotent" and not table and rng.random() < 0.5:
            self.engine = CONTINUOUS if self.engine == MICRO_BATCH else MICRO_BATCH

    def _change_options(self, rng: random.Random) -> None:
        """For the next run."""
        self.rows_per_task = rng.choice([1, 2, 3, 100])
        if self.scenario.guarantee == "idempotent":
            self.may_refuse.add("options")
        self._crash(rng)

    def _grow_source(self, rng: random.Random) -> None:
        self._with_store(self.source, lambda store: store.queue(SOURCE).add_partitions(1 + rng.randrange(2)))

    def _grow_sink(self, rng: random.Random) -> None:
        if self.scenario.sink != "table":
            self._with_store(self.sink, lambda store: store.queue(SINK).add_partitions(1 + rng.randrange(2)))

    def _add_columns(self, rng: random.Random) -> None:
        server, name = rng.choice([(self.source, SOURCE), (self.sink, SINK)])
        if name == SINK and self.scenario.sink == "table":
            return

        def work(store: Any) -> None:
            queue = store.queue(name)
            if ADDED not in queue.schema.names:
                queue.add_columns(pa.schema([(ADDED, pa.string())]))

        self._with_store(server, work)

    def _recreate_sink(self, rng: random.Random) -> None:
        """The sink is dropped with all its rows, and made anew."""
        if self.scenario.sink == "table":
            return

        def work(store: Any) -> None:
            self.history.recreated = True
            self.history.foreign.clear()
            with suppress(CommitOutcomeUnknown):
                store.drop_queue(SINK)
            self.history.may_lack.update(each for rows in self.reader().source for each in rows)
            with suppress(CommitOutcomeUnknown):
                key = ("key",) if self.scenario.sink == "keyed" else ()
                store.create_queue(SINK, SCHEMA, partitions=self.scenario.sink_partitions, key=key)

        self.may_refuse.add("recreate")
        self._with_store(self.sink, work)

    def _foreign(self, rng: random.Random) -> None:
        """Others append to the sink as well."""
        if self.scenario.sink != "table":
            first = FOREIGN + 1000 * len(self.producers)
            self._produce(SINK, first, 2 + rng.randrange(4))

    def _maintain(self, rng: random.Random) -> None:
        older = timedelta(seconds=rng.choice([0, 2, 86400]))
        self._with_store(rng.choice([self.source, self.sink]), lambda store: self._tended(store, older))

    def _maintain_on(self) -> None:
        """As every store is looked after in the background, until the end is only waited for."""
        while not self.quiet:
            self.world.sleep(1.0)
            for server in (self.source, self.sink):
                with suppress(PenstockError):
                    self._tended(open_store(server.url), timedelta(days=1))

    def _tended(self, store: Any, older: timedelta) -> None:
        for name in store.queues():
            record = store.queue(name).record
            for partition in range(record.partitions):
                merge.merge_all(store.database, record, partition)
            upkeep(store.database, store.uuid, record, range(record.partitions))
        sweep_staging(store.database, store.uuid, older)

    def _trim(self, rng: random.Random) -> None:
        """By hand, as far as consumers allow."""
        before = rng.randrange(12)

        def work(store: Any) -> None:
            record = store.queue(SOURCE).record
            now = self.reader()
            for partition, (first, ids) in enumerate(zip(now.first, now.source, strict=True)):
                bound = min(before, first + len(ids))
                gone = ids[: max(0, bound - first)]
                self.history.trimmed.update(gone)
                if not (self.scenario.consumer and self.scenario.vital):
                    self.history.may_lack.update(gone)
                trim_partition(store.database, store.uuid, record, partition, bound)

        waits = self.scenario.consumer and self.scenario.vital
        if self.scenario.fail_on_data_loss and not waits:
            self.may_refuse.add("trim")
        self._with_store(self.source, work)

    reader: Callable[[], Any]
    """What everybody can read at this moment."""

    def _seek(self, rng: random.Random) -> None:
        """The query is dead or not; a consumer that is in use refuses, and then a new checkpoint goes on where the consumer stands."""
        if not self.scenario.consumer:
            return
        found = self.current
        if found is not None and rng.random() < 0.6:
            if rng.random() < 0.5:
                found[0].kill()
            else:
                # Long enough for the next query to have committed before this one wakes.
                self._stand_still(found[0], 12.0)
                for server in (self.source, self.sink):
                    server.forget_owners(found[0])

        to = rng.choice(["same", "same", "earliest"])

        def work(store: Any) -> None:
            consumer = store.consumer(CONSUMER)
            before, restores = consumer.offsets(SOURCE), self.source.restores
            self.history.sought = True
            to_offsets = consumer.seek(SOURCE, to=before if to == "same" else "earliest")
            self._may_repeat(to_offsets)
            if self.source.restores != restores:
                # It was sought to where it stood before the backup came.
                self.history.may_lack.update(each for rows in self.reader().source for each in rows)
            self._new_checkpoint()

        self.may_refuse.add("seek")
        self._with_store(self.source, work)

    def _may_repeat(self, offsets: dict[int, int]) -> None:
        """Rows from there on come again, as far as they have come before."""
        now = self.reader()
        there = {row[0] for rows in now.sink for row in rows}
        # Of two stores, the sink's cannot know yet that what a driver is about to commit is out of date. The consumer seems free
        # although a driver runs when that one has just taken over, and the lock has gone with the driver before it.
        drivers = [driver for driver, _ in self.runs]
        runs = any(driver.alive and not driver.paused for driver in drivers)
        commits = any(tx.process in drivers for tx in self.sink.open if tx.write)
        anyhow = self.scenario.two_stores and (runs or commits)
        for partition, (first, ids) in enumerate(zip(now.first, now.source, strict=True)):
            again = ids[max(0, offsets.get(partition, 0) - first) :]
            self.history.repeats.update(each for each in again if anyhow or each in there)

    def _lose_checkpoint(self, rng: random.Random) -> None:
        """A new checkpoint where a consumer knows how far the query has come; drivers that have the old one are zombies."""
        # Where only the sink was restored, the consumer has to be sought first.
        lost = self.history.restored and self.scenario.two_stores
        if self.scenario.consumer and self.scenario.guarantee == "exactly_once" and not lost:
            self.may_refuse.add("checkpoint")
            self._new_checkpoint()
            self._start()

    def _new_checkpoint(self) -> None:
        self._checkpoints += 1
        self.checkpoint = f"/checkpoint{self._checkpoints}"

    def _recreate_source(self, rng: random.Random) -> None:
        """The source is dropped, and made anew with the same name; the query goes on with its checkpoint."""

        def work(store: Any) -> None:
            self.history.may_lack.update(each for rows in self.reader().source for each in rows)
            self.history.recreated = True
            with suppress(CommitOutcomeUnknown):
                store.drop_queue(SOURCE, force=True)
            with suppress(CommitOutcomeUnknown):
                store.create_queue(SOURCE, SCHEMA, partitions=self.scenario.source_partitions)
            if self.scenario.consumer:
                store.consumer(CONSUMER).register(SOURCE, vital=self.scenario.vital)
            self._produce(SOURCE, self._fresh_ids(), 3)

        self.may_refuse.add("recreate")
        self._with_store(self.source, work)

    def _take_backup(self, rng: random.Random) -> None:
        self.backup = self._copied()

    def _copied(self) -> Backup:
        stores = {server.url: server.backup() for server in {self.source, self.sink}}
        return Backup(stores, dict(self.machine.disk.files))

    def _restore(self, rng: random.Random) -> None:
        """Of one store or of both, with the checkpoint or without; the query is stopped for it, as a rule."""
        backup = self.backup
        begun = self.machine.disk.numbers(f"{self.checkpoint}/commits")
        # A new checkpoint that has committed nothing knows of nothing that another store could have lost.
        if backup is None or (self.scenario.two_stores and not begun):
            return
        which = rng.choice([[self.source], [self.sink], [self.source, self.sink]])
        if not self.scenario.consumer and self.scenario.two_stores and self.producing:
            # Nothing could tell that the queue has grown again to where the query stands.
            which = [self.sink]
        # Who has no consumer is asked to stop: nothing else could tell that rows have come back with other content.
        stopped = not self.scenario.consumer or rng.random() < 0.8
        if stopped:
            for driver, run in self.runs:
                driver.kill()
                run.executors.kill()
        for server in set(which):
            server.restore(backup.stores[server.url])
        if stopped and rng.random() < 0.3 and f"{self.checkpoint}/metadata" in backup.files:
            self.machine.disk.files = dict(backup.files)
        self.history.restored = True
        self.may_refuse.add("restore")
        # Whoever restores goes on producing; without a consumer, when the query has been started again.
        first, appends = self._fresh_ids(), 2 + rng.randrange(6)
        self._waiting += 1
        self.world.later(0.0 if self.scenario.consumer else 60.0, lambda: self._produce_now(first, appends))

    def _restore_checkpoint(self, rng: random.Random) -> None:
        """Of an earlier moment than the stores, with the query stopped."""
        backup = self.backup
        if backup is None or f"{self.checkpoint}/metadata" not in backup.files:
            return
        for driver, run in self.runs:
            driver.kill()
            run.executors.kill()
        self.machine.disk.files = dict(backup.files)
        self.may_refuse.add("restore")

    def _fresh_ids(self) -> int:
        self._ids += 1000
        return self._ids

    def _produce_now(self, first: int, appends: int) -> None:
        self._waiting -= 1
        self._produce(SOURCE, first, appends)

    # Help.

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self.world.sleep(seconds)
            try:
                work()
            except (PenstockError, SparkError) as error:
                self.world.note(f"the operator is told: {error}")

        self.process.spawn(run, "operate")

    def _with_store(self, server: Server, work: Callable[[Any], None]) -> None:
        self._later(0.0, lambda: work(open_store(server.url)))


KINDS = (
    "pause",
    "pause",
    "crash",
    "pause_executors",
    "pause_producer",
    "disconnect",
    "lose_reply",
    "restart_server",
    "clock",
    "take_over",
    "stop",
    "change_options",
    "grow_source",
    "grow_sink",
    "foreign",
    "add_columns",
    "recreate_sink",
    "maintain",
    "trim",
    "seek",
    "lose_checkpoint",
    "recreate_source",
    "restore_checkpoint",
    "take_backup",
    "restore",
)
