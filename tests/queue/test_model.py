"""A store compared with a plain Python model, over random histories.

Choose the profile with Hypothesis's ``--hypothesis-profile``, or with ``HYPOTHESIS_PROFILE`` in the
environment. ``long`` runs for many minutes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import penstock
from penstock.errors import DataLostError, InvalidPositionError, OffsetConflictError, ProducerFencedError
from tests.support.queues import without_disk_sync

SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64())])
KEYS = st.integers(0, 12)
COUNTS = st.integers(0, 6)
NAMES = st.sampled_from(["a", "b"])
HERE = st.floats(0, 1)
"""A place between the first and the last of something."""

_checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
PROFILES = {
    "default": settings(
        max_examples=28, stateful_step_count=35, deadline=None, suppress_health_check=_checks
    ),
    "long": settings(
        max_examples=3000, stateful_step_count=150, deadline=None, suppress_health_check=_checks
    ),
}


@dataclass
class Partition:
    """The expected content of a partition: the rows from 0 on, without trimmed rows."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    first: int = 0

    @property
    def next(self) -> int:
        return len(self.rows)

    @property
    def there(self) -> list[tuple[int, int]]:
        return self.rows[self.first :]


@dataclass
class Model:
    """The expected state of the queue, its consumers and its producer sessions."""

    keyed: bool
    partitions: list[Partition]
    retention: int | None = None
    offsets: dict[str, list[int]] = field(default_factory=dict)
    vital: dict[str, bool] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def bound(self, partition: int) -> int:
        """Return how far vital consumers allow the partition to be trimmed."""
        held = [self.offsets[name][partition] for name, vital in self.vital.items() if vital]
        return min([self.partitions[partition].next, *held])

    def trim(self, partition: int, before: int | None) -> None:
        there = self.partitions[partition]
        kept = there.first if self.retention is None else there.next - self.retention
        wanted = kept if before is None else before if self.retention is None else min(before, kept)
        there.first = max(there.first, min(wanted, self.bound(partition)))

    def homes(self) -> dict[int, int]:
        return {key: number for number, part in enumerate(self.partitions) for key, _ in part.there}


class StoreMachine(RuleBasedStateMachine):
    """Model of one queue. Its consumers and sessions are called a and b."""

    created = 0

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.store = penstock.connect(url)
        self.value = 0
        StoreMachine.created += 1
        self.suffix = f"{os.getpid()}-{StoreMachine.created}"
        self.producers: dict[str, penstock.Producer] = {}
        self.stale: list[penstock.Producer] = []

    @initialize(partitions=st.integers(1, 3), keyed=st.booleans())
    def create(self, partitions: int, keyed: bool) -> None:
        self.name = f"q{self.suffix}"
        self.queue = self.store.create_queue(
            self.name, SCHEMA, partitions=partitions, key=["k"] if keyed else []
        )
        self.model = Model(keyed, [Partition() for _ in range(partitions)])
        for name in ("a", "b"):
            self.store.create_consumer(name + self.suffix)

    def teardown(self) -> None:
        if hasattr(self, "name"):
            for name in ("a", "b"):
                self.store.drop_consumer(name + self.suffix)
            self.store.drop_queue(self.name)
        self.store.close()

    def consumer(self, name: str) -> penstock.Consumer:
        return self.store.consumer(name + self.suffix)

    def rows(self, keys: list[int]) -> list[dict[str, int]]:
        self.value += len(keys)
        return [{"k": key, "n": self.value - n} for n, key in enumerate(keys)]

    def appended(self, rows: list[dict[str, int]], ranges: dict[int, tuple[int, int]]) -> None:
        """Check that rows are at the reported indexes, in order within each partition, and in the partition
        of their key.
        """
        homes = self.model.homes()
        left = [(row["k"], row["n"]) for row in rows]
        for number, (start, end) in ranges.items():
            while number >= len(self.model.partitions):
                raise AssertionError(f"partition {number} is not there")
            part = self.model.partitions[number]
            assert start == part.next
            found = [(row["k"], row["n"]) for row in self.queue.read(number, start, end).to_pylist()]
            assert len(found) == end - start
            assert found == [row for row in left if row in found]
            left = [row for row in left if row not in found]
            part.rows += found
            if self.model.keyed:
                assert all(homes.get(key, number) == number for key, _ in found), (homes, found, number)
        assert left == []

    # Actions of users.

    @rule(keys=st.lists(KEYS, max_size=8))
    def append(self, keys: list[int]) -> None:
        rows = self.rows(keys)
        self.appended(rows, self.queue.append(rows).ranges)

    @precondition(lambda self: not self.model.keyed)
    @rule(keys=st.lists(KEYS, max_size=5), where=HERE)
    def append_to(self, keys: list[int], where: float) -> None:
        number = int(where * (len(self.model.partitions) - 1))
        rows = self.rows(keys)
        ranges = self.queue.append(rows, number).ranges
        assert set(ranges) <= {number}
        self.appended(rows, ranges)

    @rule(count=st.integers(1, 70))
    def append_many_times(self, count: int) -> None:
        """Append so often that some segments are compacted in the background."""
        for _ in range(count):
            rows = self.rows([count % 13])
            self.appended(rows, self.queue.append(rows).ranges)

    @rule(name=NAMES)
    def open_session(self, name: str) -> None:
        if name in self.producers:
            self.stale.append(self.producers[name])
        producer = self.store.producer(self.name, name)
        self.producers[name] = producer
        self.model.epochs[name] = self.model.epochs.get(name, 0) + 1
        assert (producer.epoch, producer.sequence) == (
            self.model.epochs[name],
            self.model.sequences.setdefault(name, -1),
        )

    @rule(name=NAMES, step=st.integers(-2, 3), keys=st.lists(KEYS, max_size=5))
    def produce(self, name: str, step: int, keys: list[int]) -> None:
        if name not in self.producers:
            return
        number = max(0, self.model.sequences[name] + step)
        rows = self.rows(keys)
        result = self.producers[name].append(rows, number)
        assert result.skipped == (number <= self.model.sequences[name])
        if result.skipped:
            assert result.ranges == {}
        else:
            self.model.sequences[name] = number
            self.appended(rows, result.ranges)

    @rule(where=HERE)
    def produce_after_a_takeover(self, where: float) -> None:
        if not self.stale:
            return
        with pytest.raises(ProducerFencedError):
            self.stale[int(where * (len(self.stale) - 1))].append(self.rows([1]), 10**6)

    @rule(name=NAMES, vital=st.booleans(), start=st.sampled_from(["earliest", "latest"]))
    def register(self, name: str, vital: bool, start: str) -> None:
        self.consumer(name).register(self.name, vital=vital, start=start)
        self.model.vital[name] = vital
        if name not in self.model.offsets:
            parts = self.model.partitions
            self.model.offsets[name] = [part.first if start == "earliest" else part.next for part in parts]

    @rule(name=NAMES)
    def unregister(self, name: str) -> None:
        if name in self.model.offsets:
            self.consumer(name).unregister(self.name)
            del self.model.offsets[name], self.model.vital[name]

    @rule(name=NAMES, where=HERE, most=st.integers(1, 10), advance=st.booleans(), stale=st.integers(0, 1))
    def pull(self, name: str, where: float, most: int, advance: bool, stale: int) -> None:
        if name not in self.model.offsets:
            return
        number = int(where * (len(self.model.partitions) - 1))
        part, offset = self.model.partitions[number], self.model.offsets[name][number]
        consumer = self.consumer(name)
        if offset < part.first:
            with pytest.raises(DataLostError):
                consumer.pull(self.name, number, max_rows=most)
            return
        pull = consumer.pull(self.name, number, max_rows=most)
        assert (pull.start, pull.end) == (offset, min(offset + most, part.next))
        assert [(row["k"], row["n"]) for row in pull.table.to_pylist()] == part.rows[pull.start : pull.end]
        if stale and pull.end > pull.start:
            with pytest.raises(OffsetConflictError):
                consumer.advance(self.name, number, old=pull.end, new=pull.end)
        if advance:
            consumer.advance(self.name, number, old=pull.start, new=pull.end)
            self.model.offsets[name][number] = pull.end

    @rule(name=NAMES, to=st.sampled_from(["earliest", "latest"]) | HERE, dry_run=st.booleans())
    def seek(self, name: str, to: str | float, dry_run: bool) -> None:
        if name not in self.model.offsets:
            return
        parts, stands = self.model.partitions, self.model.offsets[name]
        if isinstance(to, str):
            position: Any = to
            expected = [part.first if to == "earliest" else part.next for part in parts]
        else:
            number = int(to * (len(parts) - 1))
            index = parts[number].first + int(to * len(parts[number].there))
            position = {number: index}
            expected = [max(offset, part.first) for offset, part in zip(stands, parts, strict=True)]
            expected[number] = index
        found = self.consumer(name).seek(self.name, to=position, dry_run=dry_run)
        assert found == dict(enumerate(expected))
        if not dry_run:
            self.model.offsets[name] = expected

    @rule(name=NAMES, beyond=st.integers(1, 3))
    def seek_too_far(self, name: str, beyond: int) -> None:
        if name in self.model.offsets:
            with pytest.raises(InvalidPositionError):
                self.consumer(name).seek(self.name, to={0: self.model.partitions[0].next + beyond})

    @rule(where=HERE, before=HERE)
    def trim(self, where: float, before: float) -> None:
        number = int(where * (len(self.model.partitions) - 1))
        index = int(before * (self.model.partitions[number].next + 2))
        self.queue.trim(number, index)
        self.model.trim(number, index)

    @rule(keep=st.none() | st.integers(0, 20))
    def retain(self, keep: int | None) -> None:
        """Set a retention only for a moment: otherwise the model could not know what is trimmed in the
        background.
        """
        self.queue.set_retention(penstock.Retention(rows=keep))
        self.model.retention = keep
        self.queue.maintain()
        for number in range(len(self.model.partitions)):
            self.model.trim(number, None)
        self.queue.set_retention(penstock.Retention())
        self.model.retention = None

    @rule()
    def merge(self) -> None:
        self.queue.compact()
        assert self.queue.compact() == 0

    @precondition(lambda self: len(self.model.partitions) < 8)
    @rule(count=st.integers(1, 3))
    def add_partitions(self, count: int) -> None:
        assert self.queue.add_partitions(count) == len(self.model.partitions) + count
        self.model.partitions += [Partition() for _ in range(count)]
        for offsets in self.model.offsets.values():
            offsets += [0] * count

    @rule()
    def reopen(self) -> None:
        """Stop using the objects of the old store, as if its process had ended."""
        self.store.close()
        self.store = penstock.connect(self.url, create=False)
        self.queue = self.store.queue(self.name)
        self.producers.clear()
        self.stale.clear()

    # Invariants.

    @invariant()
    def the_queue_holds_what_it_should(self) -> None:
        if not hasattr(self, "model"):
            return
        info = self.queue.info()
        for number, (part, found) in enumerate(zip(self.model.partitions, info.partitions, strict=True)):
            assert (found.partition, found.first_index, found.next_index) == (number, part.first, part.next)
            rows = self.queue.read(number, part.first).to_pylist()
            assert [(row["k"], row["n"]) for row in rows] == part.there
            assert (found.segments == 0) == (found.bytes == 0)
            assert found.segments <= max(1, found.next_index)

    @invariant()
    def consumers_stand_where_they_should(self) -> None:
        for name, offsets in getattr(self, "model", Model(False, [])).offsets.items():
            consumer = self.consumer(name)
            assert consumer.offsets(self.name) == dict(enumerate(offsets))
            lag = consumer.lag(self.name)
            assert lag.rows == sum(
                part.next - offset for part, offset in zip(self.model.partitions, offsets, strict=True)
            )


def _profile() -> settings:
    return PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "default")]


def test_a_store_agrees_with_its_model(store_url: str) -> None:
    run_state_machine_as_test(lambda: StoreMachine(without_disk_sync(store_url)), settings=_profile())
