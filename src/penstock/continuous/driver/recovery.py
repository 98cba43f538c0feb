"""Bringing a checkpoint up to what the query's sink has: a driver may have died between the two.

The sink commits an epoch before the checkpoint logs it, so its own record decides.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.commit.protocol import sink_behind
from penstock.continuous.connectors.protocol import SinkEpoch, SinkRecord
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.errors import CheckpointRewound, OwnerFenced

Follow = Callable[[Any], None]


def recover(logs: CheckpointLog, sink: SinkRecord, follow: Follow, *, limited: bool = False) -> int | None:
    """Make a checkpoint ready for a run of the continuous engine; return its last committed epoch.

    An epoch that was logged and not committed, as by the micro-batch engine, is dropped.

    Parameters
    ----------
    follow, limited
        As in :func:`catch_up`.

    Raises
    ------
    CheckpointMismatch, CheckpointRewound, OwnerFenced
        As :func:`catch_up`.
    """
    # Looked up before the sink is asked: what another driver commits and logs after that is not to be dropped.
    begun = logs.unsettled()
    found = catch_up(logs, sink, follow, limited=limited)
    last = logs.last_committed()
    if begun is None or begun < _after(last):
        return last
    if found is not None and found.number == begun:
        logs.write_commit(begun)
        return begun
    logs.drop_offset(begun)
    return last


def catch_up(
    logs: CheckpointLog, sink: SinkRecord, follow: Follow, *, limited: bool = False
) -> SinkEpoch | None:
    """Log the epoch or micro-batch that the sink has committed and the checkpoint does not know of; return the last one that the sink has.

    The checkpoint may have lost it with the power of its machine, as Spark does not sync what it writes, or another driver has taken it
    for one that came to nothing. Where the sink does not know the offset, as of a query with several sources or with state, a
    micro-batch that Spark has begun stays as it is: Spark repeats it.

    Parameters
    ----------
    follow
        Called with the offset of the last epoch that the sink has, before it is logged: for a source whose consumer the sink does not
        move.
    limited
        Whether the query has a limit, whose count the checkpoint keeps.

    Raises
    ------
    CheckpointMismatch
        When the sink lacks epochs that the checkpoint has committed: its store was restored from an older backup.
    CheckpointRewound
        When the checkpoint lacks more than one epoch that the sink has: it is an old copy.
    OwnerFenced
        When another driver writes the checkpoint.
    """
    found = sink.newest()
    if found is None:
        return None
    last = logs.last_committed()
    _require_level(sink, found, last)
    if found.offset is not None:
        follow(found.offset)
        if found.number == _after(last) or not logs.has_offset(found.number):
            before = found.number - 1 if found.number else None
            _log(logs, found, logs.passed(before) + found.rows if limited else None)
    return found


def _after(last: int | None) -> int:
    return 0 if last is None else last + 1


def _require_level(sink: SinkRecord, found: SinkEpoch, last: int | None) -> None:
    """Refuse a sink and a checkpoint of different times."""
    after = _after(last)
    if found.number < after - 1 and not (found.number < 0 and sink.may_be_new):
        raise sink_behind(sink.description, after, None if found.number < 0 else found.number)
    if found.number > after:
        raise CheckpointRewound(
            f"{sink.description} has epochs up to {found.number} of the query, and the checkpoint ends with {after - 1}: it is an "
            "old copy; use the newest one",
            batch_id=after,
            last=found.number,
        )


def _log(logs: CheckpointLog, found: SinkEpoch, passed: int | None) -> None:
    """Log an epoch, in the place of one that was begun with other rows: since the sink has this one, that one comes to nothing.

    A driver that wakes behind its commit to the sink may just have logged it itself.
    """
    with suppress(OwnerFenced):
        logs.write_offset(found.number, found.offset, passed)
    if logs.offset(found.number) != found.offset:
        if found.number < _after(logs.last_committed()):
            raise OwnerFenced(
                f"epoch {found.number} is in the checkpoint at {logs.location!r} and in the sink with other rows: another driver writes "
                "the checkpoint. Run each query once",
                condition="OWNER_FENCED.CHECKPOINT",
                checkpoint=logs.location,
            )
        logs.drop_offset(found.number)
        logs.write_offset(found.number, found.offset, passed)
    with suppress(OwnerFenced):
        logs.write_commit(found.number)
