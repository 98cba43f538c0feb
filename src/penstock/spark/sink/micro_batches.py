"""What a sink commits of a micro-batch, as the query's checkpoint tells it on the driver."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.commit.micro_batch import BatchCommit, Target
from penstock.commit.offsets import batch_ranges, other_offsets
from penstock.errors import CheckpointMismatch
from penstock.spark.checkpoint import Checkpoint

T = TypeVar("T")


def batch_commit(
    target: Target[T],
    checkpoint: Checkpoint,
    batch_id: int,
    *,
    rows: int,
    app_id: str | None = None,
    attempts: Mapping[str, int] | None = None,
    tasks: Mapping[int, int] | None = None,
    rebind: bool = False,
    new_sink: bool = False,
) -> BatchCommit[T]:
    """A micro-batch whose tasks are done.

    Parameters
    ----------
    rows
        How many rows it has.
    app_id
        The query's identity; the one in its checkpoint when None.
    attempts, tasks, rebind, new_sink
        As in :class:`BatchCommit`.

    Raises
    ------
    CommitRefused
        When the checkpoint cannot be read, or a consumer appears in it with two ranges.
    """
    now = checkpoint.offsets(batch_id)
    query_id, stateful = checkpoint.query_id(), checkpoint.stateful()
    return BatchCommit(
        sink=target,
        app_id=app_id or query_id,
        batch_id=batch_id,
        rows=rows,
        origin=query_id,
        sources=batch_ranges(now, checkpoint.offsets(batch_id - 1)),
        others=other_offsets(now),
        attempts=attempts or {},
        tasks=tasks,
        stateful=stateful,
        rebind=rebind,
        new_sink=new_sink,
        logged=None if stateful else _logged(now),
    )


def _logged(offsets: Sequence[Any]) -> str | None:
    """The offset that a checkpoint which has lost this micro-batch is given again; of one source alone, and where it is an object."""
    return json.dumps(offsets[0]) if len(offsets) == 1 and isinstance(offsets[0], dict) else None


def input_digest(checkpoint: Checkpoint, batch_id: int) -> str:
    """What tells the input of a micro-batch from any other, by its offsets."""
    offsets = json.dumps(checkpoint.offsets(batch_id), sort_keys=True)
    return hashlib.sha256(offsets.encode()).hexdigest()


def require_same_query(checkpoint: Checkpoint, writers: Iterable[str]) -> None:
    """Refuse a checkpoint that is not that of the query which wrote.

    Parameters
    ----------
    writers
        The query ids that the tasks of the micro-batch were told.

    Raises
    ------
    CheckpointMismatch
    """
    queries, found = set(writers), checkpoint.query_id()
    if queries != {found}:
        raise CheckpointMismatch(
            f"the query is {', '.join(sorted(queries))}, and the checkpoint that the sink was given is {found}'s: "
            "where paths without a scheme are not local ones, give checkpointLocation as a full URL",
            query=sorted(queries),
            checkpoint=found,
        )
