"""Driver side of a SQL table: the ``foreachBatch`` function of a query, and the commit of a micro-batch."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, Row

from penstock.commit.micro_batch import BatchCommit, Target
from penstock.commit.protocol import commit_batch, record_batch
from penstock.errors import CommitRefusedError
from penstock.queue.store import Store, open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.error_boundary import without_traceback
from penstock.store.database import Transaction
from penstock.store.records.ledger import LedgerKey
from penstock.tables.columns import Layout
from penstock.tables.row_encoding import project_rows
from penstock.tables.sql import ddl, upsert
from penstock.tables.sql.altered_table import explaining_alterations
from penstock.tables.sql.apply import apply_changes
from penstock.tables.sql.staging import PostgresStage, SegmentStage, Stage, StagedRows, TaskWriter
from penstock.tables.sql.write_task import REPORT, IdempotentInsert, RowEncoder, StageTask

CHANGES = "changes"
"""The write mode for change rows; their output mode is append."""

# The store's connections disable these plans, since its own statements use indexes; statements for a table
# read all rows.
_ENABLE_ALL_PLANS = "; ".join(
    f"set local enable_{what} = on" for what in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")
)


@dataclass(frozen=True)
class _TargetTable(Target[int]):
    """A SQL table as the target of a commit."""

    layout: Layout
    given_name: str
    """The table's name as the user wrote it."""

    @property
    def name(self) -> str:
        return self.given_name

    @property
    def ledger_name(self) -> str:
        return self.layout.name.ledger_name

    def __str__(self) -> str:
        return f"table {self.given_name!r}"


@dataclass(frozen=True)
class TableTarget(_TargetTable):
    """Commit target that inserts, upserts or applies staged rows, or replaces all rows with them."""

    mode: str
    stage: Stage

    def prepare(self, tx: Transaction, batch: BatchCommit[int]) -> None:
        self.stage.prepare(tx, batch.attempts)

    def publish(self, tx: Transaction, batch: BatchCommit[int]) -> int:
        written = self._publish(tx, batch.attempts)
        self.stage.clear(tx)
        return written

    def write(self, tx: Transaction, attempts: Mapping[str, int]) -> int:
        """Make the rows of the acknowledged attempts visible, without recording the commit.

        The rows stay staged in PostgreSQL: if the reply to the commit is lost, they are written again, since
        nothing shows whether they are visible.
        """
        self.stage.prepare(tx, attempts)
        written = self._publish(tx, attempts)
        self.stage.unload(tx)
        return written

    def _publish(self, tx: Transaction, attempts: Mapping[str, int]) -> int:
        if tx.dialect == "postgres":
            tx.execute(_ENABLE_ALL_PLANS)
        return self._write_rows(tx, self.stage.take(tx, attempts))

    def _write_rows(self, tx: Transaction, source: StagedRows) -> int:
        if self.mode == "complete":
            self._recreate_when_changed(tx)
            return upsert.replace(tx, self.layout, source)
        ddl.lock_table(tx, self.layout.name)
        if self.mode == CHANGES:
            return apply_changes(tx, self.layout, source)
        if self.mode == "update":
            return upsert.upsert(tx, self.layout, source)
        return upsert.insert(tx, self.layout, source)

    def _recreate_when_changed(self, tx: Transaction) -> None:
        """Create the table, or recreate it with other columns; only for output mode complete."""
        existing = ddl.find_table(tx, self.layout.name)
        if existing is not None and tx.dialect == "postgres":
            # Serialize writers, so that each replaces all rows of the previous one; readers do not wait.
            tx.execute(f"lock table {self.layout.name.sql} in share row exclusive mode")
            existing = ddl.find_table(tx, self.layout.name)
        if existing is not None and ddl.differences(self.layout, existing, complete=True):
            ddl.drop_table(tx, self.layout)
            existing = None
        if existing is None:
            ddl.create_table(tx, self.layout)

    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:
        self.stage.drop(tx)


@dataclass(frozen=True)
class IdempotentTarget(_TargetTable):
    """Commit target for rows that the tasks have already written with idempotent inserts."""

    def publish(self, tx: Transaction, batch: BatchCommit[int]) -> int:
        return batch.rows

    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:
        """Do nothing: repeated rows were skipped when they were inserted."""


@dataclass(frozen=True)
class TableWriter:
    """The ``foreachBatch`` function: tasks write rows in one action, then one transaction commits them."""

    url: str = field(repr=False)
    layout: Layout
    given_name: str
    mode: str
    guarantee: str
    checkpoint_location: str = field(repr=False)
    """The location of the checkpoint."""
    app_id: str | None = None
    rebind: bool = False
    new_sink: bool = False

    @without_traceback
    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        store = open_store(self.url)
        rows = project_rows(frame, self.layout)
        encoder = RowEncoder.of(self.layout)
        writer = self._task_writer(store, encoder.encoded_schema, batch_id)
        task = StageTask(self.url, encoder, writer)
        # Run the job even if the micro-batch was committed before, since Spark has to commit its state.
        reports = rows.mapInArrow(task, REPORT).collect()
        staged = {report.attempt: report.staged for report in reports if report.attempt is not None}
        if not isinstance(writer, Stage):
            self._commit(store, IdempotentTarget(self.layout, self.given_name), batch_id, reports, {})
            return
        target = TableTarget(self.layout, self.given_name, self.mode, writer)
        with explaining_alterations(store.database, self.layout):
            if self.guarantee == "at_least_once":
                store.database.run(lambda tx: target.write(tx, staged), idempotent=True)
                store.database.run(writer.drop, idempotent=True)
                self._record_in_ledger(store, target, batch_id, reports)
            else:
                self._commit(store, target, batch_id, reports, staged)

    def _record_in_ledger(
        self, store: Store, target: Target[int], batch_id: int, reports: Sequence[Row]
    ) -> None:
        # A micro-batch that the optimizer finds to be empty has no tasks.
        query = reports[0].query if reports else self._query_id()
        if query is not None:
            key = LedgerKey(target.ledger_name, self.app_id or query, batch_id)
            rows = sum(report.rows for report in reports)
            record_batch(store.database, key, query, rows, new_sink=self.new_sink)

    def _query_id(self) -> str | None:
        """Return the query's id; None if this process cannot read the checkpoint."""
        with suppress(CommitRefusedError):
            return Checkpoint(self.checkpoint_location).query_id()
        return None

    def _commit(
        self,
        store: Store,
        target: Target[int],
        batch_id: int,
        reports: Sequence[Row],
        staged: dict[str, int],
    ) -> None:
        checkpoint = Checkpoint(self.checkpoint_location)
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
            # This process may be unable to read the checkpoint.
            return f"run:{uuid.uuid4()}"
        return self.app_id or Checkpoint(self.checkpoint_location).query_id()
