"""SQL tables as sinks of continuous queries: the task side and the driver side.

With exactly_once, tasks stage their rows, and the driver inserts the rows of an epoch in one transaction.
With at_least_once, tasks insert rows immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.continuous.connectors.ledger import LedgerCommits, LedgerSinkDriver
from penstock.continuous.connectors.protocol import Epoch, SinkEpoch, SinkWriter, WriterFactory
from penstock.continuous.connectors.staging_writer import StagingWriter
from penstock.json_text import JsonValue
from penstock.queue.store import open_store
from penstock.spark.internals.python_workers import check_store_reach
from penstock.store.staging import Attempt
from penstock.tables.columns import Layout
from penstock.tables.names import resolve
from penstock.tables.row_encoding import CHUNK_BYTES, CHUNK_ROWS, in_chunks, project_rows
from penstock.tables.sql import ddl, upsert
from penstock.tables.sql.altered_table import explaining_alterations
from penstock.tables.sql.staging import SegmentStage, drop_earlier_attempts, refusing_unstorable_text
from penstock.tables.sql.write_task import RowEncoder, insert_chunk
from penstock.tables.sql.writer import TableTarget

if TYPE_CHECKING:
    from penstock.continuous.dataframe import ContinuousFrame


@dataclass(frozen=True)
class TableWriterFactory(WriterFactory):
    """Factory of table writers, whose rows are visible immediately or staged until their epoch ends."""

    url: str = field(repr=False)
    encoder: RowEncoder
    app_id: str | None
    """The app id of staged rows; None if rows are inserted immediately."""

    def convert(self, frame: ContinuousFrame) -> ContinuousFrame:
        return project_rows(frame, self.encoder.layout)

    def open(self, task: int) -> SinkWriter:
        check_store_reach(self.url, None)
        return TableInsertWriter(self) if self.app_id is None else TableStagingWriter(self, task, self.app_id)


class TableInsertWriter(SinkWriter):
    """Writer that inserts rows immediately, in one transaction for each chunk of rows."""

    def __init__(self, sink: TableWriterFactory) -> None:
        self._encoder = sink.encoder
        self._database = open_store(sink.url).database

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        for chunk in in_chunks(iter(rows)):
            insert_chunk(self._database, self._encoder.layout, self._encoder.encode(chunk), upsert.insert)

    def end(self, epoch: int) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Do nothing: the store stays open for other writers of the process."""


class TableStagingWriter(StagingWriter):
    """Writer that stages rows until the driver commits their epoch."""

    def __init__(self, sink: TableWriterFactory, task: int, app_id: str) -> None:
        super().__init__(app_id, task, max_rows=CHUNK_ROWS, max_bytes=CHUNK_BYTES)
        self._encoder = sink.encoder
        self._database = open_store(sink.url).database

    def stage(self, rows: Sequence[pa.RecordBatch], attempt: Attempt, staged_parts: int) -> int:
        encoder, already_staged = self._encoder, staged_parts
        stage = SegmentStage.of(encoder.layout, encoder.encoded_schema, attempt.app_id, attempt.batch_id)
        for chunk in in_chunks(iter(rows)):
            staged_parts += stage.stage_chunk(
                self._database, attempt, encoder.encode(chunk), staged_parts, durable=False
            )
        return staged_parts - already_staged

    def close(self) -> None:
        """Do nothing: staged rows that are never published are deleted with the next epoch."""


@dataclass
class TableSinkDriver(LedgerSinkDriver):
    """Driver side of a table sink that appends rows."""

    name: str
    url: str = field(repr=False)
    prepare: Callable[[StructType], Layout]
    """Creates the table, or checks that an existing one accepts rows of a schema."""
    commits: LedgerCommits
    exactly_once: bool
    _encoder: RowEncoder | None = field(default=None, init=False)

    @property
    def description(self) -> str:
        return f"table {in_quotes(self.name)}"

    def check(self, schema: StructType) -> None:
        self._encoder = RowEncoder.of(self.prepare(schema))

    def delete_staged(self) -> None:
        if self.exactly_once:
            name = self._checked_encoder.layout.name.ledger_name
            drop_earlier_attempts(open_store(self.url).database, name, self.commits.app_id)

    def writer_factory(self) -> TableWriterFactory:
        """Check that the table still exists, and return the factory of its writers."""
        layout = self._checked_encoder.layout
        open_store(self.url).database.run(lambda tx: ddl.require_compatible(tx, layout), write=False)
        return TableWriterFactory(
            self.url, self._checked_encoder, self.commits.app_id if self.exactly_once else None
        )

    def newest(self) -> SinkEpoch:
        database = open_store(self.url).database
        name = database.run(lambda tx: resolve(tx, self.name), write=False)
        return self.commits.newest(name.ledger_name)

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        layout, columns = self._checked_encoder.layout, self._checked_encoder.encoded_schema
        if not self.exactly_once:
            self.commits.record(layout.name.ledger_name, epoch, offset)
            return
        stage = SegmentStage.of(layout, columns, self.commits.app_id, epoch.number)
        database = open_store(self.url).database
        with explaining_alterations(database, layout), refusing_unstorable_text():
            self.commits.commit(TableTarget(layout, self.name, "append", stage), epoch, offset)

    @property
    def _checked_encoder(self) -> RowEncoder:
        assert self._encoder is not None, "check() runs first"
        return self._encoder
