"""Output mode update, by copies of files and by deletion vectors: what others commit meanwhile is heeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import CommitRefusedError
from penstock.tables.delta import vectors
from tests.tables.delta.overtaken import MANY, SCHEMA, Hook, filled, table_of
from tests.tables.delta.row_queries import RowQuery
from tests.tables.delta.vectors import ENABLED, live

KEYS = st.tuples(st.integers(0, MANY + 5), st.sampled_from(["", "é😀"]))
BATCHES = st.lists(st.dictionaries(KEYS, st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=6)
OTHERS = st.sampled_from(["nothing", "append", "delete", "compact", "checkpoint", "vacuum", "restore"])


@pytest.fixture(params=["copies", "vectors"], autouse=True)
def properties(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Those of a table whose rows are changed in one way; each file is large enough for a vector."""
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)
    return ENABLED if request.param == "vectors" else {}


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    return Hook(monkeypatch)


@pytest.mark.parametrize("keys", [["a"], ["b", "a"]])
def test_a_table_equals_a_fold_beside_other_writers(
    tmp_path: Path, properties: dict[str, str], keys: list[str]
) -> None:
    numbers = iter(range(1000))

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(batches=BATCHES, others=st.lists(OTHERS, min_size=6, max_size=6))
    def check(batches: list[dict[tuple[int, str], int]], others: list[str]) -> None:
        folder = tmp_path / str(next(numbers))
        query = filled(folder, properties | {"delta.checkpointInterval": "4"}, keys)
        rows = {tuple((n, "x")["ab".index(k)] for k in keys): (n, "x", 0) for n in range(MANY)}
        stray: list[tuple[Any, ...]] = []
        for number, (batch, other) in enumerate(zip(batches, others, strict=False), 1):
            distinct = {tuple(key["ab".index(k)] for k in keys): (*key, v) for key, v in batch.items()}
            changes = pa.Table.from_pylist(
                [dict(zip("abv", row, strict=True)) for row in distinct.values()], SCHEMA
            )
            query.write(number, changes)
            query.write(number, changes)
            rows |= distinct
            if other == "append":
                stray.append((1000 + number, "late", 0))
                write_deltalake(str(folder), table_of({stray[-1][:2]: 0}), mode="append")
            elif other == "delete":
                query.table().delete(f"a = {number}")
                rows = {key: row for key, row in rows.items() if row[0] != number}
            elif other == "compact":
                query.table().optimize.compact()
            elif other == "checkpoint":
                query.table().create_checkpoint()
            elif other == "vacuum":
                query.table().vacuum(
                    retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True
                )
            elif other == "restore":
                query.table().delete()
                query.table().restore(query.table().version() - 1)
            assert live(folder) == sorted([*rows.values(), *stray], key=repr), (number, other)

    check()


OVERTAKING: dict[str, Callable[[RowQuery], object]] = {
    "append": lambda query: write_deltalake(query.location.path, table_of({(4, "late"): 9}), mode="append"),
    "delete": lambda query: query.table().delete("a = 4"),
    "compact": lambda query: query.table().optimize.compact(),
    "checkpoint": lambda query: (query.table().delete("a = 4"), query.table().create_checkpoint()),
    "overwrite": lambda query: write_deltalake(
        query.location.path, table_of({(4, "o"): 9}), mode="overwrite"
    ),
}


@pytest.mark.parametrize("other", OVERTAKING)
def test_what_others_commit_meanwhile_is_heeded(
    tmp_path: Path, properties: dict[str, str], hook: Hook, other: str
) -> None:
    query = filled(tmp_path, properties)
    query.write(1, table_of({(MANY, "x"): 0}))
    hook.calls.append(lambda: OVERTAKING[other](query))
    query.write(2, table_of({(3, "new"): 1, (4, "new"): 1}))
    kept = [] if other == "overwrite" else [(n, "x", 0) for n in range(MANY + 1) if n not in (3, 4)]
    assert live(tmp_path) == sorted([*kept, (3, "new", 1), (4, "new", 1)], key=repr)
    first, again = hook.planned[-2:]
    assert first.has_vectors == bool(properties)
    assert first is not again


def test_two_queries_that_update_a_file_at_the_same_moment_lose_nothing(
    tmp_path: Path, properties: dict[str, str], hook: Hook
) -> None:
    one = filled(tmp_path, properties)
    other = RowQuery(tmp_path, SCHEMA, "update", ["a"], "other")
    hook.calls.append(lambda: other.write(0, table_of({(3, "other"): 1, (5, "other"): 1})))
    one.write(1, table_of({(3, "one"): 2, (4, "one"): 2}))
    kept = [(n, "x", 0) for n in range(MANY) if n not in (3, 4, 5)]
    assert live(tmp_path) == sorted([*kept, (3, "one", 2), (4, "one", 2), (5, "other", 1)], key=repr)


def test_another_run_of_the_query_commits_a_micro_batch_once(
    tmp_path: Path, properties: dict[str, str], hook: Hook
) -> None:
    one = filled(tmp_path, properties)
    other = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    rows = table_of({(3, "new"): 1})
    hook.calls.append(lambda: other.write(1, rows))
    one.write(1, rows)
    assert one.table().version() == 2
    assert len(live(tmp_path)) == MANY


def test_a_table_that_always_changes_is_given_up(
    tmp_path: Path, properties: dict[str, str], hook: Hook
) -> None:
    query = filled(tmp_path, properties)

    def overtake() -> None:
        write_deltalake(str(tmp_path), table_of({(1000, "late"): 1}), mode="append")
        hook.calls.append(overtake)

    hook.calls.append(overtake)
    with pytest.raises(CommitRefusedError, match="10 times"):
        query.write(1, table_of({(1, "x"): 5}))
    assert len(live(tmp_path)) == MANY + 10
