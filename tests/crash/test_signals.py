"""SIGTERM and other requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault, release
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]


def test_sigterm_finishes_the_current_micro_batch_and_advances_the_consumer(
    make_case: Callable[..., Case], children: Children
) -> None:
    cases = [
        make_case("sqlite", "stateless", "exactly_once", chunks=2),
        make_case("postgresql", "watermark", "exactly_once", chunks=2),
    ]
    child = children.start(
        cases, {case.name: Fault("STAGED") for case in cases}, module="tests.crash.serving"
    )
    assert children.reached(child, cases), child.output
    child.popen.send_signal(signal.SIGTERM)
    for case in cases:
        wait_until(lambda case=case: draining(case), 60, "the query is asked to finish")
        assert not case.rows()
        release(case)
    assert child.wait() == 0, child.output
    for case in cases:
        assert f"ENDED {case.name}" in child.output, child.output
    check_complete(cases[0], 2)
    offsets = cases[1].positions()
    assert all(offset == safe == end for offset, safe, end in offsets), offsets


@pytest.mark.crash_full
def test_sigterm_to_a_driver_that_was_just_resumed_stops_its_query(
    make_case: Callable[..., Case], children: Children
) -> None:
    """The kernel may give the signal to any thread then."""
    case = make_case("sqlite", "stateless", "exactly_once", chunks=1)
    child = children.start([case], {}, module="tests.crash.serving")
    wait_until(case.rows, 120, "the query writes rows")
    child.popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, 10, "it is stopped")
    child.popen.send_signal(signal.SIGCONT)
    child.popen.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0, child.output
    assert f"ENDED {case.name}" in child.output, child.output


@pytest.mark.crash_full
def test_sigterm_to_the_jvm_too_aborts_the_micro_batch_and_the_next_run_repeats_it(
    make_case: Callable[..., Case], children: Children
) -> None:
    case = make_case("sqlite", "stateless", "exactly_once", chunks=2)
    child = children.start([case], {case.name: Fault("STAGED")}, module="tests.crash.serving")
    assert children.reached(child, [case]), child.output
    for process in [*psutil.Process(child.pid).children(), psutil.Process(child.pid)]:
        process.send_signal(signal.SIGTERM)
    assert child.wait() != 0, child.output
    assert "QUERY_FAILED.SPARK_SHUT_DOWN" in child.output, child.output
    assert not case.rows()
    children.run([case])
    check_complete(case, 2)


def draining(case: Case) -> bool:
    source, sink = case.stores()
    found = source.consumer(case.name).registration(case.sources[0]).draining
    source.close()
    sink.close()
    return bool(found)
