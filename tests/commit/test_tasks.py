"""guarantee=idempotent: each task appends its own rows, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.commit.protocol import append_task
from penstock.errors import CheckpointMismatchError, CheckpointRewoundError, CommitRefusedError
from penstock.store.log import segmenting
from penstock.store.records import ledger
from tests.commit.protocol import Pair, make_pair, rows_of


@pytest.fixture
def pair(store: penstock.Store) -> Pair:
    return make_pair(store)


def write(
    pair: Pair,
    task: int,
    ids: Sequence[int],
    *,
    batch_id: int = 0,
    app: str = "app",
    origin: str = "check",
    covers: str = "",
) -> Any:
    sink = pair.sink.record
    key = replace(pair.batch(app, batch_id).key, task=task)
    segments = segmenting.to_segments(pa.table({"id": pa.array(ids, pa.int64())}), 0)
    return append_task(pair.store.database, sink, key, segments, origin=origin, input_id=covers)


def test_a_repeated_task_appends_once(pair: Pair) -> None:
    assert write(pair, 0, [1, 2]).rows == 2
    assert write(pair, 1, [3]).rows == 1
    assert write(pair, 0, [1, 2]) is None
    assert rows_of(pair.sink) == [1, 2, 3]


def test_a_task_without_rows_counts_as_finished(pair: Pair) -> None:
    assert write(pair, 0, []).rows == 0
    assert write(pair, 0, []) is None


def test_a_micro_batch_commits_only_with_exactly_the_tasks_that_appended(pair: Pair) -> None:
    write(pair, 0, [1, 2])
    write(pair, 1, [3])
    offset = pair.planned(pair.own(), (0, 0), (5, 2))
    batch = pair.batch("app", 0, offset, tasks={0: 2, 1: 1})
    for other in ({0: 2}, {0: 2, 1: 2}, {0: 2, 1: 1, 2: 0}):
        with pytest.raises(CommitRefusedError, match=r"NOT_REPEATABLE\].*had other tasks"):
            pair.commit(replace(batch, tasks=other))
    pair.commit(batch)
    assert pair.offsets() == [5, 2]
    assert pair.commit(batch) is None


def test_a_task_with_another_number_of_rows_is_not_a_repeat(pair: Pair) -> None:
    write(pair, 0, [1, 2])
    with pytest.raises(CommitRefusedError, match="had other tasks or other rows"):
        write(pair, 0, [1, 2, 3])
    assert rows_of(pair.sink) == [1, 2]


def test_a_task_of_a_committed_micro_batch_appends_nothing_even_if_its_rows_differ(pair: Pair) -> None:
    write(pair, 0, [1, 2])
    pair.commit(pair.batch("app", 0, tasks={0: 2}))
    assert write(pair, 0, [1]) is None
    assert write(pair, 1, [2]) is None
    assert rows_of(pair.sink) == [1, 2]


def test_a_task_of_another_checkpoint_with_the_same_app_id_is_refused(pair: Pair) -> None:
    write(pair, 0, [1, 2], origin="one")
    with pytest.raises(CheckpointMismatchError, match="from another checkpoint"):
        write(pair, 0, [1, 2], origin="two")
    assert write(pair, 0, [1, 2], origin="two", app="other").rows == 2


def test_tasks_of_a_micro_batch_whose_input_has_changed_are_refused(pair: Pair) -> None:
    """The checkpoint lost its last entry, and Spark planned the micro-batch again."""
    write(pair, 1, [1, 2], covers="rows 0 to 2")
    assert write(pair, 1, [1, 2], covers="rows 0 to 2") is None
    for task, ids in ((1, [3, 4]), (0, [1]), (2, [2])):
        with pytest.raises(CheckpointMismatchError, match="other input") as caught:
            write(pair, task, ids, covers="rows 0 to 4")
        assert caught.value.condition == "CHECKPOINT_MISMATCH.OTHER_INPUT"
    assert rows_of(pair.sink) == [1, 2]


def test_a_task_of_unknown_input_is_recognised_as_a_repeat_by_its_rows(pair: Pair) -> None:
    write(pair, 0, [1, 2], covers="rows 0 to 2")
    assert write(pair, 0, [1, 2]) is None


def test_exactly_once_does_not_repeat_what_tasks_have_appended(pair: Pair) -> None:
    """A user changed the guarantee between a crash and the restart."""
    write(pair, 0, [1, 2])
    with pytest.raises(CommitRefusedError, match=r"NOT_REPEATABLE\].*began with guarantee=idempotent"):
        pair.commit(pair.batch("app", 0, ids=[1, 2, 3]))
    assert rows_of(pair.sink) == [1, 2]


def test_tasks_do_not_repeat_what_exactly_once_has_committed(pair: Pair) -> None:
    pair.commit(pair.batch("app", 0, ids=[1, 2]))
    assert write(pair, 0, [1, 2]) is None
    assert rows_of(pair.sink) == [1, 2]


def test_a_task_of_a_micro_batch_that_the_ledger_has_deleted_is_refused_before_it_appends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "KEPT_BATCHES", 1)
    monkeypatch.setattr(ledger, "PRUNE_EVERY", 1)
    write(pair, 0, [1])
    pair.commit(pair.batch("app", 0, tasks={0: 1}))
    for number in (1, 2):
        pair.commit(pair.batch("app", number, ids=[number + 1]))
    with pytest.raises(CheckpointRewoundError):
        write(pair, 0, [1])
    assert rows_of(pair.sink) == [1, 2, 3]


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_suspended_task_whose_micro_batch_was_committed_in_the_meantime_appends_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    """The task resumes after its checks. In the meantime a driver has divided the micro-batch differently, or
    the ledger has deleted it.
    """
    if pair.store.database.dialect == "sqlite":
        pytest.skip("nobody commits while a transaction of SQLite writes")
    monkeypatch.setattr(ledger, "KEPT_BATCHES", 1)
    monkeypatch.setattr(ledger, "PRUNE_EVERY", 1)
    checked = ledger.task_input

    def suspended(*arguments: Any) -> Any:
        monkeypatch.setattr(ledger, "task_input", checked)
        found = checked(*arguments)
        with ThreadPoolExecutor(1) as others:
            others.submit(commit_meanwhile).result()
        return found

    def commit_meanwhile() -> None:
        for batch_id in range(4 if forgotten else 1):
            write(pair, 0, [batch_id], batch_id=batch_id)
            pair.commit(pair.batch("app", batch_id, tasks={0: 1}))

    monkeypatch.setattr(ledger, "task_input", suspended)
    with pytest.raises(CheckpointRewoundError if forgotten else CommitRefusedError):
        write(pair, 0 if forgotten else 1, [0])
    assert rows_of(pair.sink) == list(range(4 if forgotten else 1))


def test_a_task_is_refused_if_the_previous_micro_batch_is_missing(pair: Pair) -> None:
    key = replace(pair.batch("app", 3).key, task=0)
    with pytest.raises(CheckpointMismatchError, match="nothing of this query"):
        append_task(
            pair.store.database, pair.sink.record, key, segmenting.to_segments(pa.table({"id": [1]}), 0)
        )
    assert rows_of(pair.sink) == []


def test_a_keyed_sink_that_grew_refuses_rows_placed_before(store: penstock.Store) -> None:
    pair = make_pair(store, key=["id"])
    placed = pair.sink.record
    pair.sink.add_partitions(1)
    segments = segmenting.to_segments(pa.table({"id": [1]}), 0)
    for key in (None, replace(pair.batch("app", 0).key, task=0)):
        with pytest.raises(CommitRefusedError, match="got more partitions"):
            append_task(store.database, placed, key, segments)
    assert rows_of(pair.sink) == []


def test_tasks_without_a_ledger_key_append_again(pair: Pair) -> None:
    segments = segmenting.to_segments(pa.table({"id": [1]}), 0)
    for _ in range(2):
        append_task(pair.store.database, pair.sink.record, None, segments)
    assert rows_of(pair.sink) == [1, 1]
