"""Commit of a micro-batch's rows to a Delta table, as the files that tasks wrote or through deltalake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.lake.parquet import align_to_schema
from penstock.lake.storage import import_deltalake
from penstock.tables.delta.copy_on_write import CopyOnWrite, Replacement
from penstock.tables.delta.data_files import DataFile, UnreadableFile
from penstock.tables.delta.direct_writes import obstacle
from penstock.tables.delta.file_commit import commit_replacement
from penstock.tables.delta.removed_rows import RemovedByStagedKey
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import StoredFiles
from penstock.tables.delta.transactions import commit_properties, committing, merge_by_keys

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass
class RowsCommit:
    """Function that commits the rows, with versions of app transactions, to a loaded table.

    It is called again with a later version of the table after a conflict with another writer.
    """

    stage: DeltaStage
    files: Sequence[DataFile]
    mode: str
    spark: SparkSession | None

    def __call__(self, table: DeltaTable, versions: Mapping[str, int]) -> None:
        # Another writer may have changed more than rows since the tasks wrote the files.
        is_direct = self.stage.indexed is not None and obstacle(table, self.mode, self.stage.layout) is None
        replacement = Replacement()
        try:
            if is_direct and self.mode == "update":
                stored = StoredFiles(self.stage.location, table)
                replacement = self._copy_on_write.replacement(stored, self._replaced_rows)
        except UnreadableFile:
            is_direct = False
        with committing(self.stage.location):
            if is_direct:
                self._commit_files(table, replacement, versions)
            else:
                self._commit_rows(table, versions)

    def _commit_files(self, table: DeltaTable, replacement: Replacement, versions: Mapping[str, int]) -> None:
        if self.mode == "update":
            commit_replacement(self.stage, table, self.files, replacement, versions)
            return
        if self.stage.is_old:
            self.stage.require_files(self.files)
        complete = self.mode == "complete"
        table.create_write_transaction(
            [file.add_action() for file in self.files],
            "overwrite" if complete else "append",
            self._delta_schema if complete else table.schema(),
            # Complete mode also has to replace rows that other writers add in the meantime.
            commit_properties=commit_properties(versions, as_loaded=complete),
        )

    @cached_property
    def _copy_on_write(self) -> CopyOnWrite:
        assert self.spark is not None
        return CopyOnWrite(self.spark, self.stage)

    @cached_property
    def _replaced_rows(self) -> RemovedByStagedKey:
        return RemovedByStagedKey(self.stage, self.files)

    @property
    def _delta_schema(self) -> Any:
        return import_deltalake("deltalake").Schema.from_arrow(self.stage.layout.schema)

    def _commit_rows(self, table: DeltaTable, versions: Mapping[str, int]) -> None:
        """Pass the rows to deltalake, which writes its own files."""
        properties = commit_properties(versions)
        rows = self.stage.reader(self.files)
        if self.mode == "update":
            merge = merge_by_keys(table, rows, self.stage.layout.keys, properties)
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
            return
        complete = self.mode == "complete"
        import_deltalake("deltalake").write_deltalake(
            table,
            rows if complete else _with_all_columns(rows, table),
            mode="overwrite" if complete else "append",
            schema_mode="overwrite" if complete else None,
            commit_properties=properties,
        )


def _with_all_columns(rows: pa.RecordBatchReader, table: DeltaTable) -> pa.RecordBatchReader:
    """Return the rows with all columns of the table, in its order; columns that the rows lack are null."""
    table_schema, row_schema = pa.schema(table.schema().to_arrow()), rows.schema
    schema = pa.schema([row_schema.field(f.name) if f.name in row_schema.names else f for f in table_schema])
    return pa.RecordBatchReader.from_batches(schema, (align_to_schema(batch, schema) for batch in rows))
