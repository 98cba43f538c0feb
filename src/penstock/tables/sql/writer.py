"""Driver side of a SQL table: the ``foreachBatch`` function of a query."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, Row

from penstock.commit.micro_batch import Target
from penstock.commit.protocol import commit_batch, note_batch
from penstock.errors import CommitRefusedError, PenstockError
from penstock.queue.store import Store, open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.store.records.ledger import LedgerKey
from penstock.tables.columns import Layout
from penstock.tables.row_encoding import project_rows
from penstock.tables.sql.staging import PostgresStage, SegmentStage, Stage, TaskWriter
from penstock.tables.sql.target import TableTarget, WrittenTarget
from penstock.tables.sql.write_task import REPORT, IdempotentInsert, RowEncoder, StageTask


@dataclass(frozen=True)
class TableWriter:
    """The ``foreachBatch`` function: tasks stage or insert the rows in one action, then one transaction
    commits them.
    """

    url: str = field(repr=False)
    layout: Layout
    called: str
    mode: str
    guarantee: str
    location: str = field(repr=False)
    """The location of the checkpoint."""
    app_id: str | None = None
    rebind: bool = False
    new_sink: bool = False

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a micro-batch."""
        try:
            self._write(frame, batch_id)
        except PenstockError as error:
            raise error.with_traceback(None) from None

    def _write(self, frame: DataFrame, batch_id: int) -> None:
        store = open_store(self.url)
        rows = project_rows(frame, self.layout)
        encoder = RowEncoder.of(self.layout)
        writer = self._task_writer(store, encoder.columns, batch_id)
        task = StageTask(self.url, encoder, writer)
        # Also when the micro-batch was committed before: Spark requires that its state is committed.
        reports = rows.mapInArrow(task, REPORT).collect()
        staged = {report.attempt: report.staged for report in reports if report.attempt is not None}
        if not isinstance(writer, Stage):
            self._commit(store, WrittenTarget(self.layout, self.called), batch_id, reports, {})
            return
        target = TableTarget(self.layout, self.called, self.mode, writer)
        if self.guarantee == "at_least_once":
            store.database.run(lambda tx: target.write(tx, staged), idempotent=True)
            self._note(store, target, batch_id, reports)
        else:
            self._commit(store, target, batch_id, reports, staged)

    def _note(self, store: Store, target: Target[int], batch_id: int, reports: Sequence[Row]) -> None:
        # A micro-batch that the optimizer has found empty has no tasks.
        query = reports[0].query if reports else self._query_id()
        if query is not None:
            key = LedgerKey(target.ledger_name, self.app_id or query, batch_id)
            rows = sum(report.rows for report in reports)
            note_batch(store.database, key, query, rows, new_sink=self.new_sink)

    def _query_id(self) -> str | None:
        """Return the query's id; None if this process cannot read the checkpoint."""
        with suppress(CommitRefusedError):
            return Checkpoint(self.location).query_id()
        return None

    def _commit(
        self,
        store: Store,
        target: Target[int],
        batch_id: int,
        reports: Sequence[Row],
        staged: dict[str, int],
    ) -> None:
        checkpoint = Checkpoint(self.location)
        if reports:
            checkpoint.require_query(report.query for report in reports)
        batch = checkpoint.batch_commit(
            target,
            batch_id,
            rows=sum(report.rows for report in reports),
            app_id=self.app_id,
            attempts=staged,
            rebind=self.rebind,
            new_sink=self.new_sink,
        )
        commit_batch(store.database, batch)

    def _task_writer(self, store: Store, columns: pa.Schema, batch_id: int) -> TaskWriter:
        if self.guarantee == "idempotent":
            return IdempotentInsert(columns, self.layout)
        app_id = self._app_id()
        if self.layout.dialect == "postgres":
            return PostgresStage.open(store.database, self.layout, columns, app_id, batch_id)
        return SegmentStage.of(self.layout, columns, app_id, batch_id)

    def _app_id(self) -> str:
        if self.guarantee == "at_least_once":
            # The checkpoint may be unreadable from here.
            return f"run:{uuid.uuid4()}"
        return self.app_id or Checkpoint(self.location).query_id()
