"""Driver side of an Iceberg table: the ``foreachBatch`` function of a query."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.table import Table
from pyspark.sql import DataFrame

from penstock.errors import TableRefusedError
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.error_boundary import without_traceback
from penstock.spark.schemas import numbered_columns
from penstock.tables.iceberg.attempts import Attempt, delete_abandoned, delete_pending_file_of
from penstock.tables.iceberg.commit import Commit, Target
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.keys import find_repeated_key
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.partitioning import require_partitioning
from penstock.tables.iceberg.reports import from_report
from penstock.tables.iceberg.rewriting import ReplacedRows, Rewriter
from penstock.tables.iceberg.schema import RowLayout, TableLayout, table_schema
from penstock.tables.iceberg.stage import REPORT_DDL, StageTask
from penstock.tables.iceberg.transactions import MicroBatch
from penstock.tables.row_checks import duplicate_keys_error, key_for_messages

_FORMAT_VERSION = 2


def iceberg_writer(
    location: IcebergLocation,
    rows: RowLayout,
    output_mode: str,
    guarantee: str,
    checkpoint_location: str,
    app_id: str | None,
) -> IcebergWriter:
    """Create the table or check an existing one, and return the ``foreachBatch`` function."""
    table = location.find() or location.create(table_schema(rows))
    require_writable(location, table)
    writer = IcebergWriter(Target(location, rows, output_mode), guarantee, checkpoint_location, app_id)
    writer.target.layout(table.transaction())
    delete_abandoned(location, table)
    return writer


def require_writable(location: IcebergLocation, table: Table) -> None:
    """Refuse tables that pyiceberg cannot write, or cannot write without losing metadata."""
    version = table.format_version
    if version != _FORMAT_VERSION:
        advice = (
            "upgrade it, such as with table.transaction().upgrade_table_version(2).commit_transaction()"
            if version < _FORMAT_VERSION
            else "pyiceberg does not write the row lineage that format 3 has: use a table of format 2"
        )
        raise TableRefusedError(
            f"the Iceberg table {location.label} has format {version}, and only format 2 can be written: "
            f"{advice}",
            condition="TABLE_REFUSED.FORMAT_VERSION",
            table=location.label,
            found=version,
        )
    require_partitioning(location.label, table.metadata)


@dataclass(frozen=True)
class IcebergWriter:
    """``foreachBatch`` function: tasks write data files in one action, then one commit adds them."""

    target: Target
    guarantee: str
    checkpoint_location: str
    """The location of the checkpoint."""
    app_id: str | None = None

    @without_traceback
    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        location, batch = self.target.location, self._micro_batch(batch_id)
        table = location.open()
        self.target.refuse_rollback(table, batch)
        committed = None if batch is None else batch.committed(table)
        if batch is not None and committed is not None:
            # Run the query even so, since Spark has to commit its state.
            frame.write.format("noop").mode("overwrite").save()
            # The process that committed the micro-batch may have died before cleaning up.
            delete_pending_file_of(location, table, batch.app_id, committed.attempt)
            return
        require_writable(location, table)
        transaction = table.transaction()
        layout = self.target.layout(transaction)
        attempt = Attempt.new(f"run:{uuid.uuid4()}" if batch is None else batch.app_id)
        files = self.target.files(table, transaction, attempt.token)
        attempt.write_pending_file(location, table)
        reports = self._staging_query(frame, layout, files).collect()
        if reports and batch is not None:
            Checkpoint(self.checkpoint_location).require_query(report.query for report in reports)
        commit = self._new_commit(frame, layout, files, reports, batch_id, batch)
        try:
            self._check_keys(frame, files, commit)
            commit.run()
        finally:
            commit.delete_unused()
        if not (commit.tasks_retried or any(report.attempt for report in reports)):
            # Otherwise, keep the pending file, since a task that died may have left a file.
            attempt.delete_pending_file(location, table)

    def _staging_query(self, frame: DataFrame, layout: TableLayout, files: FileTarget) -> DataFrame:
        """Return the query whose tasks write the rows and report their files."""
        return numbered_columns(frame).mapInArrow(StageTask.of(self.target.rows, layout, files), REPORT_DDL)

    def _new_commit(
        self,
        frame: DataFrame,
        layout: TableLayout,
        files: FileTarget,
        reports: Sequence[Any],
        batch_id: int,
        batch: MicroBatch | None,
    ) -> Commit:
        """Return the commit of the files that tasks have reported."""
        staged_files = [file for report in reports for file in from_report(files, report.files)]
        rewriter = None
        if self.target.mode == "update":
            edit = ReplacedRows(layout.key_schema, [file.file_path for file in staged_files])
            rewriter = Rewriter(frame.sparkSession, edit)
        return Commit(self.target, layout, staged_files, files.io, files.token, batch_id, batch, rewriter)

    def _micro_batch(self, batch_id: int) -> MicroBatch | None:
        if self.guarantee == "at_least_once":
            return None
        return MicroBatch.of(Checkpoint(self.checkpoint_location), batch_id, self.app_id)

    def _check_keys(self, frame: DataFrame, files: FileTarget, commit: Commit) -> None:
        """Refuse rows that have the same key."""
        keys = self.target.rows.keys
        if not keys or not commit.staged_files:
            return
        types = [frame.schema[key].dataType for key in keys]
        location = self.target.location
        repeated = find_repeated_key(
            frame.sparkSession, location, files, commit.layout, types, commit.staged_files
        )
        if repeated is not None:
            raise duplicate_keys_error(key_for_messages(repeated), f"the Iceberg table {location.label}")
