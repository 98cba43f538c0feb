"""Iceberg tables of killed queries: they equal a fold in plain Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash.cases import check_complete
from tests.support.crash.chains import run_chain
from tests.support.crash.children import Children, Fault, failed_with, release
from tests.tables.crash.cases import CHUNKS
from tests.tables.crash.iceberg_cases import BY_POSITION, ICEBERG_TABLES, IcebergCase, every_state

MODULE = "tests.tables.crash.iceberg_child"
MASTER = "local[8]"
"""Tasks that stop keep a core each, and the other cases need some."""


def make_case(folder: Path, kind: str, *, chunks: int = 1) -> IcebergCase:
    case = IcebergCase(f"{kind} iceberg", f"sqlite:///{folder}/store.db", kind, "exactly_once", str(folder))
    case.create()
    for number in range(chunks):
        case.append(number)
    return case


@pytest.mark.crash
@pytest.mark.timeout(900)
def test_a_kill_before_and_after_the_commit_leaves_no_trace(tmp_path: Path, children: Children) -> None:
    """Each case uses another moment at which the same child stops, so that one kill serves them all."""
    moments = {
        "append": Fault("COMMITTED"),
        "update": Fault("STAGED"),
        "complete": Fault("COMMITTED"),
        "changes": Fault("COMMITTED"),
        "history": Fault("REWRITTEN"),
        "few updates": Fault("EDITED"),
        "few versions": Fault("MOVED"),
    }
    cases = [make_case(tmp_path, kind) for kind in moments]
    faults = {case.name: moments[case.kind] for case in cases}
    children.kill_at(cases, faults, master=MASTER, module=MODULE)
    for case in cases:
        committed = moments[case.kind].state == "COMMITTED"
        assert case.rows() == case.query.expected(1 if committed else 0), case.name
        case.append(1)
    children.run(cases, module=MODULE)
    for case in cases:
        check_all(case)


def check_all(case: IcebergCase) -> None:
    """The table has all rows, and the tables for it have lost some by position."""
    check_complete(case, CHUNKS)
    assert (case.deleted_by_position() > 0) == (case.kind in BY_POSITION), case.name


@pytest.mark.crash_full
@pytest.mark.timeout(7200)
def test_every_mode_survives_a_kill_after_every_state(tmp_path: Path, children: Children) -> None:
    cases = [make_case(tmp_path, kind) for kind in ICEBERG_TABLES]
    run_chain(children, [(case, every_state(case)) for case in cases], master=MASTER, module=MODULE)
    for case in cases:
        check_all(case)


@pytest.mark.crash_full
@pytest.mark.timeout(900)
def test_an_overtaken_driver_adds_nothing(tmp_path: Path, children: Children) -> None:
    """It is about to commit its micro-batch when the second one comes, and commits when that is done with
    it.
    """
    moments = {
        "append": "STAGED",
        "update": "STAGED",
        "changes": "REWRITTEN",
        "history": "REWRITTEN",
        "few updates": "EDITED",
        "few versions": "MOVED",
    }
    cases = [make_case(tmp_path, kind, chunks=2) for kind in moments]
    faults = {case.name: Fault(moments[case.kind]) for case in cases}
    slow = children.start(cases, faults, master=MASTER, module=MODULE)
    assert children.reached(slow, cases), slow.output
    children.run(cases, module=MODULE)
    for case in cases:
        release(case)
    assert slow.wait() == 0
    for case in cases:
        assert failed_with(slow.output, case, "CONCURRENT_STREAM_LOG_UPDATE", "OWNER_FENCED"), slow.output
        check_all(case)
