"""Stores that are restored from a backup older than the checkpoint.

In every combination of engine, guarantee and store, the query fails with a condition that names the cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from penstock.queue.store import open_store
from tests.simulation.machine import Machine
from tests.simulation.operator import Backup, Operator
from tests.simulation.patches import use
from tests.simulation.scenario import CONSUMER, CONTINUOUS, MICRO_BATCH, SOURCE, Scenario
from tests.simulation.scheduler import Choices, World
from tests.simulation.server import Server
from tests.simulation.snapshots import SnapshotReader
from tests.support import auditor
from tests.support.auditor import History

SIMPLE = Scenario.draw(Choices(0, {}))
CASES = [
    (engine, guarantee, consumer, store, before_first_commit)
    for engine, guarantee, consumer, store, before_first_commit in itertools.product(
        (MICRO_BATCH, CONTINUOUS),
        ("exactly_once", "at_least_once"),
        (True, False),
        ("the only store", "the source's", "the sink's"),
        (True, False),
    )
]


class SimulatedQuery:
    """Query that a test runs step by step."""

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        self.world = machine.world
        source = machine.add_server("one", row_locks=True)
        sink = machine.add_server("two", row_locks=True) if scenario.two_stores else source
        self.servers = {"the only store": source, "the source's": source, "the sink's": sink}
        self.history = History(scenario.guarantee, ordered=False, keyed=False, one_store=source is sink)
        self.operator = Operator(machine, scenario, self.history, source, sink)
        self.reader = SnapshotReader(machine, scenario, source, sink)
        self.operator.read_snapshot = self.reader.snapshot

    def run_until(self, condition: Callable[[], bool]) -> None:
        self.world.is_finished = condition
        finished = self.world.run(self.world.steps + 20_000)
        if self.world.failure is not None:
            raise self.world.failure
        assert finished, "the condition does not become true"

    @property
    def caught_up(self) -> bool:
        snapshot = self.reader.snapshot()
        caught_up = not self.operator.is_producing and self.operator.is_caught_up(snapshot.ends)
        return bool(self.operator.producers) and caught_up and bool(self.history.acknowledged)

    def produce(self, first_id: int) -> None:
        self.operator.start_producer(SOURCE, first_id, 3)

    def kill(self) -> None:
        self.operator.kill_query()

    def restore_and_produce(self, server: Server, backup: Backup) -> list[list[tuple[int, int]]]:
        """Restore a store while the query is down and append new rows; return the rows of the sink."""
        server.restore(backup.stores[server.url])
        self.history.restored = self.history.disturbed = True
        self.produce(2_000)
        self.run_until(lambda: not self.operator.is_producing)
        return self.reader.snapshot().sink

    def back_up_then_continue(self) -> Backup:
        """Catch up, take a backup, catch up with more rows, and kill the query; return the backup."""
        if not self.operator.is_set_up:
            self.operator.set_up()
        self.run_until(lambda: self.caught_up)
        backup = self.operator.create_backup()
        self.produce(1_000)
        self.run_until(lambda: self.caught_up)
        self.kill()
        return backup

    def compact(self, server: Server) -> None:
        done = []

        def work() -> None:
            self.operator.maintain(open_store(server.url), timedelta(days=1))
            done.append(True)

        self.operator.run_later(0.0, work)
        self.run_until(lambda: bool(done))

    def seek(self) -> None:
        """Seek the consumer to its current offsets."""
        done = []

        def work(store: Any) -> None:
            consumer = store.consumer(CONSUMER)
            consumer.seek(SOURCE, to=consumer.offsets(SOURCE))
            done.append(True)

        self.operator.with_store(self.servers["the source's"], work)
        self.run_until(lambda: bool(done))

    def run_until_refused(self) -> object:
        """Run until the operator gives up, and return the error of the query."""
        self.run_until(lambda: self.operator.refusal is not None or self.caught_up)
        refusal = self.operator.refusal
        assert refusal is not None, auditor.missing_rows(self.history, self.reader.snapshot())
        return refusal


@contextmanager
def simulated_query(scenario: Scenario) -> Iterator[SimulatedQuery]:
    world = World(Choices(0, {}))
    machine = Machine(world, 0)
    with use(machine):
        yield SimulatedQuery(machine, scenario)


@pytest.mark.parametrize(("engine", "guarantee", "consumer", "store", "before_first_commit"), CASES)
def test_a_query_refuses_a_store_that_is_older_than_its_checkpoint(
    engine: str, guarantee: str, consumer: bool, store: str, before_first_commit: bool
) -> None:
    """The backup is from before or after the first commit. Producers append new rows after the restore."""
    scenario = replace(
        SIMPLE, engine=engine, guarantee=guarantee, consumer=consumer, two_stores=store != "the only store"
    )
    with simulated_query(scenario) as query:
        query.operator.set_up()
        query.run_until(lambda: query.operator.is_set_up)
        if not before_first_commit:
            query.run_until(lambda: query.caught_up)
        backup = query.operator.create_backup()
        query.run_until(lambda: query.caught_up)
        query.produce(1_000)
        query.run_until(lambda: query.caught_up)
        query.kill()
        sink_before = query.restore_and_produce(query.servers[store], backup)
        refusal = query.run_until_refused()
        assert getattr(refusal, "condition", "").endswith("_BEHIND"), refusal
        if guarantee == "exactly_once":
            assert query.reader.snapshot().sink == sink_before, "nothing is written"


@pytest.mark.parametrize("consumer", [True, False])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("pipeline", [True, False])
def test_a_micro_batch_that_spark_has_not_logged_is_not_repeated_with_other_rows(
    consumer: bool, guarantee: str, pipeline: bool
) -> None:
    """The sink has committed it, and the restored source now has other rows at the same offsets."""
    scenario = replace(
        SIMPLE,
        engine=MICRO_BATCH,
        guarantee=guarantee,
        consumer=consumer,
        two_stores=True,
        pipeline=pipeline,
    )
    with simulated_query(scenario) as query:
        backup = query.back_up_then_continue()
        commits = f"{query.operator.checkpoint}/commits"
        disk = query.operator.machine.disk
        disk.files.pop(f"{commits}/{max(disk.numbers(commits))}")
        sink_before = query.restore_and_produce(query.servers["the source's"], backup)
        refusal = query.run_until_refused()
        assert getattr(refusal, "condition", "").endswith("SOURCE_BEHIND"), refusal
        assert query.reader.snapshot().sink == sink_before, "nothing is written"


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
@pytest.mark.parametrize("consumer", [True, False])
def test_compaction_does_not_hide_that_rows_were_replaced(engine: str, consumer: bool) -> None:
    """The compacted segment has older and newer rows than the last one that was read."""
    scenario = replace(
        SIMPLE,
        engine=engine,
        guarantee="at_least_once",
        consumer=consumer,
        two_stores=True,
        max_rows_per_trigger=None,
    )
    with simulated_query(scenario) as query:
        backup = query.back_up_then_continue()
        server = query.servers["the source's"]
        query.restore_and_produce(server, backup)
        query.compact(server)
        refusal = query.run_until_refused()
        assert getattr(refusal, "condition", "").endswith("SOURCE_BEHIND"), refusal


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_replaced_rows_are_detected_when_their_times_are_ahead_of_the_clock(
    engine: str, guarantee: str
) -> None:
    """After an append while the clock is far ahead, all later rows get later times too."""
    scenario = replace(SIMPLE, engine=engine, guarantee=guarantee, consumer=False, two_stores=True)
    with simulated_query(scenario) as query:
        server = query.servers["the source's"]
        server.clock_offset += 86_400.0
        query.operator.set_up()
        query.run_until(lambda: query.caught_up)
        server.clock_offset -= 86_400.0
        backup = query.back_up_then_continue()
        query.restore_and_produce(server, backup)
        refusal = query.run_until_refused()
        assert getattr(refusal, "condition", "").endswith("SOURCE_BEHIND"), refusal


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
@pytest.mark.parametrize("two_stores", [False, True])
def test_a_query_resumes_after_a_restore_of_all_stores_and_the_checkpoint(
    engine: str, two_stores: bool
) -> None:
    with simulated_query(replace(SIMPLE, engine=engine, two_stores=two_stores)) as query:
        query.operator.set_up()
        query.run_until(lambda: query.operator.is_set_up)
        query.run_until(lambda: query.caught_up)
        backup = query.operator.create_backup()
        query.produce(1_000)
        query.run_until(lambda: query.caught_up)
        query.kill()
        for server in set(query.servers.values()):
            server.restore(backup.stores[server.url])
        query.operator.machine.disk.files = dict(backup.files)
        query.history.restored = query.history.disturbed = True
        query.produce(2_000)
        query.run_until(lambda: query.caught_up)
        assert query.operator.refusal is None
        assert auditor.missing_rows(query.history, query.reader.snapshot()) == []


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
def test_a_query_refuses_a_source_that_is_older_than_the_last_seek_until_the_next_seek(engine: str) -> None:
    """A new checkpoint does not help, since the sink has rows from after the seek."""
    scenario = replace(SIMPLE, engine=engine, guarantee="exactly_once", consumer=True, two_stores=True)
    with simulated_query(scenario) as query:
        operator = query.operator
        operator.set_up()
        query.run_until(lambda: query.caught_up)
        backup = operator.create_backup()
        query.kill()
        query.seek()
        operator.use_new_checkpoint()
        query.produce(1_000)
        query.run_until(lambda: query.caught_up)
        query.kill()
        operator.use_new_checkpoint()
        sink_before = query.restore_and_produce(query.servers["the source's"], backup)
        operator.quiet = True
        refusal = query.run_until_refused()
        assert getattr(refusal, "condition", "").endswith("CONSUMER_MOVED"), refusal
        assert query.reader.snapshot().sink == sink_before, "nothing is written"
        query.seek()
        operator.use_new_checkpoint()
        operator.refusal = None
        operator.start_driver()
        query.run_until(lambda: query.caught_up)
        assert operator.current_driver is not None
        assert operator.current_driver.run.failure is None
