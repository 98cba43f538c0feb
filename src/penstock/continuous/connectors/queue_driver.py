"""Queues as source and sink of continuous queries, driver side.

The source owns and moves a consumer; the sink promotes staged rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.commit.micro_batch import QueueTarget
from penstock.commit.offsets import QueueOffset, pad
from penstock.commit.owner import Owner, follow, level
from penstock.continuous.connectors.ledger import Commits
from penstock.continuous.connectors.protocol import (
    Positions,
    SinkDriver,
    SinkEpoch,
    SourceDriver,
    WriterFactory,
)
from penstock.continuous.connectors.queue_tasks import QueueReaderFactory, QueueWriterFactory
from penstock.continuous.driver.epochs import Epoch
from penstock.json_text import JsonValue
from penstock.queue.checks import refuse_feed
from penstock.queue.store import Store, open_store
from penstock.spark.options import SinkOptions, SourceOptions
from penstock.spark.schemas import check_writable, source_schema
from penstock.spark.source.ranges import parse_offset, skip_trimmed, start_positions
from penstock.store.database import Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord, queue_sink


@dataclass
class QueueSourceDriver(SourceDriver):
    """Driver side of a queue that is read, with or without a consumer."""

    options: SourceOptions = field(repr=False)
    _owner: Owner | None = field(default=None, init=False)
    _schema: pa.Schema | None = field(default=None, init=False)
    _pinned: QueueRecord | None = field(default=None, init=False)
    """The queue that the current run reads: another one may have its name by the time an epoch is planned."""

    @property
    def description(self) -> str:
        return f"queue {in_quotes(self.options.queue)}"

    @property
    def schema(self) -> pa.Schema:
        """The schema of its rows: the columns that the queue had when the query began, for all its runs."""
        if self._schema is None:
            self._schema = source_schema(self._look_up().schema, self.options.service_columns)
        return self._schema

    def own(self) -> None:
        self._pinned = None
        if self.options.consumer is not None:
            if self._owner is not None:
                # A driver that was suspended and repeats its run does not take the consumer back from its
                # successor.
                self._owner.require()
            self._release_owner()
            self._owner = Owner(
                self._store().database,
                self.options.consumer,
                self.options.queue,
                moved_by_sink=self.options.moved_by_sink,
            )

    def start(self, logged: JsonValue) -> Positions:
        store, self._pinned = self._store(), self._look_up()
        queue = self._pinned

        def work(tx: Transaction) -> Positions:
            partitions = catalog.partitions(tx, queue)
            if logged is None:
                return dict(enumerate(start_positions(tx, self.options, queue, partitions)))
            offset = parse_offset(logged)
            offset.require(store.uuid, queue.name, self.options.consumer, self._generation(queue))
            offset.require_reached([part.next_index for part in partitions])
            offsets = pad(offset.end, len(partitions))
            # Tasks skip lost rows: the next epoch begins where the last one has ended.
            skip_trimmed(self.options, partitions, offsets)
            return dict(enumerate(offsets))

        return store.database.run(work, write=False)

    def ends(self) -> Positions:
        queue = self._queue()
        partitions = self._store().database.run(lambda tx: catalog.partitions(tx, queue), write=False)
        return {part.partition: part.next_index for part in partitions}

    def readers(self) -> QueueReaderFactory:
        return QueueReaderFactory(
            self.options.url, self._queue(), self.schema, self.options.fail_on_data_loss
        )

    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        offset = QueueOffset(
            store=self._store().uuid,
            queue=self.options.queue,
            consumer=self.options.consumer,
            generation=self._generation(self._queue()),
            epoch=0 if self._owner is None else self._owner.epoch,
            start=_listed(start, len(end)),
            end=_listed(end, len(end)),
            moved_by_sink=self._owner is not None and self._owner.moved_by_sink,
        )
        if self._owner is not None:
            self._owner.plan(offset, last_times)
        return offset.to_dict()

    def follow(self, offset: JsonValue) -> None:
        parsed = QueueOffset.of(offset)
        if self.options.consumer is not None and parsed is not None:
            follow(self._store().database, parsed)

    def logged(self, offset: JsonValue) -> bool:
        return self._owner is not None and self._owner.observe(parse_offset(offset))[2]

    def require_at(self, start: Positions) -> None:
        if self._owner is not None:
            self._owner.require_at(_listed(start, len(start)))

    def release(self, ended: JsonValue) -> None:
        self._release_owner()
        if self.options.consumer is not None and ended is not None:
            level(
                self._store().database,
                parse_offset(ended),
                moved_by_sink=self.options.moved_by_sink,
            )

    def _release_owner(self) -> None:
        if self._owner is not None:
            self._owner.release()
            self._owner = None

    def _store(self) -> Store:
        return open_store(self.options.url)

    def _queue(self) -> QueueRecord:
        return self._pinned or self._look_up()

    def _look_up(self) -> QueueRecord:
        return self._store().database.run(lambda tx: catalog.find_queue(tx, self.options.queue), write=False)

    def _generation(self, queue: QueueRecord) -> int:
        return queue.generation if self._owner is None else self._owner.generation


def _listed(positions: Positions, length: int) -> tuple[int, ...]:
    return tuple(positions.get(partition, 0) for partition in range(length))


@dataclass
class QueueSinkDriver(SinkDriver):
    """Driver side of a queue that is written to."""

    options: SinkOptions = field(repr=False)
    query_id: str
    exactly_once: bool

    @property
    def description(self) -> str:
        return f"queue {in_quotes(self.options.queue)}"

    @property
    def at_once(self) -> bool:
        return not self.exactly_once

    def check(self, schema: StructType) -> None:
        queue = self._queue()
        refuse_feed(queue)
        check_writable(schema, queue.schema, queue.name)

    def writers(self) -> QueueWriterFactory:
        app_id = self._commits.app_id if self.exactly_once else None
        return QueueWriterFactory(self.options.url, self._queue(), app_id, self.options.max_rows_per_write)

    def newest(self) -> SinkEpoch:
        return self._commits.newest(queue_sink(self._queue()))

    @property
    def may_be_new(self) -> bool:
        return self.options.allow_new_sink

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        assert isinstance(writers, QueueWriterFactory), "`writers` has made it"
        # The queue as the tasks placed the rows in it: the store refuses them where it has got more
        # partitions since.
        queue = writers.queue
        if not self.exactly_once:
            self._commits.note(queue_sink(queue), epoch, offset)
            return
        appended = self._commits.commit(QueueTarget(queue), epoch, offset)
        open_store(self.options.url).tend(queue, () if appended is None else appended.crowded)

    @cached_property
    def _commits(self) -> Commits:
        options = self.options
        return Commits(
            options.url,
            self.query_id,
            options.app_id or self.query_id,
            rebind=options.allow_new_checkpoint,
            new_sink=options.allow_new_sink,
        )

    def _queue(self) -> QueueRecord:
        return open_store(self.options.url).database.run(
            lambda tx: catalog.find_queue(tx, self.options.queue), write=False
        )
