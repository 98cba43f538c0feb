"""Audits of real Spark queries under kills, pauses, takeovers and lost sessions, by the simulation's auditor.

PENSTOCK_AUDIT_SEED repeats the choices of a run, which a failure prints, and PENSTOCK_AUDIT_SECONDS says for
how long the long ones are disturbed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.crash.audited import CONTINUOUS, MICRO_BATCH
from tests.crash.auditing import Audit, Plan

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("PENSTOCK_AUDIT_SECONDS", "80"))
PLANS = [
    Plan("sqlite", "keyed", "exactly_once", MICRO_BATCH, SECONDS),
    Plan("postgresql", "keyed", "exactly_once", CONTINUOUS, SECONDS),
    Plan("sqlite", "table", "exactly_once", MICRO_BATCH, SECONDS),
    Plan("sqlite", "table", "exactly_once", CONTINUOUS, SECONDS),
    Plan("postgresql", "table", "exactly_once", MICRO_BATCH, SECONDS),
    Plan("postgresql", "table", "exactly_once", CONTINUOUS, SECONDS),
    Plan("sqlite", "keyed", "at_least_once", CONTINUOUS, SECONDS),
    Plan("postgresql", "keyed", "at_least_once", MICRO_BATCH, SECONDS),
    Plan("sqlite", "table", "at_least_once", MICRO_BATCH, SECONDS),
    Plan("postgresql", "table", "at_least_once", CONTINUOUS, SECONDS),
]


@pytest.fixture
def audit(tmp_path: Path, urls: Mapping[str, str], run_child: Callable[..., Any]) -> Iterator[Any]:
    audits: list[Audit] = []

    def run(plan: Plan, seed: int) -> Audit:
        chosen = int(os.environ.get("PENSTOCK_AUDIT_SEED", seed))
        audits.append(Audit(plan, urls[plan.store], tmp_path, run_child, chosen))
        audits[-1].run()
        return audits[-1]

    yield run
    for each in audits:
        each.close()


@pytest.mark.crash_full
def test_killed_and_suspended_drivers_lose_and_repeat_nothing(audit: Callable[..., Audit]) -> None:
    """The short audit: some disturbances, once each, with both engines."""
    order = ["kill_all", "grow_sink", "restart", "end_sessions", "take_over"]
    audit(Plan("postgresql", "keyed", "exactly_once", MICRO_BATCH, order=order, aimed=1.0), seed=1)


@pytest.mark.crash_full
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_disturbances_at_random_moments_lose_and_repeat_nothing(
    audit: Callable[..., Audit], plan: Plan
) -> None:
    audit(plan, seed=random.SystemRandom().randrange(1 << 32))
