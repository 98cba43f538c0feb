"""Python stages of continuous queries in a session that runs them pipelined."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

from tests.continuous.python_stages import APPENDS, CATCHING_UP, CAUGHT_UP, NAMES, ROWS
from tests.support.processes import ChildProcess

TOTAL = APPENDS * ROWS


@pytest.mark.skipif(
    pyspark.__version__ < "4.3", reason="Spark 4.2 cannot pipeline Python stages, so they are refused"
)
def test_python_stages_output_each_row_once_and_in_order_and_no_metadata_rows(
    tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    child = run_child("tests.continuous.python_stages", tmp_path)
    assert child.wait(240) == 0, child.output
    lines = [line.removeprefix("OUTPUT ") for line in child.output.splitlines() if line.startswith("OUTPUT ")]
    outputs: dict[str, list[int]] = dict(map(json.loads, lines))
    doubled = [2 * i for i in range(TOTAL)]
    exploded = [value for number in doubled for value in (number, -1)]
    for name in [*NAMES, *(CAUGHT_UP + name for name in CATCHING_UP)]:
        if name.endswith("counts"):
            assert sum(outputs[name]) == TOTAL, "the function counts rows only, not markers or fillers"
        else:
            assert outputs[name] == (exploded if name.endswith("exploded") else doubled), name
