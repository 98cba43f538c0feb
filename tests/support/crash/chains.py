"""Kills the query of a checkpoint after each state in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault

CHUNKS = 2
APPEND = Fault("APPEND")
"""Append the next chunk before the next child starts."""


def states(batch: int, *names: str) -> list[Fault]:
    return [Fault(name, batch) for name in names]


FIRST = states(0, "OWN", "PLANNED", "STAGED", "COMMITTED")
LAST = ("LOGGED", "SAFE")
# With a watermark, a micro-batch without new rows follows in the same run. Spark does not run it after a
# restart if the previous one is logged and there are no new rows.
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
    """Return every state of the protocol."""
    return WITH_NO_DATA if case.query.no_data else WITHOUT


def in_short(case: Case) -> list[Fault]:
    """Return two states: rows are staged, and the sink has committed but Spark has not."""
    return [Fault("STAGED", 0), Fault("COMMITTED", 1 if case.query.no_data else 0)]


def at_length(case: Case) -> list[Fault]:
    """Return every state of each micro-batch, including interrupted tasks."""
    plan = []
    for fault in LONG_WITH_NO_DATA if case.query.no_data else LONG_WITHOUT:
        if fault.state == "STAGED":
            plan += states(fault.batch, "HALF")
        plan.append(fault)
    return plan


def steps(plan: Sequence[Fault]) -> list[tuple[bool, Fault]]:
    """Return for each child whether a chunk is appended first, and where it stops."""
    before = [None, *plan]
    return [(last == APPEND, fault) for last, fault in zip(before, plan, strict=False) if fault != APPEND]


def run_chain(children: Children, plans: Sequence[tuple[Case, Sequence[Fault]]], **options: Any) -> None:
    """Kill children at the next step of every case until all steps are done, then let one finish.

    All cases run in one child and stop at the same time, so one kill is enough for all of them.
    """
    cases = [case for case, _ in plans]
    steps_by_case = {case.name: steps(plan) for case, plan in plans}
    appended = set()
    for number in range(max(map(len, steps_by_case.values()))):
        faults: dict[str, Fault] = {}
        for case in cases:
            if number < len(steps_by_case[case.name]):
                appends, faults[case.name] = steps_by_case[case.name][number]
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
