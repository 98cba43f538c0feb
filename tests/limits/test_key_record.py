"""A checkpoint with a limit for each key keeps the columns of the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import CheckpointMismatch
from penstock.limits.key_record import keep_key
from penstock.spark.checkpoint import Checkpoint


def begin(folder: Path) -> None:
    """As Spark begins the first micro-batch."""
    (folder / "offsets").mkdir(parents=True)
    (folder / "offsets/0").touch()


def test_other_columns_are_refused_once_rows_have_been_counted(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    keep_key(checkpoint, ["b"], exact=False)
    keep_key(checkpoint, ["a"], exact=False)
    begin(tmp_path)
    keep_key(checkpoint, ["A"], exact=False)
    for other, exact in ((["b"], False), (["a", "b"], False), (["A"], True)):
        with pytest.raises(CheckpointMismatch, match=r"Start with a new checkpoint") as refused:
            keep_key(checkpoint, other, exact=exact)
        assert refused.value.condition == "CHECKPOINT_MISMATCH.LIMIT_PER"
        assert refused.value.parameters["before"] == ["a"]
    kept = json.loads((tmp_path / "penstock/limit-per.json").read_text())
    assert kept == {"version": 1, "per": ["a"]}


def test_a_checkpoint_that_began_without_the_file_goes_on_without(tmp_path: Path) -> None:
    begin(tmp_path)
    keep_key(Checkpoint(str(tmp_path)), ["a"], exact=False)
    assert not (tmp_path / "penstock").exists()
