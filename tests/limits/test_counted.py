"""The count of a limit if the checkpoint's files are corrupt."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.errors import StateRefusedError
from penstock.limits.record import store_record
from penstock.spark.checkpoint import Checkpoint


@pytest.mark.parametrize("offsets", [None, "", "v1", "v1\n[]\n", 'v1\n{"conf":\n'])
def test_missing_or_truncated_offsets_are_reported(tmp_path: Path, offsets: str | None) -> None:
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir()
    (tmp_path / "commits/3").write_text("v1\n{}")
    if offsets is not None:
        (tmp_path / "offsets/3").write_text(offsets)
    store_record(Checkpoint(str(tmp_path)), 10)
    with pytest.raises(StateRefusedError, match="offsets/3") as refused:
        penstock.limits.limit_progress(tmp_path)
    assert refused.value.condition == "STATE_REFUSED.LIMIT"
    shown = penstock.state.show(None, tmp_path)
    assert shown.limit is None
    assert any(text.startswith("progress of the limit") and "offsets/3" in text for text in shown.unknown)
