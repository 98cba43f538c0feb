"""Crashes of a query under test, and micro-batches that are repeated as after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.arguments import require
from penstock.errors import InvalidInputError
from penstock.spark.checkpoint import Checkpoint


def replay_last_batch(checkpoint: str | Path) -> int:
    """Remove Spark's commit of the last micro-batch from a checkpoint, so that the query repeats it at its
    next start.

    This is how a checkpoint looks when a process dies between the sink's commit and Spark's (the entry in
    ``commits``; Spark 4.2, 4.3).

    Parameters
    ----------
    checkpoint
        The directory of a checkpoint whose query is not running.

    Returns
    -------
    int
        The number of the micro-batch.

    Raises
    ------
    InvalidInputError
        When no micro-batch is committed there, or a later one has started, which would be repeated instead.
    """
    opened = Checkpoint(str(checkpoint))
    last, planned = opened.last_commit(), opened.last_planned()
    if last is None:
        raise InvalidInputError(
            f"the checkpoint {str(checkpoint)!r} has no committed micro-batch: run the query over it first"
        )
    if planned != last:
        raise InvalidInputError(
            f"micro-batch {planned} of the checkpoint {str(checkpoint)!r} is started and not committed, so "
            f"the query's next start repeats it and not {last}: start the query once before"
        )
    commits = Path(checkpoint) / "commits"
    for name in (str(last), f".{last}.crc"):
        (commits / name).unlink(missing_ok=True)
    return last


BEFORE_SINK, AFTER_SINK = "before_sink", "after_sink"
POINTS = (BEFORE_SINK, AFTER_SINK)
"""The two points of a micro-batch at which a sink and Spark can disagree."""

_armed: dict[str, int | None] = {}


class Crash(Exception):
    """The error with which a query under test fails at the requested point."""


@contextmanager
def crash_at(point: str, *, batch: int | None = None) -> Iterator[None]:
    """Make queries of ``run`` fail in a micro-batch, as if their process died there.

    The query's next ``process_all_available()`` raises `Crash`. Start it again over the same checkpoint,
    and Spark repeats the micro-batch, which is in its offset log and not in its commit log.

    Parameters
    ----------
    point
        ``before_sink``: the sink has none of the micro-batch. ``after_sink``: the sink has it, and Spark
        has not committed it.
    batch
        The number of the micro-batch, from 0; by default, the next one.

    Raises
    ------
    InvalidInputError
        When there is no such point.
    """
    if point not in POINTS:
        raise InvalidInputError(f"there is no point {point!r} to crash at: pass one of {', '.join(POINTS)}")
    require("batch", batch, int | None, "the number of a micro-batch")
    _armed[point] = batch
    try:
        yield
    finally:
        _armed.pop(point, None)


def crash_if_armed(point: str, batch: int) -> None:
    """Raise `Crash` if `crash_at` has requested it at this point."""
    if point in _armed and _armed[point] in (None, batch):
        raise Crash(f"as requested, {point.replace('_', ' the ')} in micro-batch {batch}")
