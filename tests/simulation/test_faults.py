"""The faults of the simulation match the code as it is now."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.simulation.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_each_fault_changes_one_place_in_the_code() -> None:
    for fault in FAULTS:
        for change in filter(None, (fault.change, fault.baseline)):
            code = (ROOT / "src/penstock" / change.file).read_text()
            assert code.count(change.text) == 1, fault.name
            assert change.replacement != change.text, fault.name
            if change.file.endswith(".py"):
                ast.parse(code.replace(change.text, change.replacement), fault.name)


def test_each_fault_has_a_unique_name_and_a_unique_change() -> None:
    assert len(FAULTS) >= 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({fault.change for fault in FAULTS}) == len(FAULTS)
