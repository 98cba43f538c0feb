"""Checks of a query's consumers before the query takes them over and fences their owner.

The query, or its first commit, makes the same checks, but too late for the fenced owner. It repeats them,
because another query may start in between, and it reports all other problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from penstock.commit.binding import bound_error, mark_name, marked_apps
from penstock.commit.offsets import QueueOffset
from penstock.errors import CommitRefusedError, PenstockError
from penstock.queue.store import connect
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.connectors import OwnedConsumer, Sink
from penstock.spark.internals.plan_text import keeps_state
from penstock.store.database import Transaction
from penstock.store.records.consumers import Registration


@dataclass(frozen=True)
class RegisteredConsumer:
    """A consumer of a query, as it is registered before the query starts."""

    owned: OwnedConsumer
    store: str
    """The uuid of its store."""
    registration: Registration


def look_up_consumers(consumers: Sequence[OwnedConsumer]) -> list[RegisteredConsumer]:
    """Look up consumers; those that cannot be read are left out."""
    readable = []
    for owned in consumers:
        with suppress(PenstockError), connect(owned.url, create=False) as store:
            registration = store.consumer(owned.consumer).registration(owned.queue)
            readable.append(RegisteredConsumer(owned, store.uuid, registration))
    return readable


def require_same_consumers(location: str, consumers: Sequence[RegisteredConsumer]) -> None:
    """Refuse a checkpoint that is older than a seek or a new registration of its consumers.

    Raises
    ------
    CheckpointMismatchError
        Names the field of the offset that differs.
    """
    last_offsets = _last_offsets(location) if consumers else {}
    for consumer in consumers:
        registration = consumer.registration
        offset = last_offsets.get((registration.queue, registration.consumer))
        if offset is not None:
            offset.require(consumer.store, registration.queue, registration.consumer, registration.generation)


def _last_offsets(location: str) -> dict[tuple[str, str | None], QueueOffset]:
    """Return the last offset of each consumer in a checkpoint; empty if it cannot be read."""
    with suppress(CommitRefusedError):
        checkpoint = Checkpoint(location)
        ranges = checkpoint.ranges(checkpoint.last_planned())
        return {(offset.queue, offset.consumer): offset for offset in ranges}
    return {}


def require_own_state(
    spark: SparkSession,
    sink: Sink,
    frame: DataFrame,
    location: str,
    consumers: Sequence[RegisteredConsumer],
) -> None:
    """Refuse a stateful query whose consumers belong to another checkpoint.

    Raises
    ------
    ConsumerBoundError
        Names the app of the other checkpoint.
    """
    binding = sink.binding(spark) if consumers else None
    if binding is None or binding.allow_new_checkpoint:
        return
    checkpoint = Checkpoint(location)
    is_new = checkpoint.read("metadata") is None
    app_id = binding.app_id or (None if is_new else checkpoint.query_id())
    for consumer in consumers:
        other_apps = _bound_apps(spark, sink, consumer) - {app_id}
        if other_apps and keeps_state(frame):
            registration = consumer.registration
            raise bound_error(registration.queue, registration.consumer, min(other_apps), app_id)


def _bound_apps(spark: SparkSession, sink: Sink, consumer: RegisteredConsumer) -> set[str]:
    """Return the apps that a consumer is bound to, in its own store or in the sink's."""
    registration = consumer.registration
    if consumer.owned.moved_by_sink:
        return set() if registration.app_id is None else {registration.app_id}

    def find_marked_apps(tx: Transaction) -> set[str]:
        sink_name = str(sink.ledger_name(tx))
        name = mark_name(consumer.store, registration.queue, registration.consumer, sink_name)
        return marked_apps(tx, name)

    with suppress(PenstockError), connect(str(sink.store_url(spark)), create=False) as store:
        return store.database.run(find_marked_apps, write=False)
    return set()
