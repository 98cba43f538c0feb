"""A micro-batch once more."""

from __future__ import annotations

from pathlib import Path

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
    last, begun = found.last_commit(), found.last_begun()
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
