"""Tables of queries that are killed: they equal those of an undisturbed run and a fold in plain Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.crash.cases import check_complete
from tests.support.crash.chains import at_length, chain, run_chain
from tests.support.crash.children import Children, Fault, failed_with, release
from tests.tables.crash.cases import CHUNKS, TABLES, TableCase

MODULE = "tests.tables.crash.child"
MakeCase = Callable[..., TableCase]


@pytest.mark.crash_full
@pytest.mark.timeout(900)
def test_a_table_is_correct_with_a_kill_after_every_state(make_case: MakeCase, children: Children) -> None:
    chosen = [
        ("sqlite", "update windows"),
        ("sqlite", "complete"),
        ("postgresql", "update"),
        ("postgresql", "changes"),
    ]
    cases = [make_case(store, kind) for store, kind in chosen]
    run_chain(children, [(case, chain(case)) for case in cases], module=MODULE)


@pytest.mark.crash_full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", TABLES)
def test_every_mode_on_both_stores_equals_the_undisturbed_run(
    make_case: MakeCase, children: Children, kind: str
) -> None:
    stores = ("sqlite", "postgresql")
    cases = [make_case(store, kind) for store in stores]
    run_chain(children, [(case, at_length(case)) for case in cases], master="local[4]", module=MODULE)
    undisturbed = [make_case(store, kind, suffix=" undisturbed") for store in stores]
    children.run(undisturbed, module=MODULE)
    for case in undisturbed:
        case.append(1)
    children.run(undisturbed, module=MODULE)
    for case, other in zip(cases, undisturbed, strict=True):
        check_complete(other, CHUNKS)
        assert case.rows() == other.rows()


@pytest.mark.crash_full
@pytest.mark.timeout(900)
def test_an_overtaken_driver_adds_nothing(make_case: MakeCase, children: Children) -> None:
    """It has staged its micro-batch when the second one starts, and commits after the second one has."""
    cases = [make_case("sqlite", "update", chunks=2), make_case("postgresql", "complete", chunks=2)]
    slow = children.start(cases, {case.name: Fault("STAGED") for case in cases}, module=MODULE)
    assert children.reached(slow, cases), slow.output
    children.run(cases, module=MODULE)
    for case in cases:
        release(case)
    assert slow.wait() == 0
    for case in cases:
        assert failed_with(slow.output, case, "CONCURRENT_STREAM_LOG_UPDATE", "OWNER_FENCED"), slow.output
        check_complete(case, CHUNKS)
