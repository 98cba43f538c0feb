"""What the auditor of the simulation sees."""

from __future__ import annotations

import pytest

from tests.support.auditor import History, Snapshot, Violation, check, missing


def history(**more: object) -> History:
    return History("exactly_once", ordered=True, keyed=True, one_store=True, **more)  # type: ignore[arg-type]


def snapshot(*sink: list[tuple[int, int]], offsets: list[int] | None = None) -> Snapshot:
    return Snapshot(source=[[1, 2, 3, 4]], first=[0], sink=list(sink), offsets=offsets)


@pytest.mark.parametrize(
    ("kind", "now"),
    [
        ("repeated", snapshot([(1, 0), (1, 0)])),
        ("key", snapshot([(1, 0)], [(2, 0)])),
        ("order", snapshot([(2, 0), (1, 0)])),
        ("lost", snapshot([(1, 0)], offsets=[2])),
        ("torn", snapshot([(1, 0), (2, 0)], offsets=[1])),
    ],
)
def test_the_auditor_sees_what_must_not_be(kind: str, now: Snapshot) -> None:
    with pytest.raises(Violation) as caught:
        check(history(), now)
    assert caught.value.kind == kind


def test_the_auditor_sees_torn_and_lost_appends() -> None:
    now = snapshot([], offsets=[0])
    with pytest.raises(Violation, match="in part"):
        check(history(appends=[(4, 5)]), now)
    with pytest.raises(Violation, match="acknowledged"):
        check(history(acknowledged={5}), now)


def test_rows_that_have_to_come_are_known() -> None:
    assert missing(history(may_lack={4}, foreign={2_000_000}), snapshot([(1, 0)])) == [2, 3, 2_000_000]


def test_what_was_done_on_purpose_is_accounted_for() -> None:
    given = history()
    given.repeats[1] = 1
    check(given, snapshot([(1, 0), (1, 0)]))
