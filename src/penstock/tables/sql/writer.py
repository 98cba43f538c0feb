"""What a streaming query calls with each micro-batch of a table, on the driver."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, Row

from penstock.commit.micro_batch import Target
from penstock.commit.protocol import commit_batch, note_batch
from penstock.errors import PenstockError
from penstock.queue.open_stores import open_store
from penstock.queue.store import Store
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.sink.micro_batches import batch_commit, require_same_query
from penstock.store.records.ledger import LedgerKey
from penstock.tables.columns import Layout
from penstock.tables.shaping import shaped
from penstock.tables.sql.insert import Insert
from penstock.tables.sql.postgres_stage import PostgresStage
from penstock.tables.sql.stage import SegmentStage, Stage, Writes
from penstock.tables.sql.target import TableTarget, WrittenTarget
from penstock.tables.sql.write_task import REPORT, StageTask, Taking


@dataclass(frozen=True)
class TableWriter:
    """For ``foreachBatch``: one action, in which the tasks stage the rows, or put them in; then one transaction."""

    url: str = field(repr=False)
    layout: Layout
    called: str
    mode: str
    guarantee: str
    location: str = field(repr=False)
    """Of the checkpoint."""
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
        rows = shaped(frame, self.layout)
        taking = Taking.of(self.layout)
        writes = self._writes(store, taking.columns, batch_id)
        task = StageTask(self.url, taking, writes)
        # Also when the micro-batch is in already: Spark wants to see that the state was committed.
        told = rows.mapInArrow(task, REPORT).collect()
        staged = {row.attempt: row.staged for row in told if row.attempt is not None}
        if not isinstance(writes, Stage):
            self._commit(store, WrittenTarget(self.layout, self.called), batch_id, told, {})
            return
        target = TableTarget(self.layout, self.called, self.mode, writes)
        if self.guarantee == "at_least_once":
            store.database.run(lambda tx: target.write(tx, staged), idempotent=True)
            self._note(store, target, batch_id, told)
        else:
            self._commit(store, target, batch_id, told, staged)

    def _note(self, store: Store, target: Target[int], batch_id: int, told: Sequence[Row]) -> None:
        if told:
            key = LedgerKey(target.ledger_name, self.app_id or told[0].query, batch_id)
            rows = sum(row.rows for row in told)
            note_batch(store.database, key, told[0].query, rows, new_sink=self.new_sink)

    def _commit(
        self, store: Store, target: Target[int], batch_id: int, told: Sequence[Row], staged: dict[str, int]
    ) -> None:
        checkpoint = Checkpoint(self.location)
        if told:
            require_same_query(checkpoint, (row.query for row in told))
        batch = batch_commit(
            target,
            checkpoint,
            batch_id,
            rows=sum(row.rows for row in told),
            app_id=self.app_id,
            attempts=staged,
            rebind=self.rebind,
            new_sink=self.new_sink,
        )
        commit_batch(store.database, store.uuid, batch)

    def _writes(self, store: Store, columns: pa.Schema, batch_id: int) -> Writes:
        if self.guarantee == "idempotent":
            return Insert(columns, self.layout)
        app_id = self._app()
        if self.layout.dialect == "postgres":
            return PostgresStage.open(store.database, self.layout, columns, app_id, batch_id)
        return SegmentStage.of(self.layout, columns, app_id, batch_id)

    def _app(self) -> str:
        if self.guarantee == "at_least_once":
            # Its checkpoint may be out of reach.
            return f"run:{uuid.uuid4()}"
        return self.app_id or Checkpoint(self.location).query_id()
