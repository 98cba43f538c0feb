"""Partitions are added to keyed queues while a continuous query and other producers write to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.json_text import Json
from tests.continuous.queue_copy import Copy

KEYS = 16
"""Enough keys that some move when partitions are added."""


class KeyedCopy(Copy):
    """Copy into a keyed queue."""

    schema = pa.schema([("id", pa.int64()), ("key", pa.int64())])
    key = ("key",)

    def make_row(self, number: int) -> Json:
        return {"id": number, "key": number % KEYS}

    def append_as_another_producer(self, start: int) -> list[int]:
        """Append a row for each key as another producer, and return the rows' ids."""
        ids = list(range(start, start + KEYS))
        self.out.append([self.make_row(number) for number in ids])
        return ids

    def partitions_by_key(self) -> dict[int, set[int]]:
        """Return the partitions that contain each key."""
        partitions: dict[int, set[int]] = {}
        for part in self.out.info().partitions:
            table = self.out.read(part.partition, 0, part.next_index)
            for key in table["key"].to_pylist():
                partitions.setdefault(key, set()).add(part.partition)
        return partitions


@pytest.fixture
def keyed(store_url: str, tmp_path: Path) -> Iterator[KeyedCopy]:
    copy = KeyedCopy(store_url, tmp_path)
    yield copy
    copy.close()


def grow_before_commit(
    keyed: KeyedCopy, query: ContinuousExecution, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Add partitions and append rows between staging and commit of the first epoch.

    Return a list that then contains the ids of those rows.
    """
    other_ids: list[int] = []
    commit = query.sink.commit

    def grow_and_commit(*args: object) -> None:
        if not other_ids:
            keyed.out.add_partitions(2)
            other_ids.extend(keyed.append_as_another_producer(1_000))
        commit(*args)

    monkeypatch.setattr(query.sink, "commit", grow_and_commit)
    return other_ids


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_growing_a_sink_during_an_epoch_repeats_the_run_and_keeps_each_key_in_one_partition(
    keyed: KeyedCopy, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed.guarantee = guarantee
    query = keyed.create_query(start=False)
    other_ids = grow_before_commit(keyed, query, monkeypatch)
    query.start()
    # The first rows leave some keys unused until the queue has grown. The tasks know the new partitions when
    # they write the last rows.
    for count in (KEYS // 2, KEYS, KEYS):
        keyed.add(count)
        keyed.wait_until_committed(query)
    other_ids += keyed.append_as_another_producer(2_000)
    assert any(part.next_index for part in keyed.out.info().partitions[2:]), "the new partitions are used"
    assert {
        key: partitions for key, partitions in keyed.partitions_by_key().items() if len(partitions) > 1
    } == {}
    if guarantee == "exactly_once":
        assert keyed.ids() == sorted([*keyed.expected_ids(), *other_ids])
    assert sorted(set(keyed.ids())) == sorted([*keyed.expected_ids(), *other_ids])
    assert (query.state, query.failure) == (State.ACTIVE, None)
    assert len(keyed.engine.jobs) == 2, "the run is repeated once"


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_growing_a_sink_between_epochs_repartitions_the_next_rows(keyed: KeyedCopy, guarantee: str) -> None:
    keyed.guarantee = guarantee
    query = keyed.create_query()
    keyed.add(KEYS // 2)
    keyed.wait_until_committed(query)
    keyed.out.add_partitions(2)
    other_ids = keyed.append_as_another_producer(1_000)
    keyed.add(2 * KEYS)
    keyed.wait_until_committed(query)
    assert all(len(partitions) == 1 for partitions in keyed.partitions_by_key().values())
    counts = Counter(keyed.ids())
    assert counts.keys() == {*keyed.expected_ids(), *other_ids}
    if guarantee == "exactly_once":
        assert set(counts.values()) == {1}
    assert query.state is State.ACTIVE
