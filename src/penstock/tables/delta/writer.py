"""Driver side of a Delta table: the ``foreachBatch`` function of a query."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import CommitRefusedError, InvalidInputError, PenstockError, TableRefusedError
from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.error_boundary import without_traceback
from penstock.spark.schemas import numbered_columns
from penstock.tables.delta.data_files import REPORT_DDL, DataFile, files_from_reports
from penstock.tables.delta.direct_writes import obstacle
from penstock.tables.delta.repeated_keys import find_repeated_key
from penstock.tables.delta.restores import RequiredCommits
from penstock.tables.delta.rows_commit import RowsCommit
from penstock.tables.delta.schema import (
    DeltaLayout,
    match_table,
    partition_columns,
    require_partitioning,
    rows_layout,
)
from penstock.tables.delta.small_files import merge_small_files
from penstock.tables.delta.stage import DeltaStage, DeltaStageTask, delete_abandoned
from penstock.tables.delta.statistics import indexed_columns
from penstock.tables.delta.transactions import AppTransaction
from penstock.tables.row_checks import duplicate_keys_error, key_for_messages

if TYPE_CHECKING:
    from deltalake import DeltaTable

log = logging.getLogger("penstock.tables")
_ATTEMPTS = 10
PublishFunction = Callable[["DeltaTable", Mapping[str, int]], None]
"""A function that commits a micro-batch to a loaded table, with versions of app transactions."""


def delta_writer(
    location: DeltaLocation,
    layout: DeltaLayout,
    output_mode: str,
    guarantee: str,
    checkpoint_location: str,
    app_id: str | None,
) -> DeltaWriter:
    """Create the table or check an existing one, and return the ``foreachBatch`` function."""
    table = location.find()
    if table is None:
        layout = match_table(location, layout, location.create(layout.schema))
    else:
        require_partitioning(location, table)
        layout = layout if output_mode == "complete" else match_table(location, layout, table)
    delete_abandoned(location)
    return DeltaWriter(location, layout, output_mode, guarantee, checkpoint_location, app_id)


def row_layout(schema: StructType, keys: Sequence[str], output_mode: str) -> DeltaLayout:
    """Return the layout of rows; refuse rows that Delta tables do not support."""
    layout = rows_layout(schema, keys)
    if output_mode == "update":
        refuse_backticks(layout.schema.names)
    return layout


def table_gone_error(location: DeltaLocation) -> TableRefusedError:
    """Return the error for a table that is not the one that the query began with."""
    return TableRefusedError(
        f"the Delta table {location.label} was dropped, renamed or recreated while the query ran: restore "
        "it, or start the query again, which creates a missing table and does not write earlier rows again",
        condition="TABLE_REFUSED.TABLE_GONE",
        table=location.label,
    )


def refuse_backticks(names: Sequence[str]) -> None:
    """Refuse column names that deltalake cannot merge."""
    with_backticks = [name for name in names if "`" in name]
    if with_backticks:
        raise InvalidInputError(
            f"deltalake cannot merge a column with a backtick in its name, as {in_quotes(with_backticks[0])} "
            "has: rename it",
            condition="INVALID_INPUT.COLUMN_NAME",
            columns=with_backticks,
        )


@dataclass(frozen=True)
class DeltaWriter:
    """``foreachBatch`` function: tasks write files, then one commit adds them to the table."""

    location: DeltaLocation
    layout: DeltaLayout
    mode: str
    guarantee: str
    checkpoint_location: str
    """The location of the checkpoint."""
    app_id: str | None = None

    @cached_property
    def _required_commits(self) -> RequiredCommits:
        return RequiredCommits(self.location)

    @without_traceback
    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        transaction = self._transaction(batch_id)
        table = self._open()
        app_id = f"run:{uuid.uuid4()}" if transaction is None else transaction.app_id
        stage = DeltaStage(
            self.location,
            self.layout,
            app_id,
            batch_id,
            self._indexed_columns(table),
            partitions=partition_columns(table),
        )
        if self._has_batch(table, transaction):
            # Run the query even so, since Spark has to commit its state.
            frame.write.format("noop").mode("overwrite").save()
            # The process that committed the micro-batch may have died before cleaning up.
            stage.delete_staged()
            return
        self._require_accepted(table)
        try:
            files = self._write_files(frame, stage, transaction)
            self._commit(stage, files, transaction, frame.sparkSession)
        finally:
            stage.delete_staged()

    def _open(self) -> DeltaTable:
        """Load the table that the query began with."""
        try:
            return self.location.open()
        except PenstockError:
            if self.location.find() is not None:
                raise
            raise table_gone_error(self.location) from None

    def _require_accepted(self, table: DeltaTable) -> None:
        """Refuse a table that another program has altered, so that it does not accept the rows any more.

        deltalake would drop the values of missing columns in a merge.
        """
        require_partitioning(self.location, table)
        if self.mode != "complete":
            match_table(self.location, self._table_layout, table)

    @property
    def _table_layout(self) -> DeltaLayout:
        """The columns that the table must have."""
        return self.layout

    def _write_files(
        self, frame: DataFrame, stage: DeltaStage, transaction: AppTransaction | None
    ) -> list[DataFile]:
        """Have tasks write the rows, and return the files to commit."""
        reports = self._staging_query(frame, stage).collect()
        files = files_from_reports(reports)
        try:
            if reports and transaction is not None:
                Checkpoint(self.checkpoint_location).require_query(report.query for report in reports)
            stage.require_files(files)
            self._check_keys(frame.sparkSession, stage, files)
        except PenstockError:
            stage.delete_uncommitted(files)
            raise
        return merge_small_files(frame.sparkSession, stage, files)

    def _staging_query(self, frame: DataFrame, stage: DeltaStage) -> DataFrame:
        """Return the query whose tasks write the rows and report their files."""
        return numbered_columns(frame).mapInArrow(DeltaStageTask(stage), REPORT_DDL)

    def _indexed_columns(self, table: DeltaTable) -> tuple[str, ...] | None:
        """Return the data file columns with statistics; None if the rows have to pass through deltalake."""
        reason = obstacle(table, self.mode, self.layout)
        if reason is not None:
            log.debug(
                "rows of the Delta table %s pass through the driver, since it %s",
                self.location.label,
                reason,
                extra={
                    "action": "rows_through_driver",
                    "table": self.location.label,
                    "reason": reason,
                },
            )
            return None
        schema = self.layout.schema if self.mode == "complete" else pa.schema(table.schema().to_arrow())
        return indexed_columns(schema, table.metadata().configuration)

    def _transaction(self, batch_id: int) -> AppTransaction | None:
        if self.guarantee == "at_least_once":
            return None
        return AppTransaction.of(Checkpoint(self.checkpoint_location), batch_id, self.app_id)

    def _has_batch(self, table: DeltaTable, transaction: AppTransaction | None) -> bool:
        """Whether a table has the micro-batch; refuse a table that has lost earlier commits of the query."""
        self._required_commits.require(table, self._required_transactions(table, transaction))
        return transaction is not None and transaction.is_committed(self.location, table)

    def _required_transactions(self, table: DeltaTable, transaction: AppTransaction | None) -> list[str]:
        """Return the app transactions whose commits the table must still have."""
        # In mode complete, the result replaces all rows, so earlier commits do not matter.
        return [] if transaction is None or self.mode == "complete" else [transaction.name]

    def _commit(
        self,
        stage: DeltaStage,
        files: Sequence[DataFile],
        transaction: AppTransaction | None,
        spark: SparkSession | None = None,
    ) -> None:
        if not files and self.mode != "complete":
            return
        publish = self._publisher(stage, files, spark)
        versions = {} if transaction is None else transaction.versions
        conflict = import_deltalake("deltalake.exceptions").CommitFailedError
        last_conflict, versions_seen = "", set[int]()
        for attempt in range(_ATTEMPTS):
            table = self._open()
            if self._has_batch(table, transaction):
                return
            self._require_accepted(table)
            versions_seen.add(table.version())
            try:
                if attempt:
                    # The other writer may have recreated the table.
                    stage.require_files(files)
                publish(table, versions)
                return
            except conflict as error:
                # Another writer was faster, maybe another run of this query.
                last_conflict = self.location.message(error)
            except PenstockError:
                # Another run of this query may have committed it, and deleted the staged files.
                if transaction is None or not transaction.is_committed(self.location, self.location.open()):
                    raise
                return
        if versions_seen == {self.location.open().version()}:
            raise self._refused_error(last_conflict)
        raise self._overtaken_error(stage.batch_id, last_conflict)

    def _refused_error(self, reason: str) -> TableRefusedError:
        """Return the error for commits that failed although no other writer has committed."""
        return TableRefusedError(
            f"the Delta table {self.location.label} refused the commit: {reason}",
            condition="TABLE_REFUSED.DELTA",
            table=self.location.label,
        )

    def _overtaken_error(self, batch_id: int, last_conflict: str) -> CommitRefusedError:
        return CommitRefusedError(
            f"other writers changed the Delta table {self.location.label} at each of the {_ATTEMPTS} times "
            f"that batch {batch_id} was committed ({last_conflict}). Nothing of the batch is visible: "
            "restart the query, it repeats the micro-batch",
            condition="COMMIT_REFUSED.TABLE_CHANGED",
            table=self.location.label,
            batch_id=batch_id,
        )

    def _publisher(
        self, stage: DeltaStage, files: Sequence[DataFile], spark: SparkSession | None
    ) -> PublishFunction:
        """Return the function that commits the rows; each attempt calls it with the reloaded table."""
        return RowsCommit(stage, files, self.mode, spark)

    def _check_keys(self, spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> None:
        """Refuse rows that have the same key."""
        if not self.layout.keys:
            return
        repeated = find_repeated_key(spark, stage, files)
        if repeated is not None:
            raise duplicate_keys_error(key_for_messages(repeated), f"the Delta table {self.location.label}")
