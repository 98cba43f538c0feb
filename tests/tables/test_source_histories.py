"""A table that applies changes equals their source table after every micro-batch, however often a change
arrives.

The reference is a table with random commits: rows that come, go, come again, get other values and other keys,
and trade keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.testing import temporary_store_url
from tests.tables.change_tables import ChangeTable
from tests.tables.delta.driver import Driver as DeltaDriver
from tests.tables.histories import Event, History
from tests.tables.iceberg.changes_driver import ChangesDriver as IcebergDriver

State = dict[str, int]
Row = tuple[str, int, int, int]
"""A key, a value, the commit's version, and whether the row is there."""


@dataclass(frozen=True)
class Source:
    """A table at each of its commits; before the first one it is empty."""

    states: tuple[State, ...]
    rewritten: tuple[frozenset[str], ...]
    """For each commit the keys that it has changes of: also such as have the same row as before."""

    def changes(self, version: int, whole: bool) -> Iterator[Row]:
        """The change rows of a commit, with or without the rows that there were before an update."""
        before, after = self.states[version - 1], self.states[version]
        for key in self.rewritten[version - 1]:
            if key in before and (whole or key not in after):
                yield key, before[key], version, 0
            if key in after:
                yield key, after[key], version, 1

    def now(self, version: int) -> list[tuple[Any, ...]]:
        return sorted(self.states[version].items(), key=repr)

    def history(self, version: int) -> list[tuple[Any, ...]]:
        """Each row that there was, with the commits between which it was there."""
        found: list[tuple[Any, ...]] = []
        for key in {key for keys in self.rewritten[:version] for key in keys}:
            places = [place for place in range(1, version + 1) if key in self.rewritten[place - 1]]
            for begins, ends in pairwise([*places, None]):
                assert begins is not None
                if key in self.states[begins]:
                    found.append((key, self.states[begins][key], begins, ends))
        return sorted(found, key=repr)


@st.composite
def sources(draw: st.DrawFn) -> Source:
    states: list[State] = [{}]
    rewritten: list[frozenset[str]] = []
    for _ in range(draw(st.integers(1, 7))):
        state = dict(states[-1])
        touched = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4))
        values = [state.pop(key, None) for key in touched]
        what = draw(st.sampled_from(["rows", "trade"]))
        if what == "trade":
            # Rows get the keys of one another.
            values = values[1:] + values[:1]
        else:
            values = [draw(st.one_of(st.none(), st.integers(0, 3))) for _ in touched]
        state |= {key: value for key, value in zip(touched, values, strict=True) if value is not None}
        rewritten.append(frozenset(key for key in touched if key in state or key in states[-1]))
        states.append(state)
    return Source(tuple(states), tuple(rewritten))


@st.composite
def reads(draw: st.DrawFn, commits: int) -> list[tuple[int, int]]:
    """Ranges of commits as micro-batches have them: some are read again, from any commit on."""
    done, found = 0, []
    while done < commits:
        begins = draw(st.integers(0, done))
        ends = draw(st.integers(begins + 1, commits))
        found.append((begins, max(ends, done)) if draw(st.booleans()) else (begins, ends))
        # No read leaves a gap: whoever reads again from an earlier commit reads on from there.
        done = max(done, found[-1][1])
    return found


class Applied(Protocol):
    """A table of any kind that applies changes."""

    def apply(self, batch_id: int, events: Iterable[Event], /) -> None: ...

    def rows(self) -> list[tuple[Any, ...]]: ...


@pytest.fixture(params=["sqlite", "postgresql", "delta", "iceberg"])
def new_table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Applied]]:
    """`new_table(scd_type)`: an empty table, of a kind."""
    numbers = count()
    if request.param in ("delta", "iceberg"):
        driver = DeltaDriver if request.param == "delta" else IcebergDriver
        yield lambda scd_type: driver(tmp_path / f"lake-{next(numbers)}", scd_type)
        return
    url = request.getfixturevalue("pg_url") if request.param == "postgresql" else None
    with temporary_store_url(url) as found:
        store = penstock.connect(found, create=True)
        kinds = {1: ChangeTable, 2: History}
        yield lambda scd_type: kinds[scd_type](store, found, f"t{next(numbers)}")
        store.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("scd_type", [1, 2])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=sources(), data=st.data(), whole=st.booleans(), seed=st.integers(0, 99))
def test_the_table_equals_the_source_after_every_micro_batch(
    new_table: Callable[[int], Applied],
    scd_type: int,
    source: Source,
    data: st.DataObject,
    whole: bool,
    seed: int,
) -> None:
    table = new_table(scd_type)
    shuffle, newest = random.Random(seed), 0
    for number, (after, upto) in enumerate(data.draw(reads(len(source.rewritten)))):
        rows = [row for version in range(after + 1, upto + 1) for row in source.changes(version, whole)]
        shuffle.shuffle(rows)
        if rows:
            table.apply(number, rows)
        newest = max(newest, upto)
        assert table.rows() == (source.now(newest) if scd_type == 1 else source.history(newest))


@pytest.mark.few(3)
@pytest.mark.parametrize("scd_type", [1, 2])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=sources(), data=st.data(), whole=st.booleans())
def test_the_table_equals_the_source_after_all_commits_in_any_order(
    new_table: Callable[[int], Applied], scd_type: int, source: Source, data: st.DataObject, whole: bool
) -> None:
    table = new_table(scd_type)
    last = len(source.rewritten)
    for number, version in enumerate(data.draw(st.permutations(range(1, last + 1)))):
        rows = list(source.changes(version, whole))
        if rows:
            table.apply(number, rows)
    assert table.rows() == (source.now(last) if scd_type == 1 else source.history(last))
