"""Keyed queues that get more partitions while a continuous query and other producers write to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.json_text import Json
from tests.continuous.copying import Copy

KEYS = 16
"""So many that some move when there are more partitions."""


class KeyedCopy(Copy):
    """A copy into a queue whose rows have keys."""

    schema = pa.schema([("id", pa.int64()), ("key", pa.int64())])
    key = ("key",)

    def row(self, number: int) -> Json:
        return {"id": number, "key": number % KEYS}

    def append_as_another_producer(self, start: int) -> list[int]:
        """Append a row for each key, as another program does; return their ids."""
        ids = list(range(start, start + KEYS))
        self.out.append([self.row(number) for number in ids])
        return ids

    def homes(self) -> dict[int, set[int]]:
        """Return the partitions that each key is in."""
        found: dict[int, set[int]] = {}
        for part in self.out.info().partitions:
            table = self.out.read(part.partition, 0, part.next_index)
            for key in table["key"].to_pylist():
                found.setdefault(key, set()).add(part.partition)
        return found


@pytest.fixture
def keyed(store_url: str, tmp_path: Path) -> Iterator[KeyedCopy]:
    found = KeyedCopy(store_url, tmp_path)
    yield found
    found.close()


def grow_before_commit(
    keyed: KeyedCopy, query: ContinuousExecution, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Grow the queue and append to it between staging and commit of the first epoch; return the ids."""
    others: list[int] = []
    commit = query.sink.commit

    def grown_first(*given: object) -> None:
        if not others:
            keyed.out.add_partitions(2)
            others.extend(keyed.append_as_another_producer(1_000))
        commit(*given)

    monkeypatch.setattr(query.sink, "commit", grown_first)
    return others


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_growing_a_sink_during_an_epoch_repeats_the_run_and_keeps_each_key_in_one_partition(
    keyed: KeyedCopy, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed.guarantee = guarantee
    query = keyed.query(start=False)
    others = grow_before_commit(keyed, query, monkeypatch)
    query.start()
    # The first ones leave keys to be new to the grown queue; the last ones come when the tasks know of the
    # growth.
    for count in (KEYS // 2, KEYS, KEYS):
        keyed.add(count)
        keyed.through(query)
    others += keyed.append_as_another_producer(2_000)
    assert any(part.next_index for part in keyed.out.info().partitions[2:]), "the new partitions are used"
    assert {key: places for key, places in keyed.homes().items() if len(places) > 1} == {}
    if guarantee == "exactly_once":
        assert keyed.ids() == sorted([*keyed.all(), *others])
    assert sorted(set(keyed.ids())) == sorted([*keyed.all(), *others])
    assert (query.state, query.failure) == (State.ACTIVE, None)
    assert len(keyed.engine.jobs) == 2, "the run is repeated once"


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_growing_a_sink_between_epochs_repartitions_the_next_rows(keyed: KeyedCopy, guarantee: str) -> None:
    keyed.guarantee = guarantee
    query = keyed.query()
    keyed.add(KEYS // 2)
    keyed.through(query)
    keyed.out.add_partitions(2)
    others = keyed.append_as_another_producer(1_000)
    keyed.add(2 * KEYS)
    keyed.through(query)
    assert all(len(places) == 1 for places in keyed.homes().values())
    counted = Counter(keyed.ids())
    assert counted.keys() == {*keyed.all(), *others}
    if guarantee == "exactly_once":
        assert set(counted.values()) == {1}
    assert query.state is State.ACTIVE
