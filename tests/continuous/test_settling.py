"""A checkpoint is brought up to what its query's sink has, which commits first."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from penstock.continuous.ends import SinkEpoch
from penstock.continuous.logs import CheckpointLog
from penstock.continuous.settling import catch_up, settle
from penstock.errors import CheckpointMismatch, CheckpointRewound, OwnerFenced


def committed(folder: Path, count: int, *, passed: bool = False) -> CheckpointLog:
    """A checkpoint with so many epochs, of two rows each."""
    logs = CheckpointLog(str(folder / "ck"))
    for number in range(count):
        logs.write_offset(number, {"to": [number]}, 2 * (number + 1) if passed else None)
        logs.write_commit(number)
    return logs


def sink_at(number: int | None, offset: Any = None, *, rows: int = 2, new: bool = False) -> Mock:
    found = None if number is None else SinkEpoch(number, offset, rows)
    return Mock(description="queue 'big'", newest=lambda: found, may_be_new=new)


def test_an_epoch_that_the_sink_has_is_logged(tmp_path: Path) -> None:
    logs, followed = committed(tmp_path, 2), Mock()
    assert settle(logs, sink_at(2, {"to": [9]}), followed) == 2
    assert (logs.last_committed(), logs.unsettled(), logs.offset(2)) == (2, None, {"to": [9]})
    followed.assert_called_once_with({"to": [9]})


def test_the_first_epoch_is_logged_too(tmp_path: Path) -> None:
    logs = committed(tmp_path, 0)
    assert settle(logs, sink_at(0, {"to": [9]}), Mock()) == 0
    assert logs.offset(0) == {"to": [9]}


def test_a_driver_that_died_between_the_two_entries_of_an_epoch_is_finished(tmp_path: Path) -> None:
    logs = committed(tmp_path, 1)
    logs.write_offset(1, {"to": [9]})
    assert settle(logs, sink_at(1, {"to": [9]}), Mock()) == 1
    assert logs.unsettled() is None


def test_a_checkpoint_that_has_all_stays_as_it_is(tmp_path: Path) -> None:
    logs = committed(tmp_path, 2)
    assert settle(logs, sink_at(1, {"to": [1]}), Mock()) == 1
    assert settle(logs, sink_at(None), Mock()) == 1


@pytest.mark.parametrize("number", [-1, 0])
def test_a_sink_that_lacks_epochs_is_refused(tmp_path: Path, number: int) -> None:
    logs = committed(tmp_path, 2)
    with pytest.raises(CheckpointMismatch, match="restored") as caught:
        settle(logs, sink_at(number, {"to": [0]}), Mock())
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"


def test_a_sink_that_has_nothing_may_be_new_to_the_query_if_it_says_so(tmp_path: Path) -> None:
    logs = committed(tmp_path, 2)
    assert settle(logs, sink_at(-1, new=True), Mock()) == 1
    with pytest.raises(CheckpointMismatch):
        settle(logs, sink_at(0, {"to": [0]}, new=True), Mock())


def test_a_checkpoint_that_lacks_several_epochs_is_an_old_copy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRewound, match="old copy"):
        settle(committed(tmp_path, 1), sink_at(2, {"to": [9]}), Mock())


def test_what_the_micro_batch_engine_has_begun_is_dropped_unless_the_sink_has_it(tmp_path: Path) -> None:
    logs = committed(tmp_path, 1)
    logs.write_offset(1, {"to": [9]})
    assert settle(logs, sink_at(0), Mock()) == 0
    assert logs.unsettled() is None
    logs.write_offset(1, {"to": [9]})
    assert settle(logs, sink_at(1), Mock()) == 1
    assert logs.offset(1) == {"to": [9]}


def test_an_epoch_that_another_driver_logs_while_the_sink_is_asked_is_not_dropped(tmp_path: Path) -> None:
    logs = committed(tmp_path, 1)
    sink = sink_at(0, {"to": [0]})

    def newest() -> SinkEpoch:
        logs.write_offset(1, {"to": [9]})
        return SinkEpoch(0, {"to": [0]}, 2)

    sink.newest = newest
    assert settle(logs, sink, Mock()) == 0
    assert logs.offset(1) == {"to": [9]}


@pytest.mark.parametrize("last", [0, 1])
def test_an_epoch_whose_offset_another_driver_has_dropped_is_logged_again(tmp_path: Path, last: int) -> None:
    logs = committed(tmp_path, last + 1, passed=True)
    logs.drop_offset(last)
    assert settle(logs, sink_at(last, {"to": [last]}), Mock(), limited=True) == last
    assert (logs.offset(last), logs.passed(last)) == ({"to": [last]}, 2 * (last + 1))


def test_what_the_micro_batch_engine_has_begun_stays_for_it_to_repeat(tmp_path: Path) -> None:
    logs = committed(tmp_path, 1)
    logs.write_offset(1, {"to": [9]})
    for number in (0, 1):
        catch_up(logs, sink_at(number), Mock())
        assert logs.unsettled() == 1


def test_an_epoch_that_was_begun_with_other_rows_gives_way_to_the_one_that_the_sink_has(
    tmp_path: Path,
) -> None:
    logs = committed(tmp_path, 1)
    logs.write_offset(1, {"to": [8]})
    assert settle(logs, sink_at(1, {"to": [9]}), Mock()) == 1
    assert logs.offset(1) == {"to": [9]}


def test_an_epoch_that_is_committed_with_other_rows_is_another_drivers(tmp_path: Path) -> None:
    logs = committed(tmp_path, 1)
    logs.drop_offset(0)

    def follow(_: Any) -> None:
        logs.write_offset(0, {"to": [8]})

    with pytest.raises(OwnerFenced), patch.object(CheckpointLog, "has_offset", return_value=False):
        settle(logs, sink_at(0, {"to": [9]}), follow)


def test_the_count_of_a_limit_goes_on(tmp_path: Path) -> None:
    logs = committed(tmp_path, 2, passed=True)
    settle(logs, sink_at(2, {"to": [9]}, rows=3), Mock(), limited=True)
    assert logs.passed(2) == 7
