"""Delta tables of killed queries: they equal those of an undisturbed run and a fold in plain Python."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.tables.delta import vectors
from tests.support.crash.cases import check_complete
from tests.support.crash.chains import run_chain
from tests.support.crash.children import Children, Fault, failed_with, release
from tests.support.processes import ChildProcess
from tests.tables.crash.cases import CHUNKS, TABLES
from tests.tables.crash.delta_cases import DeltaCase, every_state
from tests.tables.crash.delta_vectors import MOMENTS, large_table, rows_after, update
from tests.tables.delta.driver import FIRST, FOLDS, SECOND, Driver
from tests.tables.delta.vectors import live, vectors_of

MODULE = "tests.tables.crash.delta_child"


def make_case(folder: Path, kind: str, suffix: str = "", *, chunks: int = 1) -> DeltaCase:
    url = f"sqlite:///{folder}/store.db"
    case = DeltaCase(f"{kind} delta{suffix}", url, kind, "exactly_once", str(folder))
    case.create()
    for number in range(chunks):
        case.append(number)
    return case


@pytest.mark.crash
@pytest.mark.parametrize(
    ("scd_type", "moment"),
    [(1, "REMEMBERED"), (2, "STAGED"), (2, "REMEMBERED"), (1, "COMMITTED")],
)
def test_changes_survive_a_kill_between_the_two_commits(
    tmp_path: Path, run_child: Callable[..., ChildProcess], scd_type: int, moment: str
) -> None:
    driver, fold = Driver(tmp_path, scd_type), FOLDS[scd_type]
    driver.apply(0, FIRST)
    child = run_child("tests.tables.crash.delta_commit", tmp_path, scd_type, moment)
    assert child.wait() == -signal.SIGKILL, child.output
    assert driver.rows() == fold([*FIRST, *SECOND] if moment == "COMMITTED" else FIRST)
    again = Driver(tmp_path, scd_type)
    again.apply(1, SECOND)
    again.apply(2, FIRST)
    assert driver.rows() == fold([*FIRST, *SECOND])


@pytest.mark.crash
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_update_by_deletion_vector_survives_a_kill(
    tmp_path: Path, run_child: Callable[..., ChildProcess], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)
    large_table(tmp_path)
    child = run_child("tests.tables.crash.delta_vectors", tmp_path, moment)
    assert child.wait() == -signal.SIGKILL, child.output
    committed = moment in ("LINKED", "CHECKPOINT")
    assert live(tmp_path) == rows_after(1 if committed else 0)
    update(tmp_path, 1)
    assert live(tmp_path) == rows_after(1)
    update(tmp_path, 2)
    assert live(tmp_path) == rows_after(2)
    assert len(vectors_of(tmp_path)) == 1


@pytest.mark.crash_full
@pytest.mark.timeout(900)
def test_a_kill_at_any_moment_of_the_commit_leaves_no_trace(tmp_path: Path, children: Children) -> None:
    """Each case uses another moment at which the same child stops, so that one kill serves them all."""
    moments = {
        "append": Fault("COMMITTED"),
        "update": Fault("STAGED"),
        "update windows": Fault("REWRITTEN"),
        "complete": Fault("COMMITTED"),
        "changes": Fault("REMEMBERED"),
        "history": Fault("REMEMBERED"),
    }
    cases = [make_case(tmp_path, kind) for kind in moments]
    children.kill_at(cases, {case.name: moments[case.kind] for case in cases}, module=MODULE)
    for case in cases:
        committed = moments[case.kind].state == "COMMITTED"
        assert case.rows() == (case.query.expected(1) if committed else {}), case.name
        case.append(1)
    children.run(cases, module=MODULE)
    for case in cases:
        check_complete(case, CHUNKS)
        assert not case.staged, case.name


@pytest.mark.crash_full
@pytest.mark.timeout(7200)
def test_every_mode_equals_the_undisturbed_run_with_a_kill_after_every_state(
    tmp_path: Path, children: Children
) -> None:
    cases = [make_case(tmp_path, kind) for kind in TABLES]
    run_chain(children, [(case, every_state(case)) for case in cases], master="local[8]", module=MODULE)
    undisturbed = [make_case(tmp_path, kind, " undisturbed") for kind in TABLES]
    children.run(undisturbed, module=MODULE)
    for case in undisturbed:
        case.append(1)
    children.run(undisturbed, module=MODULE)
    for case, other in zip(cases, undisturbed, strict=True):
        check_complete(other, CHUNKS)
        assert case.rows() == other.rows(), case.name
        assert not case.staged, case.name


@pytest.mark.crash_full
@pytest.mark.timeout(900)
def test_an_overtaken_driver_adds_nothing(tmp_path: Path, children: Children) -> None:
    """It is about to commit its micro-batch when the second one comes, and commits when that is done with
    it.
    """
    moments = {"append": "STAGED", "update": "STAGED", "changes": "REMEMBERED", "history": "REMEMBERED"}
    moments |= {"update windows": "REWRITTEN", "complete": "STAGED"}
    cases = [make_case(tmp_path, kind, chunks=2) for kind in moments]
    slow = children.start(cases, {case.name: Fault(moments[case.kind]) for case in cases}, module=MODULE)
    assert children.reached(slow, cases), slow.output
    children.run(cases, module=MODULE)
    for case in cases:
        release(case)
    assert slow.wait() == 0
    for case in cases:
        assert failed_with(slow.output, case, "CONCURRENT_STREAM_LOG_UPDATE", "OWNER_FENCED"), slow.output
        check_complete(case, CHUNKS)
