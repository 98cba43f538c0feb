"""The queue of dead letters: events that are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from penstock.changes.dead_letters import DEAD_LETTERS
from penstock.errors import InvalidOption, SchemaMismatch
from penstock.queue.open_stores import open_store
from penstock.spark.options import SinkOptions
from penstock.spark.session_store import URL_SETTING, check_reach, default_url
from penstock.spark.sink.write_task import TaskWriter
from penstock.store.records import ledger
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.ledger import LedgerKey, queue_sink


@runtime_checkable
class QueueAddress(Protocol):
    """A queue and its store."""

    @property
    def queue(self) -> str: ...

    @property
    def url(self) -> str | None: ...


@dataclass(frozen=True)
class Letters:
    """The queue that refused events are written to."""

    url: str = field(repr=False)
    queue: QueueRecord
    feed: str
    """The feed of the query that the events belong to."""
    application: str
    """The application id, which identifies batch queries."""

    @classmethod
    def to(cls, spark: SparkSession, address: QueueAddress, feed: str) -> Letters:
        """Look up the queue."""
        url = address.url or default_url(spark)
        if url is None:
            raise InvalidOption(
                f"the dead letter queue {address.queue!r} needs its store: give it a url, or set {URL_SETTING}",
                option="url",
            )
        context = getattr(spark, "_sc", None)
        check_reach(url, None if context is None else str(context.master))
        record = open_store(url, verify=True).queue(address.queue).record
        if not record.first_columns(record.first_width).equals(DEAD_LETTERS):
            raise SchemaMismatch(
                f"queue {address.queue!r} has another schema than dead letters: create it with the schema "
                "penstock.changes.DEAD_LETTERS",
                queue=address.queue,
            )
        return cls(url, record, feed, "" if context is None else str(context.applicationId))

    def send(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Append the events that the running task has refused, exactly once if the task is repeated."""
        key, origin = self._key()
        writer = TaskWriter(SinkOptions(self.url, self.queue.name), self.queue)
        # Only micro-batches with dead letters have an entry, so the previous one may have none.
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
