"""The columns of a limit for each key, kept beside the checkpoint: Spark keeps the counts, and not of what."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.errors import CheckpointMismatch
from penstock.limits.record import write_beside
from penstock.names import in_quotes
from penstock.spark.checkpoint import Checkpoint, redact

_FILE = "limit-per.json"


def keep_key(checkpoint: Checkpoint, per: Sequence[str], *, exact: bool) -> None:
    """Keep the columns, before the first micro-batch; later they are to be the same, in the same order.

    A checkpoint that began before there was such a file goes on without.

    Parameters
    ----------
    per
        The columns.
    exact
        Whether two columns may differ by case alone.

    Raises
    ------
    CheckpointMismatch
        When the counts there are those of other columns.
    CommitRefused
        When nothing can be written.
    """
    before = _kept(checkpoint)
    if before is not None and _named(before, exact) == _named(per, exact):
        return
    if checkpoint.last_begun() is None:
        write_beside(checkpoint, _FILE, {"version": 1, "per": list(per)})
    elif before is not None:
        where = redact(checkpoint.location)
        raise CheckpointMismatch(
            f"the limit at {where!r} has counted the rows of each {_shown(before)}, and is now to count those of each {_shown(per)}: "
            "rows would be dropped by counts of other keys. Start with a new checkpoint; a consumer's offset says where it goes on",
            condition="CHECKPOINT_MISMATCH.LIMIT_PER",
            checkpoint=where,
            before=list(before),
            now=list(per),
        )


def _kept(checkpoint: Checkpoint) -> list[str] | None:
    found = checkpoint.read(f"penstock/{_FILE}")
    return None if found is None else [str(name) for name in json.loads(found)["per"]]


def _named(names: Sequence[str], exact: bool) -> list[str]:
    return [name if exact else name.lower() for name in names]


def _shown(names: Sequence[str]) -> str:
    return f"per=[{', '.join(map(in_quotes, names))}]"
