"""One checkpoint, killed after each state in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault

CHUNKS = 2
APPEND = Fault("APPEND")
"""The next chunk comes before the next child starts."""


def states(batch: int, *names: str) -> list[Fault]:
    return [Fault(name, batch) for name in names]


FIRST = states(0, "OWN", "PLANNED", "STAGED", "COMMITTED")
LAST = ("LOGGED", "SAFE")
# A watermark makes a micro-batch without new rows follow, in the same run: Spark makes none when it starts
# again with the one before logged and nothing new.
WITH_NO_DATA = [*states(0, "OWN", "PLANNED"), *states(1, "STAGED", "COMMITTED", *LAST)]
WITHOUT = [*FIRST, *states(0, *LAST)]
LONG_WITH_NO_DATA = [
    *FIRST,
    *states(0, *LAST),
    APPEND,
    *states(1, "PLANNED", "STAGED", "COMMITTED"),
    *states(2, "STAGED", "COMMITTED", *LAST),
]
LONG_WITHOUT = [*FIRST, *states(0, *LAST), APPEND, *states(1, "PLANNED", "STAGED", "COMMITTED", *LAST)]


def chain(case: Case) -> list[Fault]:
    """Every state of the protocol."""
    return WITH_NO_DATA if case.query.no_data else WITHOUT


def in_short(case: Case) -> list[Fault]:
    """With the rows staged, and between the sink's commit and Spark's."""
    return [Fault("STAGED", 0), Fault("COMMITTED", 1 if case.query.no_data else 0)]


def at_length(case: Case) -> list[Fault]:
    """Every state of each micro-batch, with its tasks interrupted too."""
    plan = []
    for fault in LONG_WITH_NO_DATA if case.query.no_data else LONG_WITHOUT:
        if fault.state == "STAGED":
            plan += states(fault.batch, "HALF")
        plan.append(fault)
    return plan


def steps(plan: Sequence[Fault]) -> list[tuple[bool, Fault]]:
    """(whether a chunk is appended first, where to stop) for each child."""
    before = [None, *plan]
    return [(last == APPEND, fault) for last, fault in zip(before, plan, strict=False) if fault != APPEND]


def run_chain(children: Children, plans: Sequence[tuple[Case, Sequence[Fault]]], **options: Any) -> None:
    """Kill children at the next step of every case, until all steps are done; then let one finish, and look.

    All cases live in one child and stop at the same time, so that one kill serves them all.
    """
    cases = [case for case, _ in plans]
    to_do = {case.name: steps(plan) for case, plan in plans}
    appended = set()
    for number in range(max(map(len, to_do.values()))):
        faults: dict[str, Fault] = {}
        for case in cases:
            if number < len(to_do[case.name]):
                appends, faults[case.name] = to_do[case.name][number]
                if appends:
                    case.append(1)
                    appended.add(case.name)
        children.kill_at(cases, faults, **options)
        for case in cases:
            wrong = case.beyond(CHUNKS)
            assert not wrong, f"{case.name} after {faults.get(case.name)}: {wrong}"
    for case in cases:
        if case.name not in appended:
            case.append(1)
    children.run(cases, **options)
    for case in cases:
        check_complete(case, CHUNKS)
