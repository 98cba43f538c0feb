"""Check whether a micro-batch of a query is already committed to a Delta or Iceberg table."""

from __future__ import annotations

import hashlib
import json
from typing import TypeVar

from penstock.errors import CheckpointMismatchError, CheckpointRewoundError
from penstock.spark.checkpoint import Checkpoint

Digest = TypeVar("Digest", int, str)


def input_digest(checkpoint: Checkpoint, batch_id: int) -> bytes:
    """Return a SHA-256 digest of the offsets of a micro-batch, and of the query's id."""
    text = json.dumps([checkpoint.query_id(), checkpoint.offsets(batch_id)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def has_batch(
    table: str,
    app_id: str,
    batch_id: int,
    input_digest_value: Digest,
    last: int | None,
    last_input: Digest | None,
) -> bool:
    """Return whether a micro-batch is already committed to a table.

    Parameters
    ----------
    table
        The kind of table, for messages.
    batch_input
        A digest of the micro-batch's offsets.
    last, last_input
        The newest micro-batch of the app in the table; None if it has none.

    Raises
    ------
    CheckpointRewoundError
        When the table has a later micro-batch.
    CheckpointMismatchError
        When the table has the micro-batch with other offsets.
    """
    if last is None or last < batch_id:
        return False
    if last > batch_id:
        raise CheckpointRewoundError(
            f"app {app_id!r} is at micro-batch {last} in {table} and at {batch_id} in its checkpoint: "
            "another process runs the query, or the checkpoint is not the newest. Use the newest one, or a "
            "new app_id with a new checkpoint",
            app_id=app_id,
            batch_id=batch_id,
            last=last,
        )
    if last_input != input_digest_value:
        raise CheckpointMismatchError(
            f"app {app_id!r} has committed micro-batch {batch_id} to {table} with other input: the "
            "checkpoint is an old copy or a new one. Use the newest checkpoint, or a new app_id with "
            "a new one",
            condition="CHECKPOINT_MISMATCH.OTHER_INPUT",
            app_id=app_id,
            batch_id=batch_id,
        )
    return True
