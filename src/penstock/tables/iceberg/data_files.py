"""Parquet data files of an Iceberg table, which tasks write to the table's data location.

No snapshot refers to a file until the driver commits it. Its name has the token of the attempt that wrote it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionKey
from pyiceberg.schema import Schema, sanitize_column_names
from pyiceberg.table import TableProperties
from pyiceberg.table.locations import LocationProvider, load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from penstock.arguments import in_quotes
from penstock.arrow.arrays import grouped
from penstock.errors import PenstockError, SchemaMismatchError
from penstock.lake.catalogs import task_io
from penstock.tables.iceberg.location import translate_error
from penstock.tables.iceberg.partitioning import partition_rows

_ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 1 << 20, 64 << 20
_MAX_OPEN_FILES = 64
"""The maximum number of partitions for which a task has open files at the same time."""


@dataclass(frozen=True)
class FileTarget:
    """The location and credentials with which the tasks of one attempt write files."""

    table: str
    """The table's name in messages."""
    io: FileIO = field(repr=False)
    metadata: TableMetadata = field(repr=False)
    """The part of the table's metadata that tasks need, without snapshots."""
    token: str

    @classmethod
    def of(cls, table: str, io: FileIO, metadata: TableMetadata, token: str) -> FileTarget:
        cleared: dict[str, Any] = {"snapshots": [], "snapshot_log": [], "metadata_log": [], "statistics": []}
        cleared |= {"refs": {}, "current_snapshot_id": None}
        return cls(table, task_io(io), metadata.model_copy(update=cleared), token)

    @cached_property
    def schema(self) -> Schema:
        """The columns of the files, by their names in the files."""
        return sanitize_column_names(self.metadata.schema())

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        return schema_to_pyarrow(self.schema)

    @cached_property
    def named_schema(self) -> pa.Schema:
        """The same schema with the table's unsanitized names, also of nested fields."""
        return schema_to_pyarrow(self.metadata.schema())

    @cached_property
    def locations(self) -> LocationProvider:
        return load_location_provider(self.metadata.location, self.metadata.properties)

    def new_path(self, key: PartitionKey | None = None) -> str:
        """Return the location of a new file, whose name has the token of the attempt."""
        return self.locations.new_data_location(f"{self.token}-{uuid.uuid4().hex}.parquet", key)

    def int_property(self, name: str, default: int) -> int:
        return int(self.metadata.properties.get(name, default))


class DataFileWriter:
    """Writer of a task's rows to data files: one for each partition, and a new one at the target size."""

    def __init__(self, target: FileTarget) -> None:
        self._target = target
        self._spec = target.metadata.spec()
        self._open_files: dict[Record | None, _OpenFile] = {}
        self._closed_files: list[DataFile] = []
        self._target_size = target.int_property(
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES, TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT
        )

    def write(self, rows: pa.Table) -> None:
        """Write rows in the target's Arrow schema."""
        if self._spec.is_unpartitioned():
            self._write(None, rows)
            return
        for key, part in partition_rows(self._spec, self._target.schema, rows):
            self._write(key, part)

    def close(self) -> list[DataFile]:
        """Close all files, and return them as ``DataFile`` entries for a snapshot."""
        while self._open_files:
            self._finish(next(iter(self._open_files)))
        return self._closed_files

    def discard(self) -> None:
        """Delete the written files, which have not been reported; after errors, a later clean-up does so."""
        for file in self._open_files.values():
            file.abandon()
        for path in [
            *(file.path for file in self._open_files.values()),
            *(file.file_path for file in self._closed_files),
        ]:
            with suppress(Exception):
                self._target.io.delete(path)

    def _write(self, key: PartitionKey | None, rows: pa.Table) -> None:
        partition = key.partition if key is not None else None
        # Reinsert the file, so that the least recently written one is closed first.
        file = self._open_files.pop(partition, None)
        if file is None:
            if len(self._open_files) >= _MAX_OPEN_FILES:
                self._finish(next(iter(self._open_files)))
            file = _OpenFile(self._target, key)
        self._open_files[partition] = file
        file.write(rows)
        if file.size >= self._target_size:
            self._finish(partition)

    def _finish(self, partition: Record | None) -> None:
        self._closed_files.append(self._open_files[partition].close())
        del self._open_files[partition]


class _OpenFile:
    def __init__(self, target: FileTarget, key: PartitionKey | None) -> None:
        self._target, self._key = target, key
        self.path = target.new_path(key)
        self._out = target.io.new_output(self.path).create(overwrite=True)
        try:
            self._writer = pq.ParquetWriter(
                self._out, target.arrow_schema, store_decimal_as_integer=True, **_compression(target)
            )
        except BaseException:
            self._out.close()
            raise

    @property
    def size(self) -> int:
        return int(self._out.tell())

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)

    def close(self) -> DataFile:
        target = self._target
        self._writer.close()
        size = self.size
        self._out.close()
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=self._writer.writer.metadata,
            stats_columns=compute_statistics_plan(target.schema, target.metadata.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(target.schema),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=self.path,
            file_format=FileFormat.PARQUET,
            partition=Record() if self._key is None else self._key.partition,
            file_size_in_bytes=size,
            # The rows are unsorted, whatever sort order the table has.
            sort_order_id=None,
            spec_id=target.metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **_without_bounds(statistics.to_serialized_dict(), self._columns_without_bounds()),
        )

    def _columns_without_bounds(self) -> set[int]:
        """Return the columns for which a row group has no bounds because its values are too long.

        pyiceberg would use the bounds of the other row groups for the whole file.
        """
        ids = parquet_path_to_id_mapping(self._target.schema)
        metadata = self._writer.writer.metadata
        chunks = (
            metadata.row_group(group).column(column)
            for group in range(metadata.num_row_groups)
            for column in range(metadata.num_columns)
        )
        return {
            ids[chunk.path_in_schema]
            for chunk in chunks
            if chunk.is_stats_set
            and not chunk.statistics.has_min_max
            and chunk.statistics.null_count != chunk.num_values
        }

    def abandon(self) -> None:
        with suppress(Exception):
            self._writer.close()
        with suppress(Exception):
            self._out.close()


def write_data_files(target: FileTarget, parts: Iterable[pa.Table]) -> list[DataFile]:
    """Write parts of a task's rows, and delete the files if that fails."""
    writer = DataFileWriter(target)
    try:
        for part in parts:
            writer.write(part)
        return writer.close()
    except BaseException as error:
        writer.discard()
        if isinstance(error, PenstockError) or not isinstance(error, Exception):
            raise
        raise translate_error(
            error, target.table, "a data file cannot be written", target.io.properties
        ) from None


def to_row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Concatenate batches into tables of limited size, each of which becomes a row group."""
    for group in grouped(batches, _ROW_GROUP_ROWS, _ROW_GROUP_BYTES):
        yield pa.Table.from_batches(group)


def cast_to_file_schema(target: FileTarget, columns: Sequence[pa.ChunkedArray | pa.Array]) -> pa.Table:
    """Cast the columns of the table, in its order, to the schema of the files."""
    for column, column_field in zip(columns, target.metadata.schema().fields, strict=True):
        if column_field.required and column.null_count:
            raise SchemaMismatchError(
                f"a row has no value in {in_quotes(column_field.name)}, which does not allow nulls in the "
                f"Iceberg table {target.table}: fill it, or drop such rows",
                condition="SCHEMA_MISMATCH.NULL_VALUE",
                column=column_field.name,
            )
    arrays = [
        _cast_column(column, named.type, file_field.type)
        for column, named, file_field in zip(columns, target.named_schema, target.arrow_schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=target.arrow_schema)


def _cast_column(
    column: pa.ChunkedArray | pa.Array, named: pa.DataType, wanted: pa.DataType
) -> pa.ChunkedArray:
    """Cast a column, then rename its nested fields, since a cast treats a renamed field as a new one."""
    cast = column.cast(named)
    if named.equals(wanted):
        return cast
    chunks = cast.chunks if isinstance(cast, pa.ChunkedArray) else [cast]
    return pa.chunked_array([chunk.view(wanted) for chunk in chunks], wanted)


def _without_bounds(statistics: dict[str, Any], columns: set[int]) -> dict[str, Any]:
    for name in ("lower_bounds", "upper_bounds"):
        statistics[name] = {
            column: bound for column, bound in statistics[name].items() if column not in columns
        }
    return statistics


def _compression(target: FileTarget) -> dict[str, object]:
    properties = target.metadata.properties
    codec = properties.get(TableProperties.PARQUET_COMPRESSION, TableProperties.PARQUET_COMPRESSION_DEFAULT)
    level = properties.get(TableProperties.PARQUET_COMPRESSION_LEVEL)
    if codec == "uncompressed":
        return {"compression": "none"}
    return {"compression": codec, "compression_level": None if level is None else int(level)}
