"""Limits with either engine, with any micro-batches, partitions, restarts and kills.

There are exactly so many rows, of each partition the first ones.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.testing.stores import drop_schema, with_schema
from tests.limits.crash.plans import CONTINUOUS, MICRO_BATCHES, Plan
from tests.support.processes import ChildProcess

PATIENCE = 120
QUERY = st.tuples(st.integers(1, 3), st.integers(1, 60), st.integers(1, 20), st.booleans())
"""Partitions, limit, rows of a micro-batch, filtered."""
KILL = st.tuples(st.integers(0, 12), st.floats(0, 2.5), st.booleans())
"""Rows that each partition gets before it; seconds after the start of the queries; whether to wait for it."""


@pytest.mark.crash
@pytest.mark.crash_full
@pytest.mark.timeout(1800)
@settings(
    max_examples=8,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    queries=st.fixed_dictionaries(
        {trigger: st.lists(QUERY, min_size=1, max_size=2) for trigger in (CONTINUOUS, MICRO_BATCHES)}
    ),
    kills=st.lists(KILL, min_size=1, max_size=4),
)
def test_exactly_the_limit_passes_whatever_is_killed(
    pg_url: str,
    run_child: Callable[..., ChildProcess],
    queries: dict[str, list[tuple[int, int, int, bool]]],
    kills: list[tuple[int, float, bool]],
) -> None:
    schema = f"t_{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"sqlite:///{folder}/store.db", with_schema(pg_url, schema)]
        plans = [
            Plan(f"{trigger} {number} {url[:6]}", url, folder, trigger, *values)
            for trigger, several in queries.items()
            for number, values in enumerate(several)
            for url in urls
        ]
        for plan in plans:
            plan.create()
        for number, (rows, seconds, whole) in enumerate(kills):
            for plan in plans:
                plan.append(rows)
            child = start(run_child, Path(folder) / f"spark-{number}", plans)
            child.wait_for_line("ALL STARTED" if whole else "STARTED", PATIENCE)
            time.sleep(seconds)
            child.kill_tree()
            for plan in plans:
                plan.check_partial()
        for plan in plans:
            while not plan.enough():
                plan.append(10)
        child = start(run_child, Path(folder) / "spark-last", plans)
        assert child.wait(PATIENCE) == 0, child.output
        for plan in plans:
            plan.check()
        drop_schema(pg_url, schema)


def start(run_child: Callable[..., ChildProcess], folder: Path, plans: list[Plan]) -> ChildProcess:
    return run_child("tests.limits.crash.plans_child", folder, *[plan.as_argument for plan in plans])
