"""Schedules of both engines' protocols, how they are replayed, and how a failure is made simpler.

``make simulate`` runs as many schedules as you like, and `test_more_schedules` has others.
"""

from __future__ import annotations

import json

import pytest

from tests.simulation import schedules
from tests.support import auditor
from tests.support.auditor import History, Snapshot, Violation


@pytest.mark.parametrize("first", range(0, 600, schedules.PART))
def test_nothing_is_lost_repeated_or_stuck(first: int) -> None:
    part = schedules.run_part(first)
    assert part.failed is None, part.failed


def test_a_schedule_is_the_same_each_time_and_is_replayed_from_its_choices() -> None:
    first, again = schedules.run(7, trace=True), schedules.run(7, trace=True)
    assert first.trace == again.trace
    replayed = schedules.run(7, json.loads(json.dumps(first.choices)), trace=True)
    assert replayed.trace == first.trace


def test_a_failure_is_shortened_and_replayed_from_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(history: History, now: Snapshot) -> None:
        if history.disturbed:
            raise Violation("planted", "something was disturbed")

    monkeypatch.setattr(auditor, "check", planted)
    part = schedules.run_part(0)
    assert part.failed is not None
    first, _, replay, *steps = part.failed.splitlines()
    assert first.endswith(": something was disturbed")
    assert steps
    seed, choices = int(first.split()[1].rstrip(":")), json.loads(replay.removeprefix("replay: "))
    assert 0 < len(choices) < len(schedules.run(seed).choices)

    def fails(kept: dict[str, int]) -> bool:
        return schedules.run(seed, kept).failure is not None

    assert fails(choices)
    assert not any(fails({key: value for key, value in choices.items() if key != one}) for one in choices)
