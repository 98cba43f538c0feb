"""The database becomes unavailable during a micro-batch, and comes back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.testing.stores import with_schema
from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault, release
from tests.support.crashing_postgres import CrashingPostgres, crashing_postgres
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]


@pytest.fixture
def server() -> Iterator[CrashingPostgres]:
    with crashing_postgres() as made:
        yield made


def make(server: CrashingPostgres, folder: Path, kind: str, guarantee: str) -> Case:
    case = Case(f"{kind} {guarantee}", with_schema(server.url, "gone"), kind, guarantee, str(folder))
    case.create()
    case.append(0)
    case.append(1)
    return case


@pytest.mark.crash_full
def test_a_query_waits_for_a_server_that_comes_back(
    server: CrashingPostgres, children: Children, tmp_path: Path
) -> None:
    """Unavailable while the driver commits one query's micro-batch, and a task of another one has just
    written.
    """
    committing = make(server, tmp_path, "watermark", "exactly_once")
    writing = make(server, tmp_path, "stateless", "idempotent")
    cases = [committing, writing]
    child = children.start(cases, {committing.name: Fault("STAGED"), writing.name: Fault("HALF")})
    assert children.reached(child, cases), child.output
    server.stop()
    for case in cases:
        release(case)
    child.wait_for_line("store unavailable, trying again")
    server.start()
    assert child.wait() == 0, child.output
    for case in cases:
        assert f"ENDED {case.name}" in child.output, child.output
        check_complete(case, 2)


@pytest.mark.crash_full
def test_a_server_that_stays_unavailable_fails_the_query_without_partial_results(
    server: CrashingPostgres, children: Children, tmp_path: Path
) -> None:
    case = make(server, tmp_path, "watermark", "exactly_once")
    child = children.start([case], {case.name: Fault("STAGED")})
    assert children.reached(child, [case]), child.output
    server.stop()
    release(case)
    assert child.wait() == 0, child.output
    assert "STORE_UNAVAILABLE" in child.output
    server.start()
    wait_until(lambda: _answers(case), 60, "the server answers")
    assert (case.rows().total(), case.positions()) == (0, [(0, 0, 40), (0, 0, 80)])
    children.run([case])
    check_complete(case, 2)


def _answers(case: Case) -> bool:
    from penstock.errors import StoreError

    try:
        case.rows()
    except StoreError:
        return False
    return True


@pytest.mark.crash_full
def test_a_query_waits_for_a_store_locked_by_another_process(
    make_case: Callable[..., Case], children: Children
) -> None:
    case = make_case("sqlite", "stateless", "exactly_once", chunks=2)
    child = children.start([case], {case.name: Fault("STAGED")})
    assert children.reached(child, [case]), child.output
    with sqlite3.connect(case.url.removeprefix("sqlite:///"), isolation_level=None) as other:
        other.execute("begin immediate")
        release(case)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert not case.rows()
        other.execute("rollback")
    assert child.wait() == 0, child.output
    check_complete(case, 2)
