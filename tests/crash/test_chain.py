"""For each store and guarantee: one checkpoint, killed after every state of the protocol, again and again.

All four queries live in one child and stop at the same step, so that one kill serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.crash.cases import Case, check_complete
from tests.crash.children import Children, Fault

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

CHUNKS = 2
APPEND = Fault("APPEND")
"""The next chunk comes before the next child starts."""

# A watermark makes a micro-batch without new rows follow each one with rows.
WITH_NO_DATA = (
    *(Fault("OWN"), Fault("PLANNED"), Fault("STAGED"), Fault("COMMITTED"), Fault("LOGGED"), Fault("SAFE")),
    *(Fault("STAGED", 1), Fault("COMMITTED", 1)),
    *(APPEND, Fault("PLANNED", 2), Fault("STAGED", 2), Fault("COMMITTED", 2), Fault("LOGGED", 2)),
)
WITHOUT = (
    *(Fault("OWN"), Fault("PLANNED"), Fault("STAGED"), Fault("COMMITTED"), Fault("LOGGED"), Fault("SAFE")),
    *(
        APPEND,
        Fault("PLANNED", 1),
        Fault("STAGED", 1),
        Fault("COMMITTED", 1),
        Fault("LOGGED", 1),
        Fault("SAFE", 1),
    ),
)


def steps(case: Case) -> list[tuple[bool, Fault]]:
    """(whether a chunk is appended first, where to stop) for each child."""
    plan = WITH_NO_DATA if case.query.no_data else WITHOUT
    return [
        (before == APPEND, fault)
        for before, fault in zip((None, *plan), plan, strict=False)
        if fault != APPEND
    ]


def run_chain(children: Children, cases: Sequence[Case], **options: object) -> None:
    plans = {case.name: steps(case) for case in cases}
    for number in range(max(map(len, plans.values()))):
        faults: dict[str, Fault] = {}
        for case in cases:
            if number < len(plans[case.name]):
                appends, faults[case.name] = plans[case.name][number]
                if appends:
                    case.append(1)
        children.kill_at(cases, faults, **options)
        for case in cases:
            wrong = case.rows() - case.query.expected(CHUNKS)
            assert not wrong, f"{case.name} after {faults.get(case.name)}: {wrong}"
    children.run(cases, **options)
    for case in cases:
        check_complete(case, CHUNKS)


@pytest.fixture
def four(make_case: Callable[..., Case]) -> Mapping[str, Case]:
    return {
        f"{guarantee}-{store}": make_case(store, kind, guarantee)
        for store in ("sqlite", "postgresql")
        for kind, guarantee in (("watermark", "exactly_once"), ("stateless", "idempotent"))
    }


def test_every_row_comes_through_once_when_nothing_dies(four: Mapping[str, Case], children: Children) -> None:
    cases = list(four.values())
    for case in cases:
        case.append(1)
    children.run(cases)
    for case in cases:
        check_complete(case, CHUNKS)


@pytest.mark.crash_full
def test_every_row_comes_through_once_with_a_kill_after_every_state(
    four: Mapping[str, Case], children: Children
) -> None:
    run_chain(children, list(four.values()))
