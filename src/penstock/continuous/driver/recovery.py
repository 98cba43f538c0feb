"""Recovery of a checkpoint that lacks what the query's sink has committed.

A driver may have died between the two. The sink commits an epoch before the checkpoint logs it, so the sink's
record decides.
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
    """Prepare a checkpoint for a run of the continuous engine; return its last committed epoch.

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
    # Before the sink is asked: what another driver commits and logs after that must not be dropped.
    begun = logs.unsettled()
    newest = catch_up(logs, sink, follow, limited=limited)
    last = logs.last_committed()
    if begun is None or begun < _next(last):
        return last
    if newest is not None and newest.number == begun:
        logs.write_commit(begun)
        return begun
    logs.drop_offset(begun)
    return last


def catch_up(
    logs: CheckpointLog, sink: SinkRecord, follow: Follow, *, limited: bool = False
) -> SinkEpoch | None:
    """Log the epoch or micro-batch that the checkpoint lacks; return the last one that the sink has.

    The checkpoint may have lost it when its machine lost power, as Spark does not sync what it writes, or
    another driver may have dropped it as uncommitted. Where the sink does not know the offset, as for a query
    with several sources or with state, a micro-batch that Spark has begun is left to Spark, which repeats it.

    Parameters
    ----------
    follow
        Called with the offset of the last epoch that the sink has, before it is logged: for a source whose
        consumer the sink does not move.
    limited
        Whether the query has a limit, whose count the checkpoint keeps.

    Raises
    ------
    CheckpointMismatch
        When the sink lacks epochs that the checkpoint has committed: its store was restored from an older
        backup.
    CheckpointRewound
        When the checkpoint lacks more than one epoch that the sink has: it is an old copy.
    OwnerFenced
        When another driver writes the checkpoint.
    """
    newest = sink.newest()
    if newest is None:
        return None
    last = logs.last_committed()
    _require_same_time(sink, newest, last)
    if newest.offset is not None:
        follow(newest.offset)
        if newest.number == _next(last) or not logs.has_offset(newest.number):
            before = newest.number - 1 if newest.number else None
            _log(logs, newest, logs.passed(before) + newest.rows if limited else None)
    return newest


def _next(last: int | None) -> int:
    return 0 if last is None else last + 1


def _require_same_time(sink: SinkRecord, newest: SinkEpoch, last: int | None) -> None:
    """Refuse a sink and a checkpoint of different times."""
    following = _next(last)
    if newest.number < following - 1 and not (newest.number < 0 and sink.may_be_new):
        raise sink_behind(sink.description, following, None if newest.number < 0 else newest.number)
    if newest.number > following:
        raise CheckpointRewound(
            f"{sink.description} has epochs up to {newest.number} of the query, and the checkpoint ends with "
            f"{following - 1}: it is an old copy; use the newest one",
            batch_id=following,
            last=newest.number,
        )


def _log(logs: CheckpointLog, epoch: SinkEpoch, passed: int | None) -> None:
    """Log an epoch of the sink, in place of one that was begun with other rows and never committed.

    A driver that was suspended after its commit to the sink may just have logged it itself.
    """
    with suppress(OwnerFenced):
        logs.write_offset(epoch.number, epoch.offset, passed)
    if logs.offset(epoch.number) != epoch.offset:
        if epoch.number < _next(logs.last_committed()):
            raise OwnerFenced(
                f"epoch {epoch.number} has other rows in the checkpoint at {logs.location!r} than in the "
                "sink: another driver writes the checkpoint. Run each query once",
                condition="OWNER_FENCED.CHECKPOINT",
                checkpoint=logs.location,
            )
        logs.drop_offset(epoch.number)
        logs.write_offset(epoch.number, epoch.offset, passed)
    with suppress(OwnerFenced):
        logs.write_commit(epoch.number)
