"""Queries with a limit that are killed: exactly the limit's rows, as in an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.testing import temporary_store_url
from tests.limits.crash.cases import KINDS, LimitCase
from tests.support.crash.children import Children, Fault
from tests.support.processes import ChildProcess

MODULE = "tests.limits.crash.child"


def make_cases(url: str, folder: Path) -> list[LimitCase]:
    cases = [LimitCase(f"{kind} {url[:6]}", url, kind, "exactly_once", str(folder)) for kind in KINDS]
    for case in cases:
        case.create()
        case.append(0)
    return cases


def kill(children: Children, cases: Sequence[LimitCase], state: str, batches: dict[str, int]) -> None:
    children.kill_at(cases, {case.name: Fault(state, batches[case.name]) for case in cases}, module=MODULE)
    for case in cases:
        assert case.is_partial(), (case.name, state)


def finish(children: Children, cases: Sequence[LimitCase]) -> None:
    children.run(cases, module=MODULE)
    for case in cases:
        case.check()


@pytest.mark.crash_full
@pytest.mark.timeout(300)
def test_a_kill_between_the_two_commits_of_the_last_micro_batch_changes_nothing(
    tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    """The sink has all the rows, but Spark's commit log does not record that yet."""
    children, cases = Children(tmp_path, run_child), make_cases(f"sqlite:///{tmp_path}/store.db", tmp_path)
    kill(children, cases, "COMMITTED", {case.name: case.limited.last for case in cases})
    finish(children, cases)


@pytest.mark.crash_full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_kill_after_any_state_of_any_micro_batch_changes_nothing(
    tmp_path: Path, run_child: Callable[..., ChildProcess], kind: str, pg_url: str
) -> None:
    with temporary_store_url(None if kind == "sqlite" else pg_url) as url:
        children, cases = Children(tmp_path, run_child), make_cases(url, tmp_path)
        for batch, state in enumerate(["PLANNED", "STAGED", "COMMITTED"]):
            last = {case.name: min(batch, case.limited.last) for case in cases}
            kill(children, cases, state, last)
        finish(children, cases)
