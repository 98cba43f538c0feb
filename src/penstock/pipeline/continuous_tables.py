"""What the tasks of a continuous query do with rows for a SQL table."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.continuous.connectors.ledger import Commits
from penstock.continuous.connectors.protocol import SinkDriver, SinkEpoch
from penstock.continuous.driver.epochs import Epoch
from penstock.continuous.task.writer import Sink, SinkTask
from penstock.queue.open_stores import open_store
from penstock.spark.store_reach import check_reach
from penstock.store.staging import Attempt
from penstock.tables.chunks import CHUNK_BYTES, CHUNK_ROWS, chunked
from penstock.tables.names import resolve
from penstock.tables.row_encoding import project_rows
from penstock.tables.sink import TableSink
from penstock.tables.sql import ddl, upsert
from penstock.tables.sql.insert import insert_chunk
from penstock.tables.sql.loading import refusing_nul_characters
from penstock.tables.sql.staging import SegmentStage, drop_earlier_attempts
from penstock.tables.sql.target import TableTarget
from penstock.tables.sql.write_task import RowEncoder


@dataclass(frozen=True)
class TableWrites(Sink):
    """Rows into a table: seen when they are written, or staged for the end of their epoch."""

    url: str = field(repr=False)
    encoder: RowEncoder
    app_id: str | None
    """Of rows that are staged; None for rows that are seen at once."""

    def shaped(self, frame: Any) -> Any:
        return project_rows(frame, self.encoder.layout)

    def open(self, task: int) -> SinkTask:
        check_reach(self.url, None)
        return TableInserts(self) if self.app_id is None else TableStaging(self, task, self.app_id)


class TableInserts(SinkTask):
    """Each write is a transaction, or several where there are many rows."""

    def __init__(self, sink: TableWrites) -> None:
        self._encoder = sink.encoder
        self._database = open_store(sink.url).database

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        for chunk in chunked(iter(rows)):
            insert_chunk(self._database, self._encoder.layout, self._encoder.encode(chunk), upsert.insert)

    def end(self, epoch: int) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing: the process keeps its store open."""


class TableStaging(SinkTask):
    """Rows are gathered, and staged when they are many or their epoch ends: nobody sees them any earlier for it."""

    def __init__(self, sink: TableWrites, task: int, app_id: str) -> None:
        self._encoder, self._task, self._app_id = sink.encoder, task, app_id
        self._attempt = str(uuid.uuid4())
        self._database = open_store(sink.url).database
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._staged = 0

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self._held += rows
        self._rows += sum(batch.num_rows for batch in rows)
        self._bytes += sum(batch.nbytes for batch in rows)
        if self._rows >= CHUNK_ROWS or self._bytes >= CHUNK_BYTES:
            self._stage(epoch)

    def _stage(self, epoch: int) -> None:
        encoder = self._encoder
        stage = SegmentStage.of(encoder.layout, encoder.columns, self._app_id, epoch)
        attempt = Attempt(self._app_id, epoch, self._task, self._attempt)
        for chunk in chunked(iter(self._held)):
            self._staged += stage.add(self._database, attempt, encoder.encode(chunk), self._staged)
        self._held, self._rows, self._bytes = [], 0, 0

    def end(self, epoch: int) -> dict[str, int]:
        self._stage(epoch)
        staged, self._staged = self._staged, 0
        return {self._attempt: staged} if staged else {}

    def close(self) -> None:
        """Nothing: what is staged and never promoted goes with the next epoch."""


# ---- table_driver: A SQL table as the driver of a continuous query sees it: looked at before each run, and one transaction for each epoch.


@dataclass
class TableSinkDriver(SinkDriver):
    """A table to add rows to."""

    table: TableSink
    url: str = field(repr=False)
    query_id: str
    exactly_once: bool
    _encoder: RowEncoder | None = field(default=None, init=False)

    @property
    def description(self) -> str:
        return f"table {in_quotes(self.table.name)}"

    @property
    def at_once(self) -> bool:
        return not self.exactly_once

    def check(self, schema: StructType) -> None:
        self._encoder = RowEncoder.of(self.table.prepared(self.url, schema, "append", self.table.keys))

    def clear(self) -> None:
        if self.exactly_once:
            name = self._known.layout.name.ledger_name
            drop_earlier_attempts(open_store(self.url).database, name, self._commits.app_id)

    def sink(self) -> TableWrites:
        """See whether the table is still there."""
        layout = self._known.layout
        open_store(self.url).database.run(lambda tx: ddl.require_compatible(tx, layout), write=False)
        return TableWrites(self.url, self._known, self._commits.app_id if self.exactly_once else None)

    def newest(self) -> SinkEpoch:
        database = open_store(self.url).database
        name = database.run(lambda tx: resolve(tx, self.table.name), write=False)
        return self._commits.newest(name.ledger_name)

    @property
    def may_be_new(self) -> bool:
        return self.table.allow_new_sink

    def commit(self, sink: Sink, epoch: Epoch, offset: Any) -> None:
        if not self.exactly_once:
            self._commits.note(self._known.layout.name.ledger_name, epoch, offset)
            return
        with refusing_nul_characters():
            self._commits.commit(self._target(epoch.number), epoch, offset)

    @property
    def _known(self) -> RowEncoder:
        assert self._encoder is not None, "check() runs first"
        return self._encoder

    @property
    def _commits(self) -> Commits:
        table = self.table
        return Commits(
            self.url,
            self.query_id,
            table.app_id or self.query_id,
            table.allow_new_checkpoint,
            table.allow_new_sink,
        )

    def _target(self, number: int) -> TableTarget:
        known = self._known
        stage = SegmentStage.of(known.layout, known.columns, self._commits.app_id, number)
        return TableTarget(known.layout, self.table.name, "append", stage)
