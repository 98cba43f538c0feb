"""A checkpoint with a limit for each key keeps that limit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import CheckpointMismatchError, CommitRefusedError
from penstock.limits.record import KeyRecord, read_record, store_key_record, store_record
from penstock.spark.checkpoint import Checkpoint

LIMIT = KeyRecord(("a",), 2, None)


def begin(folder: Path) -> None:
    """As Spark begins the first micro-batch."""
    (folder / "offsets").mkdir(parents=True)
    (folder / "offsets/0").touch()


def commit(folder: Path) -> None:
    """As Spark ends it."""
    (folder / "commits").mkdir()
    (folder / "commits/0").touch()


@pytest.mark.parametrize("rows", ["Infinity", "NaN", "1e999"])
def test_a_limit_that_is_no_number_of_rows_is_a_named_error(tmp_path: Path, rows: str) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock/limit.json").write_text(f'{{"version": 1, "rows": {rows}}}')
    with pytest.raises(CommitRefusedError, match=r"file .*limit.json at .* is malformed"):
        read_record(Checkpoint(str(tmp_path)))


def test_other_columns_are_refused_once_rows_have_been_counted(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    store_key_record(checkpoint, replace(LIMIT, per=("b",)), exact=False)
    store_key_record(checkpoint, LIMIT, exact=False)
    begin(tmp_path)
    store_key_record(checkpoint, LIMIT, exact=False)
    for other, exact in ((["b"], False), (["a", "b"], False), (["A"], True)):
        with pytest.raises(CheckpointMismatchError, match=r"start with a new checkpoint") as refused:
            store_key_record(checkpoint, replace(LIMIT, per=tuple(other)), exact=exact)
        assert refused.value.condition == "CHECKPOINT_MISMATCH.LIMIT_PER"
        assert refused.value.parameters["before"] == ["a"]
    kept = json.loads((tmp_path / "penstock/limit-per.json").read_text())
    assert kept == {"version": 1, "per": ["a"], "rows": 2, "forget_ms": None, "kinds": []}
    store_key_record(checkpoint, replace(LIMIT, per=("A",)), exact=False)


def test_columns_of_another_type_are_refused_once_rows_have_been_counted(tmp_path: Path) -> None:
    checkpoint, numbers = Checkpoint(str(tmp_path)), replace(LIMIT, kinds=("integer",))
    store_key_record(checkpoint, LIMIT, exact=False)
    begin(tmp_path)
    store_key_record(checkpoint, numbers, exact=False)
    store_key_record(checkpoint, numbers, exact=False)
    with pytest.raises(CheckpointMismatchError, match=r"as integer\. As string, their count") as refused:
        store_key_record(checkpoint, replace(LIMIT, kinds=("string",)), exact=False)
    assert refused.value.condition == "CHECKPOINT_MISMATCH.LIMIT_PER"


@pytest.mark.parametrize("other", [replace(LIMIT, rows=3), replace(LIMIT, forget_ms=1000)])
def test_another_limit_is_refused_while_a_micro_batch_is_unfinished(tmp_path: Path, other: KeyRecord) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    store_key_record(checkpoint, LIMIT, exact=False)
    begin(tmp_path)
    with pytest.raises(
        CommitRefusedError, match=r"start the query once with limit\(2, per=\['a'\]\)"
    ) as refused:
        store_key_record(checkpoint, other, exact=False)
    assert refused.value.condition == "COMMIT_REFUSED.LIMIT_CHANGED"
    commit(tmp_path)
    store_key_record(checkpoint, other, exact=False)
    with pytest.raises(CheckpointMismatchError):
        store_key_record(checkpoint, replace(other, per=("b",)), exact=False)


def test_a_checkpoint_created_without_such_a_limit_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    begin(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"MISMATCH.LIMIT\].*without a limit"):
        store_key_record(checkpoint, LIMIT, exact=False)
    store_record(checkpoint, 7)
    with pytest.raises(CheckpointMismatchError, match=r"MISMATCH.LIMIT\].*with limit\(7\) before"):
        store_key_record(checkpoint, LIMIT, exact=False)
    assert not (tmp_path / "penstock/limit-per.json").exists()
