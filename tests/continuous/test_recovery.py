"""Recovery of a checkpoint that lacks what its query's sink has, for every difference between the two.

The sink commits first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.continuous.connectors.protocol import SinkEpoch
from penstock.continuous.driver.checkpoint_log import CheckpointLog, catch_up, recover, require_not_behind
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    CommitRefusedError,
    OwnerFencedError,
)
from penstock.limits.record import store_record

NOTHING = SinkEpoch(-1)


def offset(number: int) -> dict[str, list[int]]:
    return {"to": [10 * (number + 1)]}


def epoch(number: int, rows: int = 10) -> SinkEpoch:
    return SinkEpoch(number, offset(number), rows)


def micro_batch(number: int) -> SinkEpoch:
    """The epoch of a query with state: Spark has logged its offset, and the sink keeps none."""
    return SinkEpoch(number, None, 10)


def sink_at(newest: SinkEpoch | None, *, allows_new_sink: bool = False) -> Mock:
    return Mock(description="queue 'out'", newest=lambda: newest, allows_new_sink=allows_new_sink)


class Place:
    """A checkpoint and its source."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, CheckpointLog(str(folder))
        self.followed: list[tuple[Any, int | None]] = []
        """The offsets that the source was asked to follow, and the last committed epoch at that time."""

    def committed(self, last: int) -> Place:
        """Log the epochs up to one as committed, with 10 rows each that count towards a limit."""
        for number in range(last + 1):
            self.logs.write_offset(number, offset(number), 10 * (number + 1))
            self.logs.write_commit(number)
        return self

    def begun(self, number: int, ends: Any = None) -> Place:
        """Log the offset of an epoch and no commit."""
        self.logs.write_offset(number, offset(number) if ends is None else ends)
        return self

    def lose_offset(self, number: int) -> None:
        """Lose an entry of the offset log with the power of its machine."""
        (self.folder / "offsets" / str(number)).unlink()

    def follow(self, ends: Any) -> None:
        self.followed.append((ends, self.logs.last_commit()))

    def settle(self, newest: SinkEpoch | None, *, limited: bool = False, **more: object) -> int | None:
        return recover(self.logs, sink_at(newest, **more), self.follow, limited=limited)

    def catch_up(self, newest: SinkEpoch | None) -> SinkEpoch | None:
        return catch_up(self.logs, sink_at(newest), self.follow)

    @property
    def files(self) -> tuple[list[int], list[int]]:
        """Return which numbers have an offset, and which a commit."""
        offsets, commits = (
            sorted(int(path.name) for path in (self.folder / name).iterdir() if path.name.isdigit())
            for name in ("offsets", "commits")
        )
        return offsets, commits


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "ck")


def test_a_new_checkpoint_and_a_new_sink_have_nothing(place: Place) -> None:
    assert place.settle(NOTHING) is None
    assert (place.files, place.followed) == (([], []), [])


@pytest.mark.parametrize("number", [0, 2])
def test_an_epoch_that_the_sink_alone_has_is_logged_when_the_source_has_followed(
    place: Place, number: int
) -> None:
    assert place.committed(number - 1).settle(epoch(number)) == number
    assert place.files == ([*range(number + 1)], [*range(number + 1)])
    assert place.logs.single_offset(number) == offset(number)
    assert place.followed == [(offset(number), number - 1 if number else None)]


def test_a_complete_checkpoint_is_unchanged_and_the_source_follows(place: Place) -> None:
    assert place.committed(1).settle(epoch(1)) == 1
    assert place.files == ([0, 1], [0, 1])
    assert place.followed == [(offset(1), 1)], "its driver may have died before that"


def test_the_source_does_not_follow_the_offset_of_a_driver_whose_successor_has_committed_the_checkpoint(
    place: Place,
) -> None:
    """A sink that may repeat rows keeps the offset of whichever driver came first."""
    earlier = SinkEpoch(1, {"to": [15]}, 5, identifies_rows=False)
    assert place.committed(1).settle(earlier) == 1
    assert place.logs.single_offset(1) == offset(1)
    assert place.followed == []


REPEATED = SinkEpoch(2, None, 10, identifies_rows=False)
"""A micro-batch of a sink that may repeat rows."""


@pytest.mark.parametrize("newest", [None, REPEATED, epoch(1)])
def test_a_commit_whose_offset_is_lost_is_dropped_and_repeated(
    place: Place, newest: SinkEpoch | None
) -> None:
    place.committed(1).logs.write_commit(2)
    assert place.settle(newest) == 1
    assert place.files == ([0, 1], [0, 1])


@pytest.mark.parametrize("last", [0, 2])
def test_offsets_that_somebody_has_deleted_are_missed(place: Place, last: int) -> None:
    place.committed(last)
    for number in range(last + 1):
        place.lose_offset(number)
    with pytest.raises(CommitRefusedError, match="cannot be read"):
        place.logs.single_offset(place.settle(None))
    assert place.files == ([], [*range(last + 1)])


def test_micro_batches_that_may_repeat_rows_begin_before_such_a_commit(place: Place) -> None:
    place.committed(1).logs.write_commit(2)
    require_not_behind(place.logs, sink_at(REPEATED))
    assert place.files == ([0, 1], [0, 1])


def test_the_offset_of_such_a_commit_is_restored_where_the_sink_knows_it(place: Place) -> None:
    place.committed(1).logs.write_commit(2)
    assert place.settle(epoch(2)) == 2
    assert place.files == ([0, 1, 2], [0, 1, 2])


def test_a_sink_that_keeps_no_record_leaves_the_checkpoint_to_decide(place: Place) -> None:
    assert place.committed(1).settle(None) == 1
    assert place.begun(2).settle(None) == 1
    assert place.files == ([0, 1, 2], [0, 1])
    assert place.followed == []


@pytest.mark.parametrize(
    ("newest", "has"),
    [(epoch(0), "up to 0"), (micro_batch(0), "up to 0"), (NOTHING, "nothing of this query")],
)
def test_a_sink_that_lacks_committed_epochs_is_refused(place: Place, newest: SinkEpoch, has: str) -> None:
    place.committed(1)
    with pytest.raises(
        CheckpointMismatchError,
        match=f"committed micro-batch 1, but queue 'out' has .*{has}: if its store was restored",
    ) as caught:
        place.settle(newest)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"
    assert (place.files, place.followed) == (([0, 1], [0, 1]), [])


@pytest.mark.parametrize("newest", [epoch(0), NOTHING])
def test_a_sink_that_may_repeat_rows_is_refused_if_it_lacks_committed_ones(
    place: Place, newest: SinkEpoch
) -> None:
    place.committed(1)
    with pytest.raises(CheckpointMismatchError) as caught:
        require_not_behind(place.logs, sink_at(newest))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"


@pytest.mark.parametrize("newest", [epoch(1), epoch(5), None])
def test_a_sink_that_may_repeat_rows_may_be_ahead(place: Place, newest: SinkEpoch | None) -> None:
    place.committed(1)
    require_not_behind(place.logs, sink_at(newest))
    other = Mock(newest=Mock(side_effect=CheckpointMismatchError("of another checkpoint")))
    require_not_behind(place.logs, other)
    assert place.files == ([0, 1], [0, 1])


def test_an_empty_sink_is_accepted_if_it_says_that_it_is_new_to_the_query(place: Place) -> None:
    assert place.committed(1).settle(NOTHING, allows_new_sink=True) == 1
    assert place.files == ([0, 1], [0, 1])


def test_a_sink_that_has_lost_some_of_the_query_is_not_taken_for_a_new_one(place: Place) -> None:
    place.committed(1)
    with pytest.raises(CheckpointMismatchError) as caught:
        place.settle(epoch(0), allows_new_sink=True)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"


@pytest.mark.parametrize("last", [-1, 0, 1])
def test_a_checkpoint_that_lacks_several_epochs_is_refused_as_an_old_copy(place: Place, last: int) -> None:
    place.committed(last)
    with pytest.raises(
        CheckpointRewoundError, match=f"epochs up to {last + 2} .* ends with {last}: the checkpoint is an"
    ):
        place.settle(epoch(last + 2))
    assert place.files == ([*range(last + 1)], [*range(last + 1)])
    assert place.followed == []


@pytest.mark.parametrize("last", [-1, 0, 1])
@pytest.mark.parametrize("ahead", [2, 3, 50])
def test_several_epochs_are_caught_up_with_where_the_sink_knows_the_last_two(
    place: Place, last: int, ahead: int
) -> None:
    number = last + ahead
    newest = SinkEpoch(number, offset(number), 10, offset(number - 1))
    assert place.committed(last).settle(newest) == number
    logged = list(range(last + 1))
    assert place.files == ([*logged, number - 1, number], [*logged, number])
    assert [place.logs.single_offset(each) for each in (number - 1, number)] == [
        offset(number - 1),
        offset(number),
    ]
    assert place.followed == [(offset(number), None if last < 0 else last)]


@pytest.mark.parametrize("begun", [2, 3])
def test_entries_of_epochs_that_were_begun_are_replaced_by_what_the_sink_has(
    place: Place, begun: int
) -> None:
    newest = SinkEpoch(3, offset(3), 10, offset(2))
    assert place.committed(1).begun(begun, {"to": [99]}).settle(newest) == 3
    assert place.files == ([0, 1, 2, 3], [0, 1, 3])
    assert [place.logs.single_offset(each) for each in (2, 3)] == [offset(2), offset(3)]


def test_a_query_with_a_limit_does_not_skip_epochs(place: Place) -> None:
    """The sink does not know how many rows the limit has let through."""
    with pytest.raises(CheckpointRewoundError):
        place.committed(1).settle(SinkEpoch(4, offset(4), 10, offset(3)), limited=True)
    assert place.files == ([0, 1], [0, 1])


@pytest.mark.parametrize("newest", [epoch(1), micro_batch(1)])
def test_a_planned_micro_batch_that_the_sink_lacks_stays_until_its_epoch_is_committed(
    place: Place, newest: SinkEpoch
) -> None:
    """The driver that has begun it may be suspended, wake up and commit it."""
    assert place.committed(1).begun(2).settle(newest) == 1
    assert place.files == ([0, 1, 2], [0, 1])


def test_a_planned_micro_batch_that_the_sink_has_is_committed(place: Place) -> None:
    assert place.committed(1).begun(2, {"to": [99]}).settle(micro_batch(2)) == 2
    assert place.files == ([0, 1, 2], [0, 1, 2])
    assert place.logs.single_offset(2) == {"to": [99]}
    assert place.followed == [], "the sink has moved the consumer"


def test_a_planned_micro_batch_is_repeated_if_the_sink_may_have_other_rows_of_its_id(
    place: Place,
) -> None:
    newest = SinkEpoch(2, None, 10, identifies_rows=False)
    assert place.committed(1).begun(2, {"to": [99]}).settle(newest) == 1
    assert place.files == ([0, 1, 2], [0, 1])


@pytest.mark.parametrize("newest", [epoch(1), micro_batch(1), micro_batch(2)])
def test_a_planned_micro_batch_is_left_for_the_micro_batch_engine_to_repeat(
    place: Place, newest: SinkEpoch
) -> None:
    assert place.committed(1).begun(2).catch_up(newest) == newest
    assert place.files == ([0, 1, 2], [0, 1])


def test_an_epoch_whose_driver_died_between_its_two_entries_is_finished(place: Place) -> None:
    assert place.committed(1).begun(2).settle(epoch(2)) == 2
    assert place.files == ([0, 1, 2], [0, 1, 2])


def test_an_epoch_whose_offset_is_that_of_the_sink_is_left_as_spark_wrote_it(place: Place) -> None:
    before = place.committed(1).begun(2).logs.offset_entry(2)
    assert place.settle(epoch(2), limited=False) == 2
    assert place.logs.offset_entry(2) == before


@pytest.mark.parametrize("numbers", [[2], [2, 3]])
def test_all_epochs_that_were_begun_may_be_replaced(place: Place, numbers: list[int]) -> None:
    place.committed(1)
    for number in numbers:
        place.begun(number)
    assert place.settle(None) == 1
    found = place.logs.begun_entries()
    assert list(found) == numbers
    for number, entry in found.items():
        place.logs.write_offset(number, {"to": [99]}, replaced_entry=entry)
        place.logs.write_commit(number)
    assert place.logs.begun_entries() == {}


def test_an_epoch_that_its_driver_commits_meanwhile_is_not_replaced(place: Place) -> None:
    place.committed(1).begun(2)
    (entry,) = place.logs.begun_entries().values()
    place.logs.write_commit(2)
    with pytest.raises(OwnerFencedError):
        place.logs.write_offset(2, {"to": [99]}, replaced_entry=entry)
    assert place.logs.single_offset(2) == offset(2)


def test_an_offset_that_was_lost_with_the_power_of_its_machine_is_damaged(place: Place) -> None:
    place.begun(0)
    (place.folder / "offsets" / "0").write_text("")
    with pytest.raises(CommitRefusedError) as caught:
        place.logs.single_offset(0)
    assert caught.value.condition == "COMMIT_REFUSED.CHECKPOINT_DAMAGED"


def test_an_epoch_planned_with_other_rows_is_replaced_by_the_one_in_the_sink(place: Place) -> None:
    assert place.committed(1).begun(2, {"to": [99]}).settle(epoch(2)) == 2
    assert place.files == ([0, 1, 2], [0, 1, 2])
    assert place.logs.single_offset(2) == offset(2)


def test_an_epoch_committed_with_other_rows_belongs_to_another_driver(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.committed(1)
    monkeypatch.setattr(CheckpointLog, "offset_entry", lambda logs, number: None)
    with pytest.raises(OwnerFencedError, match="has other rows in the checkpoint"):
        place.settle(SinkEpoch(1, {"to": [99]}, 10))
    assert place.logs.single_offset(1) == offset(1)


def test_an_epoch_that_another_driver_logs_while_the_sink_is_queried_is_not_committed(place: Place) -> None:
    sink = sink_at(epoch(1))

    def newest() -> SinkEpoch:
        place.begun(2)
        return epoch(1)

    sink.newest = newest
    assert recover(place.committed(1).logs, sink, place.follow) == 1
    assert place.logs.single_offset(2) == offset(2)


@pytest.mark.parametrize("last", [0, 1])
def test_an_epoch_whose_offset_is_lost_is_logged_again(place: Place, last: int) -> None:
    place.committed(last).lose_offset(last)
    assert place.settle(epoch(last), limited=True) == last
    assert (place.logs.single_offset(last), place.logs.rows_passed(last)) == (offset(last), 10 * (last + 1))


@pytest.mark.parametrize("number", [0, 2])
def test_an_epoch_logged_from_the_sink_counts_towards_a_limit(place: Place, number: int) -> None:
    place.committed(number - 1)
    assert place.settle(epoch(number, rows=7), limited=True) == number
    assert place.logs.rows_passed(number) == 10 * number + 7


def test_an_epoch_logged_from_the_sink_has_no_count_without_a_limit(place: Place) -> None:
    assert place.settle(epoch(0)) == 0
    with pytest.raises(CheckpointMismatchError, match=r"MISMATCH.LIMIT\].*without a limit"):
        place.logs.rows_passed(0)


def test_a_limit_that_micro_batches_have_counted_is_refused(place: Place) -> None:
    assert place.settle(epoch(0)) == 0
    store_record(place.logs, 7)
    with pytest.raises(CheckpointMismatchError, match=r"LIMIT_TRIGGER\].*a limit that micro-batches"):
        place.logs.rows_passed(0)


def test_the_offset_of_a_recreated_sink_replaces_that_of_the_dropped_one(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver logged its last epoch after its sink was dropped, and another one has committed the number."""
    newest = SinkEpoch(1, {"to": [17]}, 7)
    assert place.committed(1).settle(newest, limited=True) == 1
    assert place.files == ([0, 1], [0, 1])
    assert (place.logs.single_offset(1), place.logs.rows_passed(1)) == ({"to": [17]}, 17)
    assert [getattr(record, "action", "") for record in caplog.records] == ["offset_replaced"]
    caplog.clear()
    assert place.settle(newest) == 1
    assert not caplog.records


def test_a_begun_epoch_says_that_the_one_before_it_is_committed(place: Place) -> None:
    """Also where a driver died before it had logged that one's commit, and the sink was restored."""
    with pytest.raises(CheckpointMismatchError) as caught:
        place.begun(1).settle(NOTHING)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"
