"""Queries that write rows to a Delta table, without Spark: their tasks run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from penstock.lake.storage import DeltaLocation
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.schema import DeltaLayout, match_table
from penstock.tables.delta.stage import DeltaStage, DeltaStageTask
from penstock.tables.delta.transactions import AppTransaction
from penstock.tables.delta.writer import DeltaWriter

Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class LocalSpark:
    """Runs a function of ``mapInArrow`` on a range of numbers, in parts."""

    sparkContext = SimpleNamespace(defaultParallelism=2)  # noqa: N815 - Spark's name

    def range(self, start: int, end: int, step: int, parts: int) -> LocalSpark:
        self.numbers, self.parts = list(range(start, end, step)), parts
        return self

    def mapInArrow(self, task: Task, schema: str) -> LocalSpark:  # noqa: N802 - Spark's name
        self.task = task
        return self

    def collect(self) -> list[Any]:
        size = -(-len(self.numbers) // self.parts)
        found = []
        for start in range(0, len(self.numbers), size):
            part = pa.record_batch([pa.array(self.numbers[start : start + size])], names=["id"])
            for batch in self.task(iter([part])):
                found += [SimpleNamespace(**row) for row in batch.to_pylist()]
        return found


class RowQuery:
    """A query with an output mode; each micro-batch has a part for each task."""

    def __init__(
        self,
        location: Path | DeltaLocation,
        schema: pa.Schema,
        mode: str,
        keys: Sequence[str] = (),
        app_id: str = "app",
    ) -> None:
        self.location = location if isinstance(location, DeltaLocation) else DeltaLocation(str(location))
        self.app_id, self.mode = app_id, mode
        table = self.location.find() or self.location.create(schema)
        layout = DeltaLayout(schema, tuple(keys))
        if mode != "complete":
            layout = match_table(self.location, layout, table)
        self.writer = DeltaWriter(self.location, layout, mode, "exactly_once", "", app_id)

    def write(self, batch_id: int, *parts: pa.Table) -> None:
        table, transaction = self.writer._open(), AppTransaction(self.app_id, batch_id, 7)
        if self.writer._has_batch(table, transaction):
            return
        stage, files = self.stage(batch_id, *parts)
        stage.require_files(files)
        self.commit(stage, files, transaction)

    def stage(self, batch_id: int, *parts: pa.Table) -> tuple[DeltaStage, list[DataFile]]:
        indexed = self.writer._indexed_columns(self.location.open())
        stage = DeltaStage(self.location, self.writer.layout, self.app_id, batch_id, indexed)
        task = DeltaStageTask(stage)
        names = [f"c{n}" for n in range(len(self.writer.layout.schema))]
        written = [
            task.write_rows(iter(part.rename_columns(names).to_batches(max_chunksize=3))) for part in parts
        ]
        return stage, [file for file in written if file is not None]

    def commit(
        self, stage: DeltaStage, files: list[DataFile], transaction: AppTransaction | None = None
    ) -> None:
        spark = cast(SparkSession, LocalSpark())
        self.writer._commit(
            stage, files, transaction or AppTransaction(self.app_id, stage.batch_id, 7), spark
        )
        stage.delete_staged()

    def table(self) -> DeltaTable:
        return self.location.open()

    def rows(self) -> list[tuple[Any, ...]]:
        found = self.table().to_pyarrow_table().to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)

    def own_files(self) -> list[str]:
        """Return the table's files that tasks wrote into its folder."""
        return [Path(uri).name for uri in self.table().file_uris() if uri.endswith(".zstd.parquet")]
