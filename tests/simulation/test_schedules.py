"""Schedules of the simulation, and tests of replaying, shrinking and reporting them.

``make simulate`` runs as many schedules as you like, and ``test_more_schedules`` has some more.
"""

from __future__ import annotations

import json

import pytest

from tests.simulation import schedules
from tests.support import auditor
from tests.support.auditor import History, Snapshot, Violation


@pytest.mark.parametrize("first", range(0, 600, schedules.PART_SIZE))
def test_nothing_is_lost_repeated_or_stuck(first: int) -> None:
    part = schedules.run_part(first)
    assert part.failure is None, part.failure


def test_a_schedule_is_deterministic_and_can_be_replayed_from_its_choices() -> None:
    first, second = schedules.run(7, trace=True), schedules.run(7, trace=True)
    assert first.trace == second.trace
    replayed = schedules.run(7, json.loads(json.dumps(first.choices)), trace=True)
    assert replayed.trace == first.trace


def test_a_failure_is_shrunk_and_can_be_replayed_from_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_after_a_move(history: History, snapshot: Snapshot) -> None:
        if history.disturbed:
            raise Violation("planted", "something was disturbed")

    monkeypatch.setattr(auditor, "check_invariants", fail_after_a_move)
    part = schedules.run_part(0)
    assert part.failure is not None
    first, _, replay, *steps = part.failure.splitlines()
    assert first.endswith(": something was disturbed")
    assert steps
    seed, choices = int(first.split()[1].rstrip(":")), json.loads(replay.removeprefix("replay: "))
    assert 0 < len(choices) < len(schedules.run(seed).choices)

    def fails(choices: dict[str, int]) -> bool:
        return schedules.run(seed, choices).failure is not None

    assert fails(choices)
    for removed in choices:
        assert not fails({key: value for key, value in choices.items() if key != removed})
