"""A micro-batch once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.arguments import require
from penstock.errors import InvalidInput
from penstock.spark.checkpoint import Checkpoint


def replay_last_batch(checkpoint: str | Path) -> int:
    """Make Spark forget that the last micro-batch of a checkpoint was committed: the next start of the query repeats it.

    It is what is left when a process dies between a sink's commit and Spark's (the entry in ``commits``; Spark 4.2, 4.3).

    Parameters
    ----------
    checkpoint
        The directory of a checkpoint whose query does not run.

    Returns
    -------
    int
        The number of the micro-batch.

    Raises
    ------
    InvalidInput
        When no micro-batch is committed there, or one has begun that is not: that one would be repeated.
    """
    found = Checkpoint(str(checkpoint))
    last, begun = found.last_commit(), found.last_planned()
    if last is None:
        raise InvalidInput(
            f"no micro-batch is committed in the checkpoint {str(checkpoint)!r}: run the query over it first"
        )
    if begun != last:
        raise InvalidInput(
            f"micro-batch {begun} of the checkpoint {str(checkpoint)!r} has begun and is not committed, so that the query's next "
            f"start repeats it and not {last}: start it once before"
        )
    commits = Path(checkpoint) / "commits"
    for name in (str(last), f".{last}.crc"):
        (commits / name).unlink(missing_ok=True)
    return last


# ---- crashes: Crashes of a query under test, at the two points of a micro-batch where a sink and Spark may disagree.

BEFORE_SINK, AFTER_SINK = "before_sink", "after_sink"
POINTS = (BEFORE_SINK, AFTER_SINK)

_armed: dict[str, int | None] = {}


class Crash(Exception):
    """What a query under test fails with at the point that was asked for."""


@contextmanager
def crash_at(point: str, *, batch: int | None = None) -> Iterator[None]:
    """Let queries that were started by ``run`` fail in a micro-batch, as if their process died there.

    The query's next ``process_all_available()`` raises `Crash`; start it again over the same checkpoint, and Spark repeats the
    micro-batch, which is in its offset log and not in its commit log.

    Parameters
    ----------
    point
        ``before_sink``: the sink has nothing of the micro-batch. ``after_sink``: it has all of it, and Spark does not know.
    batch
        The number of the micro-batch, from 0; the next one when None.

    Raises
    ------
    InvalidInput
        For another point.
    """
    if point not in POINTS:
        raise InvalidInput(f"there is no point {point!r} to crash at: give one of {', '.join(POINTS)}")
    require("batch", batch, int | None, "the number of a micro-batch")
    _armed[point] = batch
    try:
        yield
    finally:
        _armed.pop(point, None)


def pass_by(point: str, batch: int) -> None:
    """Crash if it is the point."""
    if point in _armed and _armed[point] in (None, batch):
        raise Crash(f"as asked for, {point.replace('_', ' the ')} in micro-batch {batch}")
