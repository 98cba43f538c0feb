"""What is passed to a queue about a limit, depending on the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.commit.offsets import QueueOffset
from penstock.errors import CheckpointMismatchError
from penstock.limits.run import LimitState, remaining_quota
from penstock.spark.checkpoint import Checkpoint

QUEUE = json.dumps(QueueOffset("s", "q", "c", 1, 1, (3, 0), (5, 1)).to_dict())


def begun_with(folder: Path, *sources: str) -> Checkpoint:
    (folder / "offsets").mkdir()
    (folder / "offsets/0").write_text("\n".join(["v1", "{}", *sources]))
    return Checkpoint(str(folder))


def test_the_remaining_quota_counts_from_the_end_of_the_last_micro_batch(tmp_path: Path) -> None:
    checkpoint = begun_with(tmp_path, QUEUE)
    quota = remaining_quota(checkpoint, LimitState(3, 0, 0), 10, exact=True)
    assert (quota.rows_left, quota.since) == (7, (5, 1))
    quota = remaining_quota(checkpoint, LimitState(0, None, 0), 10, exact=True)
    assert (quota.rows_left, quota.since) == (10, (3, 0))


@pytest.mark.parametrize("sources", [["5"], [], ['{"logOffset":0}'], [QUEUE, QUEUE]])
def test_the_checkpoint_of_another_source_is_refused(tmp_path: Path, sources: list[str]) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"OTHER_SOURCE\].*start with a new checkpoint"):
        remaining_quota(begun_with(tmp_path, *sources), LimitState(3, 0, 0), 10, exact=True)
