"""Settings of hypothesis for tests that write tables."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SLOW = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
