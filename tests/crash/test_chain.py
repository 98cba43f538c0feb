"""For each store and guarantee: one checkpoint, killed after every state of the protocol, again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tests.crash.cases import Case, check_complete
from tests.crash.chains import CHUNKS, chain, run_chain
from tests.crash.children import Children

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


@pytest.fixture
def four(make_case: Callable[..., Case]) -> Mapping[str, Case]:
    kinds = {"sqlite": "watermark", "postgresql": "stateless"}
    return {
        f"{guarantee}-{store}": make_case(store, kind, guarantee)
        for store in kinds
        for kind, guarantee in ((kinds[store], "exactly_once"), ("stateless", "idempotent"))
    }


@pytest.mark.crash_full
def test_every_row_comes_through_once_when_nothing_dies(four: Mapping[str, Case], children: Children) -> None:
    cases = list(four.values())
    for case in cases:
        case.append(1)
    children.run(cases)
    for case in cases:
        check_complete(case, CHUNKS)


def test_every_row_comes_through_once_with_a_kill_after_every_state(
    four: Mapping[str, Case], children: Children
) -> None:
    run_chain(children, [(case, chain(case)) for case in four.values()])
