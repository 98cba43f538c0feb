"""The auditor finds violations of each invariant."""

from __future__ import annotations

import pytest

from tests.support.auditor import History, Snapshot, Violation, check_invariants, missing_rows


def new_history(**fields: object) -> History:
    return History("exactly_once", ordered=True, keyed=True, one_store=True, **fields)  # type: ignore[arg-type]


def new_snapshot(*sink: list[tuple[int, int]], offsets: list[int] | None = None) -> Snapshot:
    return Snapshot(source=[[1, 2, 3, 4]], first_indexes=[0], sink=list(sink), offsets=offsets)


@pytest.mark.parametrize(
    ("kind", "snapshot"),
    [
        ("repeated", new_snapshot([(1, 0), (1, 0)])),
        ("key", new_snapshot([(1, 0)], [(2, 0)])),
        ("order", new_snapshot([(2, 0), (1, 0)])),
        ("lost", new_snapshot([(1, 0)], offsets=[2])),
        ("torn", new_snapshot([(1, 0), (2, 0)], offsets=[1])),
    ],
)
def test_the_auditor_detects_each_violation(kind: str, snapshot: Snapshot) -> None:
    with pytest.raises(Violation) as caught:
        check_invariants(new_history(), snapshot)
    assert caught.value.kind == kind


def test_the_auditor_detects_torn_and_lost_appends() -> None:
    snapshot = new_snapshot([], offsets=[0])
    with pytest.raises(Violation, match="only a part"):
        check_invariants(new_history(appends=[(4, 5)]), snapshot)
    with pytest.raises(Violation, match="acknowledged"):
        check_invariants(new_history(acknowledged={5}), snapshot)


def test_missing_rows_are_those_that_must_still_reach_the_sink() -> None:
    history = new_history(may_be_missing={4}, foreign={2_000_000})
    assert missing_rows(history, new_snapshot([(1, 0)])) == [2, 3, 2_000_000]


def test_rows_may_repeat_after_a_seek() -> None:
    history = new_history()
    history.allowed_repeats[1] = 1
    check_invariants(history, new_snapshot([(1, 0), (1, 0)]))
