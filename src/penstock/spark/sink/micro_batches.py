"""The commit of a micro-batch, built on the driver from the query's checkpoint."""

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
    """Return the commit of a micro-batch whose tasks are done.

    Parameters
    ----------
    app_id
        The query's identity; its id in the checkpoint when None.
    attempts, tasks, rebind, new_sink
        As in :class:`BatchCommit`.

    Raises
    ------
    CommitRefused
        When the checkpoint cannot be read, or has two ranges of a consumer.
    """
    offsets = checkpoint.offsets(batch_id)
    query_id, stateful = checkpoint.query_id(), checkpoint.stateful()
    return BatchCommit(
        sink=target,
        app_id=app_id or query_id,
        batch_id=batch_id,
        rows=rows,
        origin=query_id,
        sources=batch_ranges(offsets, checkpoint.offsets(batch_id - 1)),
        others=other_offsets(offsets),
        attempts=attempts or {},
        tasks=tasks,
        stateful=stateful,
        rebind=rebind,
        new_sink=new_sink,
        logged=None if stateful else _restorable_offset(offsets),
    )


def _restorable_offset(offsets: Sequence[Any]) -> str | None:
    """Return the offset to restore a checkpoint that has lost this micro-batch.

    Only for one source with a JSON object.
    """
    return json.dumps(offsets[0]) if len(offsets) == 1 and isinstance(offsets[0], dict) else None


def input_digest(checkpoint: Checkpoint, batch_id: int) -> str:
    """Return a hash of a micro-batch's offsets, which identifies its input."""
    offsets = json.dumps(checkpoint.offsets(batch_id), sort_keys=True)
    return hashlib.sha256(offsets.encode()).hexdigest()


def require_same_query(checkpoint: Checkpoint, writers: Iterable[str]) -> None:
    """Refuse a checkpoint of another query than the one that wrote.

    Parameters
    ----------
    writers
        The query ids from the tasks of the micro-batch.

    Raises
    ------
    CheckpointMismatch
    """
    queries, expected = set(writers), checkpoint.query_id()
    if queries != {expected}:
        raise CheckpointMismatch(
            f"the running query is {', '.join(sorted(queries))}, but the sink's checkpoint is that of "
            f"{expected}: give checkpointLocation as a full URL if paths without a scheme are not local",
            query=sorted(queries),
            checkpoint=expected,
        )
