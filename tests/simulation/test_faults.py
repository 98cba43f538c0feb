"""The faults that the simulation has to find are changes of the code as it is."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.simulation.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_each_fault_changes_one_place_of_the_code() -> None:
    for fault in FAULTS:
        for change in filter(None, (fault.change, fault.without)):
            code = (ROOT / "src/penstock" / change.file).read_text()
            assert code.count(change.text) == 1, fault.name
            assert change.instead != change.text, fault.name
            if change.file.endswith(".py"):
                ast.parse(code.replace(change.text, change.instead), fault.name)


def test_each_fault_has_a_name_and_a_change_of_its_own() -> None:
    assert len(FAULTS) >= 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({fault.change for fault in FAULTS}) == len(FAULTS)
