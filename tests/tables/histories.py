"""Histories of changes, as they are delivered, and what a table of type 2 has after them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import strategies as st

from tests.tables.targets import Table

Event = tuple[str, int, int, int]
"""A key, a value, the sequence, and whether the row is there."""


Version = tuple[str, int, int, int | None]


class History(Table):
    """A table with history, without Spark."""

    CHANGES = "_commit_version"
    HISTORY = True

    def apply(self, batch_id: int, changes: Iterable[Event]) -> None:
        stage = self.stage(batch_id=batch_id)
        self.write(stage, "changes", self.put(stage, *changes))


def folded(events: Iterable[Event]) -> list[Version]:
    """The versions, from all changes in the order of their sequence."""
    found: list[Version] = []
    keys: dict[str, dict[int, tuple[int, int]]] = {}
    for key, value, sequence, present in events:
        at = keys.setdefault(key, {})
        at[sequence] = max(at.get(sequence, (0, 0)), (present, value))
    for key, at in keys.items():
        for (begins, (present, value)), (ends, _) in pairwise([*sorted(at.items()), (None, (0, 0))]):
            if present and begins is not None:
                found.append((key, value, begins, ends))
    return sorted(found, key=repr)


@st.composite
def deliveries(draw: st.DrawFn) -> list[list[Event]]:
    """Changes in micro-batches, in any order, some of them several times; a row at a sequence has one
    value.
    """
    place = st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 1))
    events = [(k, 10 * ord(k) + s, s, p) for k, s, p in draw(st.lists(place, min_size=1, max_size=24))]
    return draw(st.lists(st.lists(st.sampled_from(events), min_size=1, max_size=12), min_size=1, max_size=5))
