"""Recovery of a checkpoint from the query's sink, for every difference between the two.

The sink commits first, so the checkpoint may lack epochs that the sink has.
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
    """Micro-batch of a stateful query: Spark has logged its offset, and the sink stores none."""
    return SinkEpoch(number, None, 10)


def sink_at(newest: SinkEpoch | None, *, allows_new_sink: bool = False) -> Mock:
    return Mock(description="queue 'out'", newest=lambda: newest, allows_new_sink=allows_new_sink)


class Checkpoint:
    """Checkpoint of a query, and its source."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, CheckpointLog(str(folder))
        self.followed_offsets: list[tuple[Any, int | None]] = []
        """The offsets that the source followed, each with the last committed epoch at that time."""

    def log_committed(self, last: int) -> Checkpoint:
        """Log epochs as committed, up to the last one, with 10 rows each that count towards a limit."""
        for number in range(last + 1):
            self.log.write_offset(number, offset(number), 10 * (number + 1))
            self.log.write_commit(number)
        return self

    def log_begun(self, number: int, end_offset: Any = None) -> Checkpoint:
        """Log the offset of an epoch, but no commit."""
        self.log.write_offset(number, offset(number) if end_offset is None else end_offset)
        return self

    def lose_offset(self, number: int) -> None:
        """Delete an offset entry, as a power failure may."""
        (self.folder / "offsets" / str(number)).unlink()

    def follow(self, end_offset: Any) -> None:
        self.followed_offsets.append((end_offset, self.log.last_commit()))

    def recover(self, newest: SinkEpoch | None, *, limited: bool = False, **options: object) -> int | None:
        return recover(self.log, sink_at(newest, **options), self.follow, limited=limited)

    def catch_up(self, newest: SinkEpoch | None) -> SinkEpoch | None:
        return catch_up(self.log, sink_at(newest), self.follow)

    @property
    def logged_epochs(self) -> tuple[list[int], list[int]]:
        """The numbers of epochs that have an offset, and of those that have a commit."""
        offsets, commits = (
            sorted(int(path.name) for path in (self.folder / name).iterdir() if path.name.isdigit())
            for name in ("offsets", "commits")
        )
        return offsets, commits


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "ck")


def test_a_new_checkpoint_with_a_new_sink_stays_empty(checkpoint: Checkpoint) -> None:
    assert checkpoint.recover(NOTHING) is None
    assert (checkpoint.logged_epochs, checkpoint.followed_offsets) == (([], []), [])


@pytest.mark.parametrize("number", [0, 2])
def test_an_epoch_that_only_the_sink_has_is_logged_after_the_source_has_followed(
    checkpoint: Checkpoint, number: int
) -> None:
    assert checkpoint.log_committed(number - 1).recover(epoch(number)) == number
    assert checkpoint.logged_epochs == ([*range(number + 1)], [*range(number + 1)])
    assert checkpoint.log.single_offset(number) == offset(number)
    assert checkpoint.followed_offsets == [(offset(number), number - 1 if number else None)]


def test_a_complete_checkpoint_is_unchanged_and_the_source_follows(checkpoint: Checkpoint) -> None:
    assert checkpoint.log_committed(1).recover(epoch(1)) == 1
    assert checkpoint.logged_epochs == ([0, 1], [0, 1])
    assert checkpoint.followed_offsets == [(offset(1), 1)], (
        "the driver may have crashed before the source followed"
    )


def test_the_source_does_not_follow_the_offset_of_a_driver_whose_successor_has_committed_the_checkpoint(
    checkpoint: Checkpoint,
) -> None:
    """An at-least-once sink stores the offset of the driver that committed first."""
    earlier = SinkEpoch(1, {"to": [15]}, 5, identifies_rows=False)
    assert checkpoint.log_committed(1).recover(earlier) == 1
    assert checkpoint.log.single_offset(1) == offset(1)
    assert checkpoint.followed_offsets == []


REPEATED = SinkEpoch(2, None, 10, identifies_rows=False)
"""Micro-batch of an at-least-once sink."""


@pytest.mark.parametrize("newest", [None, REPEATED, epoch(1)])
def test_a_commit_whose_offset_is_lost_is_dropped_and_repeated(
    checkpoint: Checkpoint, newest: SinkEpoch | None
) -> None:
    checkpoint.log_committed(1).log.write_commit(2)
    assert checkpoint.recover(newest) == 1
    assert checkpoint.logged_epochs == ([0, 1], [0, 1])


@pytest.mark.parametrize("last", [0, 2])
def test_deleted_offsets_of_all_committed_epochs_are_an_error(checkpoint: Checkpoint, last: int) -> None:
    checkpoint.log_committed(last)
    for number in range(last + 1):
        checkpoint.lose_offset(number)
    with pytest.raises(CommitRefusedError, match="cannot be read"):
        checkpoint.log.single_offset(checkpoint.recover(None))
    assert checkpoint.logged_epochs == ([], [*range(last + 1)])


def test_at_least_once_micro_batches_repeat_a_commit_whose_offset_is_lost(checkpoint: Checkpoint) -> None:
    checkpoint.log_committed(1).log.write_commit(2)
    require_not_behind(checkpoint.log, sink_at(REPEATED))
    assert checkpoint.logged_epochs == ([0, 1], [0, 1])


def test_the_lost_offset_of_a_commit_is_restored_if_the_sink_has_it(checkpoint: Checkpoint) -> None:
    checkpoint.log_committed(1).log.write_commit(2)
    assert checkpoint.recover(epoch(2)) == 2
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1, 2])


def test_a_sink_without_a_record_leaves_the_checkpoint_unchanged(checkpoint: Checkpoint) -> None:
    assert checkpoint.log_committed(1).recover(None) == 1
    assert checkpoint.log_begun(2).recover(None) == 1
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1])
    assert checkpoint.followed_offsets == []


@pytest.mark.parametrize(
    ("newest", "description"),
    [(epoch(0), "up to 0"), (micro_batch(0), "up to 0"), (NOTHING, "nothing of this query")],
)
def test_a_sink_that_lacks_committed_epochs_is_refused(
    checkpoint: Checkpoint, newest: SinkEpoch, description: str
) -> None:
    checkpoint.log_committed(1)
    with pytest.raises(
        CheckpointMismatchError,
        match=f"committed micro-batch 1, but queue 'out' has .*{description}: if its store was restored",
    ) as caught:
        checkpoint.recover(newest)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"
    assert (checkpoint.logged_epochs, checkpoint.followed_offsets) == (([0, 1], [0, 1]), [])


@pytest.mark.parametrize("newest", [epoch(0), NOTHING])
def test_an_at_least_once_sink_that_lacks_committed_epochs_is_refused(
    checkpoint: Checkpoint, newest: SinkEpoch
) -> None:
    checkpoint.log_committed(1)
    with pytest.raises(CheckpointMismatchError) as caught:
        require_not_behind(checkpoint.log, sink_at(newest))
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"


@pytest.mark.parametrize("newest", [epoch(1), epoch(5), None])
def test_an_at_least_once_sink_may_be_ahead_of_the_checkpoint(
    checkpoint: Checkpoint, newest: SinkEpoch | None
) -> None:
    checkpoint.log_committed(1)
    require_not_behind(checkpoint.log, sink_at(newest))
    other = Mock(newest=Mock(side_effect=CheckpointMismatchError("of another checkpoint")))
    require_not_behind(checkpoint.log, other)
    assert checkpoint.logged_epochs == ([0, 1], [0, 1])


def test_an_empty_sink_is_accepted_if_new_sinks_are_allowed(checkpoint: Checkpoint) -> None:
    assert checkpoint.log_committed(1).recover(NOTHING, allows_new_sink=True) == 1
    assert checkpoint.logged_epochs == ([0, 1], [0, 1])


def test_a_sink_that_lacks_some_epochs_is_not_taken_for_a_new_one(checkpoint: Checkpoint) -> None:
    checkpoint.log_committed(1)
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.recover(epoch(0), allows_new_sink=True)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"


@pytest.mark.parametrize("last", [-1, 0, 1])
def test_a_checkpoint_that_lacks_several_epochs_is_refused_as_an_old_copy(
    checkpoint: Checkpoint, last: int
) -> None:
    checkpoint.log_committed(last)
    with pytest.raises(
        CheckpointRewoundError, match=f"epochs up to {last + 2} .* ends with {last}: the checkpoint is an"
    ):
        checkpoint.recover(epoch(last + 2))
    assert checkpoint.logged_epochs == ([*range(last + 1)], [*range(last + 1)])
    assert checkpoint.followed_offsets == []


@pytest.mark.parametrize("last", [-1, 0, 1])
@pytest.mark.parametrize("ahead", [2, 3, 50])
def test_several_missing_epochs_are_logged_if_the_sink_has_the_last_two(
    checkpoint: Checkpoint, last: int, ahead: int
) -> None:
    number = last + ahead
    newest = SinkEpoch(number, offset(number), 10, offset(number - 1))
    assert checkpoint.log_committed(last).recover(newest) == number
    logged = list(range(last + 1))
    assert checkpoint.logged_epochs == ([*logged, number - 1, number], [*logged, number])
    assert [checkpoint.log.single_offset(epoch_number) for epoch_number in (number - 1, number)] == [
        offset(number - 1),
        offset(number),
    ]
    assert checkpoint.followed_offsets == [(offset(number), None if last < 0 else last)]


@pytest.mark.parametrize("begun", [2, 3])
def test_entries_of_begun_epochs_are_replaced_by_those_of_the_sink(
    checkpoint: Checkpoint, begun: int
) -> None:
    newest = SinkEpoch(3, offset(3), 10, offset(2))
    assert checkpoint.log_committed(1).log_begun(begun, {"to": [99]}).recover(newest) == 3
    assert checkpoint.logged_epochs == ([0, 1, 2, 3], [0, 1, 3])
    assert [checkpoint.log.single_offset(epoch_number) for epoch_number in (2, 3)] == [offset(2), offset(3)]


def test_a_query_with_a_limit_does_not_skip_epochs(checkpoint: Checkpoint) -> None:
    """The sink does not know how many rows the limit has counted."""
    with pytest.raises(CheckpointRewoundError):
        checkpoint.log_committed(1).recover(SinkEpoch(4, offset(4), 10, offset(3)), limited=True)
    assert checkpoint.logged_epochs == ([0, 1], [0, 1])


@pytest.mark.parametrize("newest", [epoch(1), micro_batch(1)])
def test_a_planned_micro_batch_that_the_sink_lacks_stays_until_its_epoch_is_committed(
    checkpoint: Checkpoint, newest: SinkEpoch
) -> None:
    """The suspended driver that began it may resume and commit it."""
    assert checkpoint.log_committed(1).log_begun(2).recover(newest) == 1
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1])


def test_a_planned_micro_batch_that_the_sink_has_is_committed(checkpoint: Checkpoint) -> None:
    assert checkpoint.log_committed(1).log_begun(2, {"to": [99]}).recover(micro_batch(2)) == 2
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1, 2])
    assert checkpoint.log.single_offset(2) == {"to": [99]}
    assert checkpoint.followed_offsets == [], "the sink has moved the consumer"


def test_a_planned_micro_batch_is_repeated_if_the_sink_may_have_other_rows_under_its_id(
    checkpoint: Checkpoint,
) -> None:
    newest = SinkEpoch(2, None, 10, identifies_rows=False)
    assert checkpoint.log_committed(1).log_begun(2, {"to": [99]}).recover(newest) == 1
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1])


@pytest.mark.parametrize("newest", [epoch(1), micro_batch(1), micro_batch(2)])
def test_a_planned_micro_batch_is_left_for_the_micro_batch_engine_to_repeat(
    checkpoint: Checkpoint, newest: SinkEpoch
) -> None:
    assert checkpoint.log_committed(1).log_begun(2).catch_up(newest) == newest
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1])


def test_an_epoch_whose_driver_crashed_between_its_two_entries_is_completed(checkpoint: Checkpoint) -> None:
    assert checkpoint.log_committed(1).log_begun(2).recover(epoch(2)) == 2
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1, 2])


def test_an_offset_entry_that_equals_the_sinks_offset_is_left_as_spark_wrote_it(
    checkpoint: Checkpoint,
) -> None:
    entry = checkpoint.log_committed(1).log_begun(2).log.offset_entry(2)
    assert checkpoint.recover(epoch(2), limited=False) == 2
    assert checkpoint.log.offset_entry(2) == entry


@pytest.mark.parametrize("numbers", [[2], [2, 3]])
def test_all_epochs_that_were_begun_may_be_replaced(checkpoint: Checkpoint, numbers: list[int]) -> None:
    checkpoint.log_committed(1)
    for number in numbers:
        checkpoint.log_begun(number)
    assert checkpoint.recover(None) == 1
    entries = checkpoint.log.begun_entries()
    assert list(entries) == numbers
    for number, entry in entries.items():
        checkpoint.log.write_offset(number, {"to": [99]}, replaced_entry=entry)
        checkpoint.log.write_commit(number)
    assert checkpoint.log.begun_entries() == {}


def test_an_epoch_that_its_driver_has_committed_meanwhile_is_not_replaced(checkpoint: Checkpoint) -> None:
    checkpoint.log_committed(1).log_begun(2)
    (entry,) = checkpoint.log.begun_entries().values()
    checkpoint.log.write_commit(2)
    with pytest.raises(OwnerFencedError):
        checkpoint.log.write_offset(2, {"to": [99]}, replaced_entry=entry)
    assert checkpoint.log.single_offset(2) == offset(2)


def test_an_empty_offset_entry_is_reported_as_damaged(checkpoint: Checkpoint) -> None:
    checkpoint.log_begun(0)
    (checkpoint.folder / "offsets" / "0").write_text("")
    with pytest.raises(CommitRefusedError) as caught:
        checkpoint.log.single_offset(0)
    assert caught.value.condition == "COMMIT_REFUSED.CHECKPOINT_DAMAGED"


def test_an_epoch_planned_with_other_rows_is_replaced_by_the_one_in_the_sink(checkpoint: Checkpoint) -> None:
    assert checkpoint.log_committed(1).log_begun(2, {"to": [99]}).recover(epoch(2)) == 2
    assert checkpoint.logged_epochs == ([0, 1, 2], [0, 1, 2])
    assert checkpoint.log.single_offset(2) == offset(2)


def test_an_epoch_committed_with_other_rows_belongs_to_another_driver(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.log_committed(1)
    monkeypatch.setattr(CheckpointLog, "offset_entry", lambda log, number: None)
    with pytest.raises(OwnerFencedError, match="has other rows in the checkpoint"):
        checkpoint.recover(SinkEpoch(1, {"to": [99]}, 10))
    assert checkpoint.log.single_offset(1) == offset(1)


def test_an_epoch_that_another_driver_logs_while_the_sink_is_queried_is_not_committed(
    checkpoint: Checkpoint,
) -> None:
    sink = sink_at(epoch(1))

    def newest() -> SinkEpoch:
        checkpoint.log_begun(2)
        return epoch(1)

    sink.newest = newest
    assert recover(checkpoint.log_committed(1).log, sink, checkpoint.follow) == 1
    assert checkpoint.log.single_offset(2) == offset(2)


@pytest.mark.parametrize("last", [0, 1])
def test_an_epoch_whose_offset_is_lost_is_logged_again(checkpoint: Checkpoint, last: int) -> None:
    checkpoint.log_committed(last).lose_offset(last)
    assert checkpoint.recover(epoch(last), limited=True) == last
    assert (checkpoint.log.single_offset(last), checkpoint.log.rows_passed(last)) == (
        offset(last),
        10 * (last + 1),
    )


@pytest.mark.parametrize("number", [0, 2])
def test_an_epoch_logged_from_the_sink_counts_towards_a_limit(checkpoint: Checkpoint, number: int) -> None:
    checkpoint.log_committed(number - 1)
    assert checkpoint.recover(epoch(number, rows=7), limited=True) == number
    assert checkpoint.log.rows_passed(number) == 10 * number + 7


def test_an_epoch_logged_from_the_sink_has_no_count_without_a_limit(checkpoint: Checkpoint) -> None:
    assert checkpoint.recover(epoch(0)) == 0
    with pytest.raises(CheckpointMismatchError, match=r"MISMATCH.LIMIT\].*without a limit"):
        checkpoint.log.rows_passed(0)


def test_a_limit_that_micro_batches_have_counted_is_refused(checkpoint: Checkpoint) -> None:
    assert checkpoint.recover(epoch(0)) == 0
    store_record(checkpoint.log, 7)
    with pytest.raises(CheckpointMismatchError, match=r"LIMIT_TRIGGER\].*a limit that micro-batches"):
        checkpoint.log.rows_passed(0)


def test_the_offset_of_a_recreated_sink_replaces_that_of_the_dropped_one(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver logged its last epoch after its sink was dropped, and another one committed that number."""
    newest = SinkEpoch(1, {"to": [17]}, 7)
    assert checkpoint.log_committed(1).recover(newest, limited=True) == 1
    assert checkpoint.logged_epochs == ([0, 1], [0, 1])
    assert (checkpoint.log.single_offset(1), checkpoint.log.rows_passed(1)) == ({"to": [17]}, 17)
    assert [getattr(record, "action", "") for record in caplog.records] == ["offset_replaced"]
    caplog.clear()
    assert checkpoint.recover(newest) == 1
    assert not caplog.records


def test_a_begun_epoch_implies_that_the_one_before_it_is_committed(checkpoint: Checkpoint) -> None:
    """A driver may have crashed before it logged that commit, and the sink may have been restored since."""
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.log_begun(1).recover(NOTHING)
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"
