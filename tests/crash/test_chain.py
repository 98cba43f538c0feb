"""One checkpoint for each store and guarantee, killed again and again after states of the protocol."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.chains import CHUNKS, chain, in_short, run_chain
from tests.support.crash.children import Children

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


@pytest.fixture
def all_cases(make_case: Callable[..., Case]) -> list[Case]:
    kinds = {"sqlite": "watermark", "postgresql": "stateless"}
    return [
        make_case(store, kinds[store] if guarantee == "exactly_once" else "stateless", guarantee)
        for store in kinds
        for guarantee in ("exactly_once", "idempotent", "at_least_once")
    ]


@pytest.mark.crash_full
def test_every_row_is_written_if_nothing_is_killed(all_cases: list[Case], children: Children) -> None:
    for case in all_cases:
        case.append(1)
    children.run(all_cases)
    for case in all_cases:
        check_complete(case, CHUNKS)
        assert case.rows() == case.query.expected(CHUNKS), case.name


@pytest.mark.crash_full
def test_every_guarantee_holds_on_each_store_with_a_kill_after_every_state(
    all_cases: list[Case], children: Children
) -> None:
    run_chain(children, [(case, chain(case)) for case in all_cases])


def test_every_row_is_written_as_guaranteed_with_a_kill_before_and_after_the_sinks_commit(
    make_case: Callable[..., Case], children: Children
) -> None:
    cases = [
        make_case("sqlite", "watermark", "exactly_once"),
        make_case("postgresql", "stateless", "exactly_once"),
        make_case("postgresql", "stateless", "idempotent"),
    ]
    run_chain(children, [(case, in_short(case)) for case in cases])
