"""The whole protocol compared with a plain model, with drivers that die between any two steps, zombies and
lost checkpoints.

At every moment the sink has exactly the rows that the consumer has passed, each row once.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import penstock
from penstock import Retention, connect
from penstock.commit.offsets import QueueOffset
from penstock.errors import ConsumerInUseError
from penstock.testing import temporary_store
from tests.commit.driver import OUTPUT, Checkpoint, Driver, Query
from tests.commit.protocol import SCHEMA

_numbers = itertools.count()


class Protocol(RuleBasedStateMachine):
    """Model of one consumer on one or two queues, one sink, and any number of drivers and checkpoints."""

    store: penstock.Store

    @initialize(
        sources=st.integers(1, 2),
        kind=st.sampled_from(["stateless", "stateful", "idempotent"]),
        rows=st.integers(1, 9),
    )
    def begin(self, sources: int, kind: str, rows: int) -> None:
        run = next(_numbers)
        self.kind = kind
        self.queues = tuple(f"source-{place}-{run}" for place in range(sources))
        self.consumer = f"consumer-{run}"
        self.ids = itertools.count()
        self.written: dict[tuple[str, int], list[int]] = {}
        self.expected: Counter[int] = Counter()
        self.base: dict[tuple[str, int], int] = {}
        consumer = self.store.create_consumer(self.consumer)
        for queue in self.queues:
            self.store.create_queue(queue, SCHEMA, partitions=2)
            consumer.register(queue, vital=True)
            for partition in range(2):
                self.append(queue, partition, rows)
        self.sink = self.store.create_queue(f"sink-{run}", OUTPUT, partitions=2)
        self.drivers: list[Driver] = []
        self.checkpoints = [self.new_checkpoint()]
        self.start(self.checkpoints[0])

    def append(self, queue: str, partition: int, rows: int) -> None:
        ids = [next(self.ids) for _ in range(rows)]
        self.store.queue(queue).append([{"id": i} for i in ids], partition=partition)
        self.written.setdefault((queue, partition), []).extend(ids)

    def new_checkpoint(self) -> Checkpoint:
        return Checkpoint(self.kind == "stateful")

    def start(self, checkpoint: Checkpoint) -> Driver:
        record = self.store.queue(self.sink.name).record
        driver = Driver(
            Query(self.store, self.queues, self.consumer, record, checkpoint, self.kind == "idempotent")
        )
        self.drivers.append(driver)
        return driver

    # Events of queries.

    @precondition(lambda self: len(self.drivers) < 3)
    @rule(which=st.integers(0, 3))
    def start_driver(self, which: int) -> None:
        """Start a driver, mostly on the newest checkpoint: a restart, or a second driver while the first
        still runs.
        """
        self.start(self.checkpoints[-1] if which else self.checkpoints[0])

    @precondition(lambda self: self.drivers)
    @rule(which=st.integers(0, 2), steps=st.integers(1, 9), choice=st.integers(0, 30))
    def go_on_a_little(self, which: int, steps: int, choice: int) -> None:
        driver = self.drivers[which % len(self.drivers)]
        for step in range(steps):
            if driver.error is None:
                driver.step(choice + step)
        if driver.error is not None:
            self.drivers.remove(driver)

    @precondition(lambda self: self.drivers)
    @rule(
        which=st.integers(0, 2), batches=st.integers(1, 3), then=st.integers(0, 7), choice=st.integers(0, 30)
    )
    def go_on(self, which: int, batches: int, then: int, choice: int) -> None:
        """Run some whole micro-batches, and a few steps of the next one."""
        driver = self.drivers[which % len(self.drivers)]
        wanted, idle = driver.batches + batches, 0
        while driver.error is None and driver.batches < wanted and idle < 4:
            choice += 1
            driver.step(choice)
            idle = idle + 1 if driver.state == "READY" else 0
        self.go_on_a_little(which, then, choice)

    @precondition(lambda self: self.drivers)
    @rule(which=st.integers(0, 2))
    def kill(self, which: int) -> None:
        driver = self.drivers.pop(which % len(self.drivers))
        driver.die()

    @precondition(lambda self: self.kind != "idempotent")
    @rule()
    def lose_the_checkpoint(self) -> None:
        """Lose the checkpoint. Drivers that still have it are zombies from now on."""
        self.checkpoints.append(self.new_checkpoint())

    # Events of the store.

    @rule(queue=st.integers(0, 1), partition=st.integers(0, 1), rows=st.integers(1, 9))
    def write(self, queue: int, partition: int, rows: int) -> None:
        self.append(self.queues[queue % len(self.queues)], partition, rows)

    @rule(
        what=st.sampled_from(["grow", "grow the sink", "clean", "trim", "retention"]), queue=st.integers(0, 1)
    )
    def tend(self, what: str, queue: int) -> None:
        source = self.store.queue(self.queues[queue % len(self.queues)])
        if what == "grow" and source.partitions < 4:
            self.append(source.name, source.add_partitions(1) - 1, 2)
        elif what == "grow the sink" and self.store.queue(self.sink.name).partitions < 4:
            self.sink.add_partitions(1)
        elif what == "clean":
            self.store.clean_up(timedelta(seconds=-1))
        elif what == "trim":
            source.trim(before=2**40)
        elif what == "retention":
            self.sink.set_retention(Retention(rows=10**6 + queue))

    # With guarantee=idempotent, rows become visible before the commit can be refused. So no other checkpoint
    # may start while a micro-batch is in flight, which this guarantee requires.
    @precondition(lambda self: self.kind != "idempotent" or not (self.drivers or self.in_hand()))
    @rule(back=st.integers(0, 6))
    def seek(self, back: int) -> None:
        consumer = self.store.consumer(self.consumer)
        passed = self.passed()
        try:
            for queue in self.queues:
                stands = consumer.offsets(queue)
                to = {p: max(self.first(queue, p), offset - back) for p, offset in stands.items()}
                consumer.seek(queue, to=to)
        except ConsumerInUseError:
            # Take the owner of the first queue: a driver owns all queues or none.
            return
        self.expected = passed
        self.base = {
            (queue, partition): offset
            for queue in self.queues
            for partition, offset in consumer.offsets(queue).items()
        }
        used = {driver.query.checkpoint.id for driver in self.drivers}
        self.checkpoints = [c for c in self.checkpoints if c.offsets or c.id in used] + [
            self.new_checkpoint()
        ]

    # Invariants.

    def offset(self, queue: str, partition: int) -> int:
        return int(self.store.consumer(self.consumer).offsets(queue)[partition])

    def first(self, queue: str, partition: int) -> int:
        return int(self.store.queue(queue).info().partitions[partition].first_index)

    def passed(self) -> Counter[int]:
        """Return the rows that the sink must have: those that the consumer has passed, also before seeks."""
        found = Counter(self.expected)
        for queue in self.queues:
            for partition, offset in self.store.consumer(self.consumer).offsets(queue).items():
                ids = self.written.get((queue, partition), [])
                found.update(ids[self.base.get((queue, partition), 0) : offset])
        return found

    def there(self) -> list[tuple[int, int]]:
        sink = self.store.queue(self.sink.name)
        tables = [sink.read(partition, 0) for partition in range(sink.partitions)]
        return [(row["id"], row["nth"]) for table in tables for row in table.to_pylist()]

    def in_hand(self) -> bool:
        return Counter(i for i, _ in self.there() if i >= 0) != self.passed()

    @invariant()
    def rows_are_there_once(self) -> None:
        rows = self.there()
        ids = Counter(i for i, _ in rows if i >= 0)
        if self.kind == "idempotent":
            assert not self.passed() - ids
        else:
            assert ids == self.passed()
        assert max(Counter(i for i, _ in rows if i < 0).values(), default=1) == 1

    @invariant()
    def state_has_seen_every_row_once(self) -> None:
        if self.kind != "stateful" or self.base:
            return
        nth = {i: n for i, n in self.there() if i >= 0}
        for ids in self.written.values():
            assert all(nth[i] == place + 1 for place, i in enumerate(ids) if i in nth)

    @invariant()
    def only_what_spark_has_logged_is_safe(self) -> None:
        logged = [
            offset
            for checkpoint in self.checkpoints
            for batch_id in checkpoint.commits
            for offset in map(QueueOffset.of, checkpoint.parsed(batch_id))
            if offset is not None
        ]
        for queue in self.queues:
            keys = self.store.consumer(self.consumer).registration(queue).keys
            rows = self.store.database.run(
                lambda tx, keys=keys: tx.all("read_positions", **keys), write=False
            )
            for row in rows:
                ends = [
                    o.end[row.partition] for o in logged if o.queue == queue and row.partition < len(o.end)
                ]
                begun = self.base.get((queue, row.partition), 0)
                assert row.safe_index <= row.next_index
                assert row.safe_index <= max(ends, default=begun) or row.safe_index == begun

    def teardown(self) -> None:
        """Check that after all failures one driver on the consumer's checkpoint delivers all rows."""
        for driver in self.drivers:
            driver.die()
        if not hasattr(self, "queues"):
            return
        bound = self.store.consumer(self.consumer).registration(self.queues[0]).app_id
        mine = [check for check in self.checkpoints if check.id == bound] or [self.new_checkpoint()]
        if self.kind == "idempotent":
            mine = self.checkpoints[-1:]
        driver = self.start(mine[0])
        for choice in itertools.cycle(range(1, 5)):
            driver.step(choice)
            assert driver.error is None, repr(driver.error)
            if driver.state == "READY" and all(
                self.store.consumer(self.consumer).lag(queue).rows == 0 for queue in self.queues
            ):
                break
        driver.step(1)
        driver.die()
        self.rows_are_there_once()
        self.state_has_seen_every_row_once()
        assert not self.in_hand()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the warnings, since this test fences owners all the time."""
    logger = logging.getLogger("penstock.commit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def check(store: penstock.Store, examples: int) -> None:
    machine = type("StoreProtocol", (Protocol,), {"store": store})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def shared(pg_url: str) -> Iterator[penstock.Store]:
    with temporary_store(pg_url) as store:
        yield store


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[penstock.Store]:
    # There are no power failures here, so do not wait for the disk.
    with connect(f"sqlite:///{tmp_path}/model.db?synchronous=normal") as store:
        yield store


def test_rows_arrive_once_whatever_dies_in_an_embedded_store(embedded: penstock.Store) -> None:
    check(embedded, 35)


def test_rows_arrive_once_whatever_dies_in_a_shared_store(shared: penstock.Store) -> None:
    check(shared, 10)


@pytest.mark.crash_full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["embedded", "shared"])
def test_rows_arrive_once_whatever_dies_in_long_runs(kind: str, request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(kind), 600)
