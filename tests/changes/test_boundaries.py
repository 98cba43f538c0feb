"""However a feed's rows fall into micro-batches and tasks, the passes give the same result; they run
as in Spark, but without it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes.options import ChangeOptions, parse_net_window
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout
from tests.changes import model
from tests.support.change_frames import contract, table, tuples

DATA = ((0,), (1,), (2,), (3,))
LAYOUT = Layout(5, 6, 7, row_id=((0,), (1,)), data=DATA, row_version=(3,))
BY_DATA = Layout(5, 6, 7, row_id=((0,), (1,)), data=DATA)
ORDERED = Layout(5, 6, 7, row_id=((0,), (1,)), data=DATA, row_version=(3,), sequence=(4,))
Rows = list[Any]
OPTIONS = [
    *((mode, updates, None) for mode in ("none", "dropCarryovers") for updates in (False, True)),
    *(("netChanges", updates, window) for window in ("commit", "3 seconds") for updates in (False, True)),
]


class Run:
    """One feed, with what was asked for."""

    def __init__(self, data: st.DataObject, windows: tuple[str | None, ...]) -> None:
        self._random = data.draw(st.randoms(use_true_random=False))
        flags = data.draw(st.sampled_from(["", "C", "U", "CU", "I", "CI", "IU", "CIU", "IP"]))
        mode, updates, self.window = data.draw(st.sampled_from([o for o in OPTIONS if o[2] in windows]))
        # Spark and Penstock alike refuse to look for updates among carry-overs.
        updates &= mode != "none" or not {"C", "U"} <= set(flags)
        ordered = "I" in flags and data.draw(st.booleans())
        self.feed = data.draw(model.feeds(flags, steps=2 if ordered else 1))
        self.layout = ORDERED if ordered else data.draw(st.sampled_from([LAYOUT, BY_DATA]))
        promise = contract(flags, row_id=["a", "b"], sequence="step" if ordered else None)
        self.passes = Passes.of(promise, ChangeOptions(mode, updates, parse_net_window(self.window)))
        # Without sequence and carry-over removal these two cannot be told from an update.
        self.replays = "P" not in flags and not ordered and (mode == "dropCarryovers" or "C" not in flags)
        self.replays &= self.window is None

    def at_once(self) -> Counter[object]:
        return Counter(self._whole(self.feed.rows()))

    def of_tasks(self, rows: Rows) -> Rows:
        """What is left where each task treats its part of the rows by itself."""
        parts = self._dealt(rows, 3)
        return [row for part in parts for row in tuples(self.passes.run_on_part(self._rows(part)).table)]

    def of_keys(self, rows: Rows, groups: int) -> Counter[object]:
        """What is left where rows that belong together meet, in some task or other."""
        places: dict[Any, int] = {}
        met: list[Rows] = [[] for _ in range(groups)]
        for row in rows:
            key = (row[:2], self._when(row))
            if key not in places:
                places[key] = self._random.randrange(groups)
            met[places[key]].append(row)
        return Counter(row for group in met for row in self._whole(group))

    def batches(self) -> list[Rows]:
        """Micro-batches of whole commits."""
        found: list[Rows] = [[]]
        for commit in self.feed.commits:
            if self._random.random() < 0.5:
                found.append([])
            found[-1] += commit
        return found

    def pieces(self) -> list[Rows]:
        """Micro-batches of which each may hold a part of any commit."""
        return self._dealt(self.feed.rows(), 5)

    def _dealt(self, rows: Rows, most: int) -> list[Rows]:
        hands: list[Rows] = [[] for _ in range(self._random.randint(1, most))]
        for row in rows:
            self._random.choice(hands).append(row)
        return hands

    def _when(self, row: Any) -> Any:
        """What the state store groups by, beside the row id."""
        return row[7] // 3_000_000 if self.window == "3 seconds" else row[6]

    def _rows(self, rows: Rows) -> ChangeRows:
        return ChangeRows(table(rows, model.SCHEMA), self.layout)

    def _whole(self, rows: Rows) -> Rows:
        return tuples(self.passes.run(self._rows(rows)).table) if self.passes else rows


@settings(max_examples=250)
@given(data=st.data())
def test_micro_batches_of_whole_commits(data: st.DataObject) -> None:
    run = Run(data, (None, "commit"))
    found: Counter[object] = Counter()
    for batch in run.batches():
        found += run.of_keys(run.of_tasks(batch), 2)
    assert found == run.at_once()
    if run.replays:
        assert model.replay(found.elements(), {}) == run.feed.states[-1]


@pytest.mark.parametrize("windows", [(None,), ("commit", "3 seconds")], ids=["rows", "net"])
@settings(max_examples=250)
@given(data=st.data())
def test_commits_in_parts_that_are_joined_in_the_state_store(
    windows: tuple[str | None, ...], data: st.DataObject
) -> None:
    run = Run(data, windows)
    waiting = [row for piece in run.pieces() for row in run.of_tasks(piece)]
    found = run.of_keys(waiting, 3)
    assert found == run.at_once()
    if run.replays:
        assert model.replay(found.elements(), {}) == run.feed.states[-1]
