"""The app that a consumer belongs to: a stateful query with another checkpoint would resume it without state.

The first commit binds the consumer to its app: in the consumer's registration, or beside the marks of the
sink's store if that is another one.
"""

from __future__ import annotations

import hashlib
import json

from penstock.errors import ConsumerBoundError
from penstock.store.database import Transaction


def mark_name(store: str, queue: str, consumer: str | None, ledger_name: str) -> str:
    """Return the name of a sink's marks for a consumer in the store with this uuid."""
    # A digest, since index entries must not be long.
    return hashlib.sha256(json.dumps([store, queue, consumer, ledger_name]).encode()).hexdigest()


def marked_apps(tx: Transaction, name: str) -> set[str]:
    """Return the apps whose marks have a name."""
    return {row.app_id for row in tx.all("read_marks", source=name)}


def bound_error(queue: str, consumer: str | None, bound: str, app_id: str | None) -> ConsumerBoundError:
    """Return the error of a stateful query of an app, or of a new one, whose consumer belongs to another."""
    return ConsumerBoundError(
        f"consumer {consumer!r} on queue {queue!r} belongs to the checkpoint of app {bound!r}; a stateful "
        "query with a new checkpoint would resume there without its state. Use that checkpoint, or give the "
        "query a consumer of its own; to start with empty state nevertheless, set allowNewCheckpoint=true "
        "of the sink (allow_new_checkpoint=True of a TableSink)",
        consumer=consumer,
        bound=bound,
        app_id=app_id,
    )
