"""``transformWithState`` in Python needs the package protobuf: the check says so before the query
fails for that reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ChildProcess

SECONDS = 180
PROGRAM = Path(__file__).parent / "programs/without_protobuf.py"


@pytest.mark.soak
def test_with_protobuf_installed_the_query_runs(
    run_child: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    hiding = tmp_path / "hiding"
    (hiding / "google").mkdir(parents=True)
    (hiding / "google/__init__.py").write_text("")
    path = os.pathsep.join([str(hiding), os.environ.get("PYTHONPATH", "")])
    child = run_child(PROGRAM, tmp_path / "spark", hiding, env={"PYTHONPATH": path})
    assert child.wait(SECONDS) == 0, child.output[-4000:]
    reported = [
        line for line in child.output.splitlines() if line.split(" ")[0] in ("MISSING", "INSTALLED", "ROWS")
    ]
    assert reported == [
        "MISSING CODES ['PENSTOCK_FUNCTION_NEEDS_PROTOBUF', 'PENSTOCK_STATE_FOR_EVER']",
        "MISSING RUNS False",
        "INSTALLED CODES ['PENSTOCK_STATE_FOR_EVER']",
        "INSTALLED RUNS True",
        "ROWS [1, 2]",
    ]
    assert "EMITS The rows that the stateful function returns are emitted" in child.output
