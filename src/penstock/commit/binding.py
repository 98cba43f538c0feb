"""Bind a consumer to an app, so that no stateful query with another checkpoint resumes without the state.

The first commit binds the consumer to its app. The binding is in the consumer's registration, or, if the sink
is in a different store, next to the marks there.
"""

from __future__ import annotations

import hashlib
import json

from penstock.errors import ConsumerBoundError
from penstock.store.database import Transaction


def mark_name(store: str, queue: str, consumer: str | None, ledger_name: str) -> str:
    """Return the name of a sink's marks for a consumer of the store with the UUID ``store``."""
    # Use a digest, since long values would not fit into index entries.
    return hashlib.sha256(json.dumps([store, queue, consumer, ledger_name]).encode()).hexdigest()


def marked_apps(tx: Transaction, name: str) -> set[str]:
    """Return the apps that have marks with this name."""
    return {row.app_id for row in tx.all("read_marks", source=name)}


def bound_error(queue: str, consumer: str | None, bound: str, app_id: str | None) -> ConsumerBoundError:
    """Return the error for a stateful query whose consumer belongs to another app."""
    return ConsumerBoundError(
        f"consumer {consumer!r} on queue {queue!r} belongs to the checkpoint of app {bound!r}. A stateful "
        "query with a new checkpoint would resume there without its state. Use that checkpoint, or give the "
        "query its own consumer. To start with empty state anyway, set the sink's option "
        "allowNewCheckpoint=true (for a TableSink, allow_new_checkpoint=True)",
        consumer=consumer,
        bound=bound,
        app_id=app_id,
    )
