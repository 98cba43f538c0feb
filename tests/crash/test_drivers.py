"""More than one driver, and drivers that have lost their checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault, failed_with, release

pytestmark = [pytest.mark.crash_full, pytest.mark.timeout(600)]


def test_after_a_takeover_by_a_second_driver_the_first_one_adds_nothing(
    make_case: Callable[..., Case], children: Children
) -> None:
    """The first driver has staged its micro-batch when the second one starts, and commits after it."""
    one_checkpoint = [
        make_case("sqlite", "watermark", "exactly_once", chunks=2),
        make_case("postgresql", "stateless", "idempotent", chunks=2),
    ]
    one_consumer = [make_case("postgresql", "stateless", "exactly_once", chunks=2)]
    first = [*one_checkpoint, *one_consumer]
    second = [*one_checkpoint, *(replace(case, checkpoint_name="other") for case in one_consumer)]
    slow = children.start(first, {case.name: Fault("STAGED") for case in first})
    assert children.reached(slow, first), slow.output
    children.run(second)
    for case in first:
        release(case)
    assert slow.wait() == 0
    for case in one_checkpoint:
        assert failed_with(slow.output, case, "CONCURRENT_STREAM_LOG_UPDATE", "OWNER_FENCED"), slow.output
    for case in one_consumer:
        assert failed_with(slow.output, case, "PLAN_MISMATCH", "OWNER_FENCED"), slow.output
    for case in second:
        check_complete(case, 2)


def test_a_lost_checkpoint_repeats_nothing_without_state_and_is_refused_with_state(
    make_case: Callable[..., Case], children: Children
) -> None:
    """The worst moment: the micro-batch is committed, but Spark has not logged it."""
    stateless = [make_case("sqlite", "stateless", "exactly_once")]
    stateful = [make_case("postgresql", "watermark", "exactly_once")]
    cases = [*stateless, *stateful]
    children.kill_at(cases, {case.name: Fault("COMMITTED") for case in cases})
    for case in cases:
        shutil.rmtree(case.checkpoint)
        case.append(1)
    before = {case.name: (case.rows(), case.positions()) for case in stateful}
    child = children.start(cases)
    assert child.wait() == 0
    for case in stateless:
        assert f"ENDED {case.name}" in child.output, child.output
        check_complete(case, 2)
    for case in stateful:
        assert failed_with(child.output, case, "CONSUMER_BOUND"), child.output
        assert (case.rows(), case.positions()) == before[case.name]
