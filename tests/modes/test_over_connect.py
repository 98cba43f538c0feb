"""Over Spark Connect the rules alone give the same report for every query as with Spark's own checker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.modes.checking.report import MODES
from tests.modes.frames import FRAMES
from tests.support.processes import ChildProcess

SECONDS = 180
PROGRAM = Path(__file__).parent / "programs/over_connect.py"


@pytest.mark.soak
def test_the_rules_give_the_same_report_without_sparks_checker(
    run_child: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    child = run_child(PROGRAM, tmp_path / "streams")
    assert child.wait(SECONDS) == 0, child.output[-4000:]
    checked = [
        json.loads(line.removeprefix("CHECKED "))
        for line in child.output.splitlines()
        if line.startswith("CHECKED ")
    ]
    assert [each["name"] for each in checked] == list(FRAMES)
    unplanned = {each["name"] for each in checked if "PENSTOCK_NOT_PLANNED" in each["told"]["append"]}
    assert unplanned == {"stream_taken_away", "anti_joined"}
    for each in checked:
        frame = FRAMES[each["name"]]
        expected = {mode: sorted(frame.codes(mode)) for mode in MODES}
        if frame.name not in {*unplanned, "text_that_looks_like_a_plan"}:
            assert each["told"] == expected, frame.name
        assert each["not_run"]
