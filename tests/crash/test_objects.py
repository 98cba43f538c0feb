"""Queries whose rows are in objects, killed after states of the protocol: nothing is lost or left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.store.log import object_cleaning
from tests.support.crash.cases import Case, check_complete
from tests.support.crash.chains import CHUNKS, at_length, in_short, run_chain
from tests.support.crash.children import Children, Fault

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


@pytest.fixture
def cases(make_case: Callable[..., Case], tmp_path: Path) -> list[Case]:
    return [
        make_case(store, "stateless", "exactly_once", payloads=str(tmp_path / f"rows-{store}"))
        for store in ("sqlite", "postgresql")
    ]


def check_objects(case: Case) -> None:
    """Every row is in an object that is there, and what killed processes have left can be deleted."""
    store, _ = case.stores()
    with store:
        left = [found.orphans for found in store.check_objects()]
        assert any(left), "nothing was killed after it had written an object"
        for _ in range(2):
            # What was there the time before is deleted.
            object_cleaning.clean_up(store.database, older_than=0)
        for found in store.check_objects():
            assert (found.missing, found.damaged, found.unused, found.orphans) == ([], [], 0, 0)
    check_complete(case, CHUNKS)


def run_with(
    cases: Sequence[Case], children: Children, tmp_path: Path, plan: Callable[[Case], list[Fault]]
) -> None:
    # So that few rows are in objects, too.
    env = {"PENSTOCK_TEST_PAYLOADS": str(tmp_path / "others")}
    run_chain(children, [(case, plan(case)) for case in cases], env=env)
    for case in cases:
        check_objects(case)


@pytest.mark.crash_full
def test_nothing_is_lost_repeated_or_left_with_a_kill_before_and_after_the_commit(
    cases: list[Case], children: Children, tmp_path: Path
) -> None:
    run_with(cases, children, tmp_path, in_short)


@pytest.mark.crash_full
def test_nothing_is_lost_repeated_or_left_with_a_kill_after_every_state(
    cases: list[Case], children: Children, tmp_path: Path
) -> None:
    run_with(cases, children, tmp_path, at_length)
