"""What a streaming query calls with each micro-batch of a Delta table, on the driver."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import CommitRefused, InvalidInput, InvalidOption, PenstockError, TableRefused
from penstock.lake.delta_location import DeltaPlace, library
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.schemas import quote_column
from penstock.spark.sink.micro_batches import require_same_query
from penstock.tables.delta.schema import DeltaLayout, fitting, rows_layout
from penstock.tables.delta.stage import REPORT, DeltaStage, DeltaTask, sweep
from penstock.tables.delta.transactions import AppTransaction, merging, properties

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
    """See to the table, which is made where there is none, and make what the query calls with each micro-batch.

    Raises
    ------
    InvalidOption
        For keys in output mode append.
    SchemaMismatch, UnsupportedType, InvalidInput
        When the table cannot take the rows.
    StoreUnavailable, MissingDependency
    """
    layout = accepted_rows(frame.schema, keys, output_mode)
    table = place.find()
    if table is None:
        layout = create(place, layout)
    elif output_mode != "complete":
        layout = fitting(place, layout, table)
    sweep(place)
    return DeltaWriter(place, layout, output_mode, guarantee, location, app_id)


def accepted_rows(schema: StructType, keys: Sequence[str], output_mode: str) -> DeltaLayout:
    """The layout of rows that a Delta table can take at all.

    Raises
    ------
    InvalidOption
        For keys in output mode append.
    UnsupportedType, InvalidInput
    """
    if output_mode == "append" and keys:
        raise InvalidOption(
            "a Delta table has no unique keys, so output mode append cannot refuse a key that is there: leave keys out, or use output "
            "mode update, which puts rows in the place of those with their key",
            option="keys",
        )
    layout = rows_layout(schema, keys)
    if output_mode == "update":
        refuse_backticks(layout)
    return layout


def refuse_backticks(layout: DeltaLayout) -> None:
    """Refuse columns that cannot be merged."""
    ticked = [name for name in layout.schema.names if "`" in name]
    if ticked:
        raise InvalidInput(
            f"deltalake merges no column with a backtick in its name, as in {in_quotes(ticked[0])}: rename it",
            columns=ticked,
        )


def create(place: DeltaPlace, layout: DeltaLayout) -> DeltaLayout:
    """Make the table; its layout."""
    deltalake = library("deltalake")
    with place.plainly():
        # Somebody else may make it at the same moment.
        deltalake.DeltaTable.create(
            place.path,
            deltalake.Schema.from_arrow(layout.schema),
            mode="ignore",
            storage_options=place.options or None,
        )
    return fitting(place, layout, place.open())


@dataclass(frozen=True)
class DeltaWriter:
    """For ``foreachBatch``: one action, in which the tasks stage the rows; then one commit of the table."""

    place: DeltaPlace
    layout: DeltaLayout
    mode: str
    guarantee: str
    location: str
    """Of the checkpoint."""
    app_id: str | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a micro-batch."""
        try:
            self._write(frame, batch_id)
        except PenstockError as error:
            raise error.with_traceback(None) from None

    def _write(self, frame: DataFrame, batch_id: int) -> None:
        transaction = self._transaction(batch_id)
        if transaction is not None and transaction.committed(self.place.open()):
            # Spark wants to see that the state was committed.
            frame.write.format("noop").mode("overwrite").save()
            # Whoever committed it may have died before this.
            DeltaStage(self.place, self.layout, transaction.app_id, batch_id).drop()
            return
        app_id = f"run:{uuid.uuid4()}" if transaction is None else transaction.app_id
        stage = DeltaStage(self.place, self.layout, app_id, batch_id)
        try:
            told = self._staging(frame, stage).collect()
            if told and transaction is not None:
                require_same_query(Checkpoint(self.location), (row.query for row in told))
            files = [row.file for row in told if row.file is not None]
            stage.require_there(files)
            self._check(stage, files)
            self._commit(stage, files, transaction)
        finally:
            stage.drop()

    def _staging(self, frame: DataFrame, stage: DeltaStage) -> DataFrame:
        """What has the tasks stage the rows, and tells what they have staged."""
        return _numbered(frame).mapInArrow(DeltaTask(stage), REPORT)

    def _transaction(self, batch_id: int) -> AppTransaction | None:
        if self.guarantee == "at_least_once":
            return None
        return AppTransaction.of(Checkpoint(self.location), batch_id, self.app_id)

    def _commit(self, stage: DeltaStage, files: Sequence[str], transaction: AppTransaction | None) -> None:
        if not files and self.mode != "complete":
            return
        lost = library("deltalake.exceptions").CommitFailedError
        told = ""
        for _ in range(_ATTEMPTS):
            table = self.place.open()
            if transaction is not None and transaction.committed(table):
                return
            try:
                with self.place.plainly(beside=(lost,)):
                    self._publish(table, stage, files, transaction)
                return
            except lost as error:
                # Another writer came first, maybe another run of this query.
                told = self.place.told(error)
            except PenstockError:
                # Another run of this query may have committed it, and dropped what was staged.
                if transaction is None or not transaction.committed(self.place.open()):
                    raise
                return
        raise CommitRefused(
            f"the Delta table {self.place.shown} was changed by others each time that batch {stage.batch_id} was to be committed "
            f"({told}), {_ATTEMPTS} times; nothing of it is visible. Restart the query, it repeats the micro-batch",
            table=self.place.shown,
            batch_id=stage.batch_id,
        )

    def _publish(
        self, table: Any, stage: DeltaStage, files: Sequence[str], transaction: AppTransaction | None
    ) -> None:
        carried = properties({} if transaction is None else transaction.versions)
        rows = stage.reader(files)
        if self.mode == "update":
            merge = merging(table, rows, self.layout.keys, carried)
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
            return
        complete = self.mode == "complete"
        library("deltalake").write_deltalake(
            table,
            rows if complete else _widened(rows, table),
            mode="overwrite" if complete else "append",
            schema_mode="overwrite" if complete else None,
            commit_properties=carried,
        )

    def _check(self, stage: DeltaStage, files: Sequence[str]) -> None:
        """Refuse staged rows that cannot all be written."""
        names = list(self.layout.keys)
        if not names:
            return
        keys = stage.columns(files, names)
        counted = keys.group_by(names).aggregate([([], "count_all")])
        twice = counted.filter(pc.greater(counted["count_all"], 1))
        if not twice.num_rows:
            return
        first = twice.select(names).slice(0, 1).to_pylist()[0]
        shown = ", ".join(f"{in_quotes(name)} = {in_quotes(value)}" for name, value in first.items())
        raise TableRefused(
            f"a micro-batch for the Delta table {self.place.shown} has several rows with the key {shown}, and nothing says which of them "
            "is the last one: aggregate by the key, or keep one row of each",
            condition="TABLE_REFUSED.DUPLICATE_KEYS",
            table=self.place.shown,
        )


def _numbered(frame: DataFrame) -> DataFrame:
    """The rows with the columns c0, c1 and so on: mapInArrow does not take every name."""
    return frame.select(*(F.col(quote_column(name)).alias(f"c{n}") for n, name in enumerate(frame.columns)))


def _widened(rows: pa.RecordBatchReader, table: Any) -> pa.RecordBatchReader:
    """The rows with all columns of the table, in its order; those that they have not are null."""
    there = pa.schema(table.schema().to_arrow())
    given = rows.schema
    wanted = pa.schema([given.field(f.name) if f.name in given.names else f for f in there])

    def widened() -> object:
        for batch in rows:
            arrays = [
                batch.column(f.name) if f.name in given.names else pa.nulls(batch.num_rows, f.type)
                for f in wanted
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=wanted)

    return pa.RecordBatchReader.from_batches(wanted, widened())
