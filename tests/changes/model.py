"""A table, random commits on it, and the change feed that a source would write for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

Key = tuple[Any, Any]
Content = tuple[Any, int]
SCHEMA = pa.schema(
    [
        ("a", pa.int64()),
        ("b", pa.string()),
        ("data", pa.string()),
        ("rv", pa.int64()),
        ("step", pa.int64()),
        ("_change_type", pa.string()),
        ("_commit_version", pa.string()),
        ("_commit_timestamp", pa.timestamp("us", tz="UTC")),
    ]
)
KEYS = st.tuples(st.integers(0, 2), st.sampled_from(["x", "y"]))
DATA = st.sampled_from([None, "p", "q"])
NOTHING: Any = (None, None)
"""The content of a row of which only the key is known."""


@dataclass
class Feed:
    """What happened to a table; the states are those before the first commit and after each."""

    states: list[dict[Key, Content]] = field(default_factory=lambda: [{}])
    commits: list[list[tuple[object, ...]]] = field(default_factory=list)
    touched: list[set[Key]] = field(default_factory=list)

    def rows(self, first: int = 0) -> list[tuple[object, ...]]:
        return [row for commit in self.commits[first:] for row in commit]


@st.composite
def feeds(draw: st.DrawFn, flags: str, *, steps: int = 1) -> Feed:
    """A feed with the flags C (carry-overs) and U (updates as delete and insert), and up to so many changes
    of a row in a commit.

    With the flag P updates are post-images alone and deletes have nothing but the key.
    """
    feed = Feed()
    time = 1_700_000_000_000_000
    for number in range(draw(st.integers(1, 6))):
        state, rows, touched = dict(feed.states[-1]), [], set()
        version = number + 1
        # To the microsecond, but no two commits in one millisecond.
        time += draw(st.integers(1_001, 5_000_000))

        def note(
            kind: str, key: Key, content: Content, step: int, *, at: int = time, by: int = version
        ) -> None:
            rows.append((*key, *content, step, kind, f"{by:04}", at))  # noqa: B023 - called in this round alone

        for key in draw(st.lists(KEYS, unique=True, max_size=5)):
            for step in range(draw(st.integers(1, steps))):
                was = state.get(key)
                what = draw(st.sampled_from(["write", "delete", "keep"]))
                if what == "keep" and was is not None and "C" in flags and step == 0:
                    for _ in range(draw(st.integers(1, 2))):
                        note("delete", key, was, 2 * step)
                        note("insert", key, was, 2 * step + 1)
                    break
                if what == "write":
                    state[key] = (draw(DATA), version)
                    update = was is not None
                    if was is not None and "P" not in flags:
                        note("delete" if "U" in flags else "update_preimage", key, was, 2 * step)
                    note(
                        "update_postimage" if update and "U" not in flags else "insert",
                        key,
                        state[key],
                        2 * step + 1,
                    )
                    touched.add(key)
                elif what == "delete" and was is not None:
                    note("delete", key, NOTHING if "P" in flags else was, 2 * step)
                    del state[key]
                    touched.add(key)
        feed.states.append(state)
        feed.commits.append(draw(st.permutations(rows)))
        feed.touched.append(touched)
    return feed


def replay(rows: Iterable[Sequence[Any]], state: dict[Key, Content]) -> dict[Key, Content]:
    """A table after the changes, commit by commit; within a commit what goes goes first."""
    state = dict(state)
    by_version = defaultdict(list)
    for row in rows:
        by_version[row[6]].append(row)
    for version in sorted(by_version):
        for a, b, data, rv, _, kind, _, _ in by_version[version]:
            if kind in ("delete", "update_preimage"):
                assert state.pop((a, b)) == (data, rv)
        for a, b, data, rv, _, kind, _, _ in by_version[version]:
            if kind in ("insert", "update_postimage"):
                assert (a, b) not in state
                state[a, b] = (data, rv)
    return state


def check_difference(
    rows: Iterable[Sequence[Any]], before: dict[Key, Content], after: dict[Key, Content], touched: set[Key]
) -> None:
    """The rows are the difference of two states, at most one change for each key."""
    gone: dict[Key, Content] = {}
    come: dict[Key, Content] = {}
    for a, b, data, rv, _, kind, _, _ in rows:
        side = gone if kind in ("delete", "update_preimage") else come
        assert (a, b) not in side
        side[a, b] = (data, rv)
    assert gone == {key: content for key, content in before.items() if key in touched}
    assert come == {key: content for key, content in after.items() if key in touched}


def check_upserts(
    rows: Iterable[Sequence[Any]], before: dict[Key, Content], after: dict[Key, Content], touched: set[Key]
) -> None:
    """The rows are the difference of two states as far as a feed without pre-images tells it."""
    found: dict[Key, dict[str, Content]] = defaultdict(dict)
    for a, b, data, rv, _, kind, _, _ in rows:
        assert kind not in found[a, b]
        found[a, b][kind] = (data, rv)
    for key in touched:
        kinds = found.pop(key, {})
        if key in after:
            assert (
                kinds.pop("update_postimage" if key in before and "delete" not in kinds else "insert")
                == after[key]
            )
            assert set(kinds) <= ({"delete", "update_preimage"} if key in before else set())
            assert all(content == NOTHING for content in kinds.values())
        else:
            assert kinds == ({"delete": NOTHING} if key in before else {})
    assert not found
