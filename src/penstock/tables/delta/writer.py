"""Driver side of a Delta table: the ``foreachBatch`` function of a query."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import CommitRefusedError, InvalidInputError, InvalidOptionError, PenstockError
from penstock.lake.storage import DeltaPlace, library
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.schemas import quote_column
from penstock.tables.delta.schema import DeltaLayout, match_table, rows_layout
from penstock.tables.delta.stage import REPORT, DeltaStage, DeltaStageTask, delete_abandoned
from penstock.tables.delta.transactions import AppTransaction, commit_properties, merge_by_keys
from penstock.tables.row_checks import first_repeated_key, rows_with_one_key, shown_key

if TYPE_CHECKING:
    from deltalake import DeltaTable

_ATTEMPTS = 10


def delta_writer(
    frame: DataFrame,
    place: DeltaPlace,
    keys: Sequence[str],
    output_mode: str,
    guarantee: str,
    location: str,
    app_id: str | None,
) -> DeltaWriter:
    """Create or check the table, and return the ``foreachBatch`` function."""
    layout = accepted_rows(frame.schema, keys, output_mode)
    table = place.find()
    if table is None:
        layout = match_table(place, layout, place.create(layout.schema))
    elif output_mode != "complete":
        layout = match_table(place, layout, table)
    delete_abandoned(place)
    return DeltaWriter(place, layout, output_mode, guarantee, location, app_id)


def accepted_rows(schema: StructType, keys: Sequence[str], output_mode: str) -> DeltaLayout:
    """Return the layout of rows that a Delta table can take."""
    if output_mode == "append" and keys:
        raise InvalidOptionError(
            "a Delta table has no unique keys, so output mode append cannot refuse an existing key: leave "
            "keys out, or use output mode update, which replaces the row with the same key",
            condition="INVALID_OPTION.CONFLICT",
            option="keys",
        )
    layout = rows_layout(schema, keys)
    if output_mode == "update":
        refuse_backticks(layout)
    return layout


def refuse_backticks(layout: DeltaLayout) -> None:
    """Refuse column names that deltalake cannot merge."""
    ticked = [name for name in layout.schema.names if "`" in name]
    if ticked:
        raise InvalidInputError(
            f"deltalake cannot merge a column with a backtick in its name, as {in_quotes(ticked[0])} has: "
            "rename it",
            condition="INVALID_INPUT.COLUMN_NAME",
            columns=ticked,
        )


@dataclass(frozen=True)
class DeltaWriter:
    """The ``foreachBatch`` function: tasks stage rows in one action, then one commit adds them."""

    place: DeltaPlace
    layout: DeltaLayout
    mode: str
    guarantee: str
    location: str
    """The location of the checkpoint."""
    app_id: str | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        try:
            self._write(frame, batch_id)
        except PenstockError as error:
            raise error.with_traceback(None) from None

    def _write(self, frame: DataFrame, batch_id: int) -> None:
        transaction = self._transaction(batch_id)
        if transaction is not None and transaction.committed(self.place.open()):
            # Spark requires that the state is committed.
            frame.write.format("noop").mode("overwrite").save()
            # The process that committed it may have died before this.
            DeltaStage(self.place, self.layout, transaction.app_id, batch_id).drop()
            return
        app_id = f"run:{uuid.uuid4()}" if transaction is None else transaction.app_id
        stage = DeltaStage(self.place, self.layout, app_id, batch_id)
        try:
            reports = self._staging(frame, stage).collect()
            if reports and transaction is not None:
                Checkpoint(self.location).require_query(report.query for report in reports)
            files = [report.file for report in reports if report.file is not None]
            stage.require_files(files)
            self._check(stage, files)
            self._commit(stage, files, transaction)
        finally:
            stage.drop()

    def _staging(self, frame: DataFrame, stage: DeltaStage) -> DataFrame:
        """Return the query whose tasks stage the rows and report their files."""
        return _numbered(frame).mapInArrow(DeltaStageTask(stage), REPORT)

    def _transaction(self, batch_id: int) -> AppTransaction | None:
        if self.guarantee == "at_least_once":
            return None
        return AppTransaction.of(Checkpoint(self.location), batch_id, self.app_id)

    def _commit(self, stage: DeltaStage, files: Sequence[str], transaction: AppTransaction | None) -> None:
        if not files and self.mode != "complete":
            return
        versions = {} if transaction is None else transaction.versions
        conflict = library("deltalake.exceptions").CommitFailedError
        last_conflict = ""
        for _ in range(_ATTEMPTS):
            table = self.place.open()
            if transaction is not None and transaction.committed(table):
                return
            try:
                with self.place.translating_errors(beside=(conflict,)):
                    self._publish(table, stage, files, versions)
                return
            except conflict as error:
                # Another writer was faster, maybe another run of this query.
                last_conflict = self.place.message(error)
            except PenstockError:
                # Another run of this query may have committed it, and deleted the staged files.
                if transaction is None or not transaction.committed(self.place.open()):
                    raise
                return
        raise CommitRefusedError(
            f"other writers changed the Delta table {self.place.shown} at each of the {_ATTEMPTS} times that "
            f"batch {stage.batch_id} was committed ({last_conflict}). Nothing of the batch is visible: "
            "restart the query, it repeats the micro-batch",
            condition="COMMIT_REFUSED.TABLE_CHANGED",
            table=self.place.shown,
            batch_id=stage.batch_id,
        )

    def _publish(
        self, table: DeltaTable, stage: DeltaStage, files: Sequence[str], versions: Mapping[str, int]
    ) -> None:
        """Commit the staged rows, with versions of app transactions."""
        properties = commit_properties(versions)
        rows = stage.reader(files)
        if self.mode == "update":
            merge = merge_by_keys(table, rows, self.layout.keys, properties)
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
            return
        complete = self.mode == "complete"
        library("deltalake").write_deltalake(
            table,
            rows if complete else _with_all_columns(rows, table),
            mode="overwrite" if complete else "append",
            schema_mode="overwrite" if complete else None,
            commit_properties=properties,
        )

    def _check(self, stage: DeltaStage, files: Sequence[str]) -> None:
        """Refuse staged rows that have the same key."""
        names = list(self.layout.keys)
        if not names:
            return
        repeated = first_repeated_key(stage.columns(files, names))
        if repeated is not None:
            raise rows_with_one_key(shown_key(repeated), f"the Delta table {self.place.shown}")


def _numbered(frame: DataFrame) -> DataFrame:
    """Rename the columns to c0, c1 and so on: mapInArrow does not take every name."""
    return frame.select(*(F.col(quote_column(name)).alias(f"c{n}") for n, name in enumerate(frame.columns)))


def _with_all_columns(rows: pa.RecordBatchReader, table: DeltaTable) -> pa.RecordBatchReader:
    """Return the rows with all columns of the table, in its order, null where the rows do not have them."""
    existing, own = pa.schema(table.schema().to_arrow()), rows.schema
    schema = pa.schema([own.field(f.name) if f.name in own.names else f for f in existing])
    return pa.RecordBatchReader.from_batches(schema, (with_columns(batch, schema) for batch in rows))


def with_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of a schema, null where it does not have them."""
    arrays = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
