"""A store that is restored from a backup older than the checkpoint.

All the combinations of a table are refused by name.
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
from tests.simulation.clients import Reader
from tests.simulation.operator import Backup, Operator
from tests.simulation.scenario import CONSUMER, CONTINUOUS, MICRO_BATCH, SOURCE, Scenario
from tests.simulation.scheduler import Choices, World
from tests.simulation.server import Server
from tests.simulation.virtual import Machine, use
from tests.support import auditor
from tests.support.auditor import History

SIMPLE = Scenario.drawn(Choices(0, {}))
TABLE = [
    (engine, guarantee, consumer, stores, before)
    for engine, guarantee, consumer, stores, before in itertools.product(
        (MICRO_BATCH, CONTINUOUS),
        ("exactly_once", "at_least_once"),
        (True, False),
        ("the one store", "the source's", "the sink's"),
        (True, False),
    )
]


class Life:
    """A query that reads everything, step by step."""

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        self.world = machine.world
        source = machine.server("one", rows=True)
        sink = machine.server("two", rows=True) if scenario.two_stores else source
        self.servers = {"the one store": source, "the source's": source, "the sink's": sink}
        self.history = History(scenario.guarantee, ordered=False, keyed=False, one_store=source is sink)
        self.operator = Operator(machine, scenario, self.history, source, sink)
        self.reader = Reader(machine, scenario, source, sink)
        self.operator.reader = self.reader.snapshot

    def until(self, reached: Callable[[], bool]) -> None:
        self.world.finished = reached
        done = self.world.run(self.world.steps + 20_000)
        if self.world.failure is not None:
            raise self.world.failure
        assert done, "it is not reached"

    @property
    def caught_up(self) -> bool:
        now = self.reader.snapshot()
        rests = not self.operator.producing and self.operator.at_rest(now.ends)
        return bool(self.operator.producers) and rests and bool(self.history.acknowledged)

    def produce(self, first: int) -> None:
        self.operator.produce(SOURCE, first, 3)

    def kill(self) -> None:
        self.operator.kill_all()

    def restore_and_produce(self, server: Server, backup: Backup) -> list[list[tuple[int, int]]]:
        """Restore a store while nothing runs, and have rows come again; return what is in the sink then."""
        server.restore(backup.stores[server.url])
        self.history.restored = self.history.disturbed = True
        self.produce(2_000)
        self.until(lambda: not self.operator.producing)
        return self.reader.snapshot().sink

    def outlive_backup(self) -> Backup:
        """Read everything, be backed up, read more, and die; return the backup."""
        if not self.operator.prepared:
            self.operator.prepare()
        self.until(lambda: self.caught_up)
        backup = self.operator.copied()
        self.produce(1_000)
        self.until(lambda: self.caught_up)
        self.kill()
        return backup

    def compact(self, server: Server) -> None:
        done = []

        def work() -> None:
            self.operator.tend(open_store(server.url), timedelta(days=1))
            done.append(True)

        self.operator.later(0.0, work)
        self.until(lambda: bool(done))

    def seek(self) -> None:
        """Seek the consumer to where it is."""
        done = []

        def work(store: Any) -> None:
            consumer = store.consumer(CONSUMER)
            consumer.seek(SOURCE, to=consumer.offsets(SOURCE))
            done.append(True)

        self.operator.with_store(self.servers["the source's"], work)
        self.until(lambda: bool(done))

    def refusal(self) -> object:
        """Run until the query is refused, and return what it is refused with."""
        self.until(lambda: self.operator.refused is not None or self.caught_up)
        refused = self.operator.refused
        assert refused is not None, auditor.missing(self.history, self.reader.snapshot())
        return refused


@contextmanager
def life(scenario: Scenario) -> Iterator[Life]:
    world = World(Choices(0, {}))
    machine = Machine(world, 0)
    with use(machine):
        yield Life(machine, scenario)


@pytest.mark.parametrize(("engine", "guarantee", "consumer", "which", "before"), TABLE)
def test_a_store_older_than_the_checkpoint_is_refused_by_name(
    engine: str, guarantee: str, consumer: bool, which: str, before: bool
) -> None:
    """Before or after the query's first commit; rows come again afterwards, as they do."""
    scenario = replace(
        SIMPLE, engine=engine, guarantee=guarantee, consumer=consumer, two_stores=which != "the one store"
    )
    with life(scenario) as query:
        query.operator.prepare()
        query.until(lambda: query.operator.prepared)
        if not before:
            query.until(lambda: query.caught_up)
        backup = query.operator.copied()
        query.until(lambda: query.caught_up)
        query.produce(1_000)
        query.until(lambda: query.caught_up)
        query.kill()
        before_start = query.restore_and_produce(query.servers[which], backup)
        refused = query.refusal()
        assert getattr(refused, "condition", "").endswith("_BEHIND"), refused
        if guarantee == "exactly_once":
            assert query.reader.snapshot().sink == before_start, "nothing is written"


@pytest.mark.parametrize("consumer", [True, False])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("pipeline", [True, False])
def test_a_micro_batch_that_spark_has_not_logged_is_not_repeated_with_other_rows(
    consumer: bool, guarantee: str, pipeline: bool
) -> None:
    """The sink has committed it; the source was restored to before its rows, and has grown again."""
    scenario = replace(
        SIMPLE,
        engine=MICRO_BATCH,
        guarantee=guarantee,
        consumer=consumer,
        two_stores=True,
        pipeline=pipeline,
    )
    with life(scenario) as query:
        backup = query.outlive_backup()
        commits = f"{query.operator.checkpoint}/commits"
        disk = query.operator.machine.disk
        disk.files.pop(f"{commits}/{max(disk.numbers(commits))}")
        before_start = query.restore_and_produce(query.servers["the source's"], backup)
        refused = query.refusal()
        assert getattr(refused, "condition", "").endswith("SOURCE_BEHIND"), refused
        assert query.reader.snapshot().sink == before_start, "nothing is written"


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
@pytest.mark.parametrize("consumer", [True, False])
def test_compaction_of_old_and_new_rows_does_not_hide_that_rows_were_replaced(
    engine: str, consumer: bool
) -> None:
    """The row that was read last had a time between those of the compacted segment."""
    scenario = replace(
        SIMPLE, engine=engine, guarantee="at_least_once", consumer=consumer, two_stores=True, max_rows=None
    )
    with life(scenario) as query:
        backup = query.outlive_backup()
        server = query.servers["the source's"]
        query.restore_and_produce(server, backup)
        query.compact(server)
        refused = query.refusal()
        assert getattr(refused, "condition", "").endswith("SOURCE_BEHIND"), refused


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_rows_dated_ahead_of_the_clock_are_told_apart_as_well(engine: str, guarantee: str) -> None:
    """One append under a clock that was far ahead dates all later ones."""
    scenario = replace(SIMPLE, engine=engine, guarantee=guarantee, consumer=False, two_stores=True)
    with life(scenario) as query:
        server = query.servers["the source's"]
        server.clock_offset += 86_400.0
        query.operator.prepare()
        query.until(lambda: query.caught_up)
        server.clock_offset -= 86_400.0
        backup = query.outlive_backup()
        query.restore_and_produce(server, backup)
        refused = query.refusal()
        assert getattr(refused, "condition", "").endswith("SOURCE_BEHIND"), refused


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
@pytest.mark.parametrize("two_stores", [False, True])
def test_stores_and_checkpoint_of_one_moment_go_on(engine: str, two_stores: bool) -> None:
    with life(replace(SIMPLE, engine=engine, two_stores=two_stores)) as query:
        query.operator.prepare()
        query.until(lambda: query.operator.prepared)
        query.until(lambda: query.caught_up)
        backup = query.operator.copied()
        query.produce(1_000)
        query.until(lambda: query.caught_up)
        query.kill()
        for server in set(query.servers.values()):
            server.restore(backup.stores[server.url])
        query.operator.machine.disk.files = dict(backup.files)
        query.history.restored = query.history.disturbed = True
        query.produce(2_000)
        query.until(lambda: query.caught_up)
        assert query.operator.refused is None
        assert auditor.missing(query.history, query.reader.snapshot()) == []


@pytest.mark.parametrize("engine", [MICRO_BATCH, CONTINUOUS])
def test_a_source_older_than_the_last_seek_is_refused_until_another_seek(engine: str) -> None:
    """Each new checkpoint is refused, since the sink has rows from after the seek."""
    scenario = replace(SIMPLE, engine=engine, guarantee="exactly_once", consumer=True, two_stores=True)
    with life(scenario) as query:
        operator = query.operator
        operator.prepare()
        query.until(lambda: query.caught_up)
        backup = operator.copied()
        query.kill()
        query.seek()
        operator.new_checkpoint()
        query.produce(1_000)
        query.until(lambda: query.caught_up)
        query.kill()
        operator.new_checkpoint()
        before_start = query.restore_and_produce(query.servers["the source's"], backup)
        operator.quiet = True
        refused = query.refusal()
        assert getattr(refused, "condition", "").endswith("CONSUMER_MOVED"), refused
        assert query.reader.snapshot().sink == before_start, "nothing is written"
        query.seek()
        operator.new_checkpoint()
        operator.refused = None
        operator.start()
        query.until(lambda: query.caught_up)
        assert operator.current is not None
        assert operator.current[1].failure is None
