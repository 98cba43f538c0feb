"""Change feeds with executors in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ChildProcess

PROGRAM = Path(__file__).parent / "programs/cluster.py"


@pytest.mark.crash_full
@pytest.mark.timeout(600)
def test_change_feeds_on_a_cluster(run_child: Callable[..., ChildProcess], tmp_path: Path) -> None:
    child = run_child(PROGRAM, tmp_path)
    assert child.wait(500) == 0, child.output
    for line in (
        "BATCH [2, 3]",
        "TIMES SEVERAL_TIMESTAMPS",
        "STREAM 3",
        "AGAIN COMMIT_IN_SEVERAL_MICRO_BATCHES",
    ):
        assert line in child.output.splitlines(), child.output
