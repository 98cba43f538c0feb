"""Conversion of events to change rows in Spark's tasks, as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import SparkSession

from penstock.changes.debezium.columns import ImageReader
from penstock.errors import ChangelogContractViolationError, InvalidOptionError, SchemaMismatchError
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    COORDINATES,
    DEAD_LETTERS,
    DELETE,
    INSERT,
    POSTIMAGE,
    PREIMAGE,
    REASON,
)
from penstock.queue.store import open_store
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.internals.sessions import context_of
from penstock.spark.options import SinkOptions
from penstock.spark.queue_writers import TaskWriter
from penstock.spark.session import URL_SETTING, default_url
from penstock.store.records import ledger
from penstock.store.records.catalog import QueueRecord, queue_sink
from penstock.store.records.ledger import LedgerKey
from penstock.store.records.queue_columns import FIRST_COLUMNS

SEQUENCE = "_sequence"
OWN = (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP, SEQUENCE)


@runtime_checkable
class QueueAddress(Protocol):
    """The name of a queue, and the URL of its store."""

    @property
    def queue(self) -> str: ...

    @property
    def url(self) -> str | None: ...


@dataclass(frozen=True)
class DeadLetterQueue:
    """The queue that refused events are written to."""

    url: str = field(repr=False)
    queue: QueueRecord
    feed: str
    """The feed that the events belong to, as the ledger names it."""
    application: str
    """The application id, which identifies batch queries."""

    @classmethod
    def look_up(cls, spark: SparkSession, address: QueueAddress, feed: str) -> DeadLetterQueue:
        """Return the queue of an address, checked."""
        url = address.url or default_url(spark)
        if url is None:
            raise InvalidOptionError(
                f"the dead letter queue {address.queue!r} has no store: set its url, or set {URL_SETTING}",
                condition="INVALID_OPTION.MISSING",
                option="url",
            )
        context = context_of(spark)
        check_store_reach(url, None if context is None else str(context.master))
        record = open_store(url, verify=True).queue(address.queue).record
        if not record.columns.of(FIRST_COLUMNS).equals(DEAD_LETTERS):
            raise SchemaMismatchError(
                f"queue {address.queue!r} does not have the schema of dead letters: create it with "
                "penstock.changes.DEAD_LETTERS",
                condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
                queue=address.queue,
            )
        return cls(url, record, feed, "" if context is None else str(context.applicationId))

    def send(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Append the events that the running task has refused, exactly once if the task is repeated."""
        key, origin = self._key()
        writer = TaskWriter(SinkOptions(self.url, self.queue.name), self.queue)
        # Only micro-batches with dead letters have a ledger entry, so the previous micro-batch may have none.
        writer.append_once(LedgerKey(*key, writer.task), origin, iter(batches), new_sink=True)
        database = open_store(self.url).database
        database.run(lambda tx: ledger.prune(tx, LedgerKey(*key)), idempotent=True)

    def _key(self) -> tuple[tuple[str, str, int], str]:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is not None and batch is not None:
            return (queue_sink(self.queue), f"{query}/{self.feed}", int(batch)), query
        execution = context.getLocalProperty("spark.sql.execution.id")
        return (queue_sink(self.queue), f"{self.application}/{execution}/{self.feed}", 0), self.application


@dataclass(frozen=True)
class EventConverter:
    """Converts events to change rows; refused events go to the dead letter queue, or fail the query."""

    reader: ImageReader
    dead_letters: DeadLetterQueue | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        refused: list[pa.RecordBatch] = []
        for batch in batches:
            changes, refused_events = changes_of(batch, self.reader)
            if refused_events.num_rows and self.dead_letters is None:
                raise _refused_event(refused_events)
            if refused_events.num_rows:
                refused.append(refused_events)
            if changes.num_rows:
                yield changes
        if refused and self.dead_letters is not None:
            self.dead_letters.send(refused)


def changes_of(batch: pa.RecordBatch, reader: ImageReader) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the change rows of a batch of events, in order, and the dead letters of refused events."""
    op, reasons = batch["op"], batch[REASON]
    # Images are only read for events whose envelope is accepted.
    accepted = reasons.is_null()
    has_before = pc.and_(accepted, pc.and_(pc.is_in(op, pa.array(["u", "d"])), batch["before"].is_valid()))
    has_after = pc.and_(accepted, pc.not_equal(op, "d").fill_null(False))
    before, reasons = reader.read_image("before", batch["before"], batch["schema"], has_before, reasons)
    after, reasons = reader.read_image("after", batch["after"], batch["schema"], has_after, reasons)
    reasons = reader.columns.reasons(batch["names"], has_after, reasons)
    accepted = reasons.is_null()
    before_rows, after_rows = (
        np.flatnonzero(pc.and_(accepted, mask).to_numpy(zero_copy_only=False))
        for mask in (has_before, has_after)
    )
    # The pre-image of an event comes before its post-image.
    order = pa.array(np.argsort(np.concatenate([2 * before_rows, 2 * after_rows + 1])))
    event = pa.array(np.concatenate([before_rows, after_rows])).take(order)
    is_after = pa.array(np.repeat([False, True], [len(before_rows), len(after_rows)])).take(order)
    columns = [
        pa.concat_arrays(
            [before_values.take(pa.array(before_rows)), after_values.take(pa.array(after_rows))]
        ).take(order)
        for before_values, after_values in zip(before, after, strict=True)
    ]
    update = pc.equal(op.take(event), "u")
    change_types = pc.if_else(
        is_after, pc.if_else(update, POSTIMAGE, INSERT), pc.if_else(update, PREIMAGE, DELETE)
    )
    sequence = pc.add(pc.multiply_checked(batch["sequence"].take(event), 2), is_after.cast(pa.int64()))
    metadata = [change_types, batch["version"].take(event), batch["timestamp"].take(event), sequence]
    changes = pa.RecordBatch.from_arrays([*columns, *metadata], names=[*reader.schema.names, *OWN])
    return changes, _dead_letters(batch, reasons)


def _dead_letters(batch: pa.RecordBatch, reasons: pa.Array) -> pa.RecordBatch:
    refused = reasons.is_valid()
    columns = [reasons, *(batch[field.name] for field in list(DEAD_LETTERS)[1:])]
    arrays = [
        column.filter(refused).cast(field.type) for column, field in zip(columns, DEAD_LETTERS, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=DEAD_LETTERS)


def _refused_event(refused: pa.RecordBatch) -> ChangelogContractViolationError:
    first = refused.slice(0, 1).to_pylist()[0]
    where = ", ".join(f"{name} {first[name]}" for name in COORDINATES if first[name] is not None)
    return ChangelogContractViolationError(
        f"a Debezium event is refused{f' ({where})' if where else ''}: {first[REASON]}. Fix its source, "
        "or set dead_letters of the feed to a queue for such events",
        condition="CHANGELOG_CONTRACT_VIOLATION.UNREADABLE_EVENT",
        reason=first[REASON],
        **{name: first[name] for name in COORDINATES},
    )
