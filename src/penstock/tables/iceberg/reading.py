"""Reader for the live rows of an Iceberg table's data files, on executors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform

from penstock.errors import TableRefusedError
from penstock.feeds.iceberg.scan import NONE, DeleteFile, Positions, positions
from penstock.lake.iceberg_columns import current_column

_BATCH_ROWS = 131_072


@dataclass(frozen=True)
class FileSplit:
    """One of several splits of a data file: some of its row groups."""

    number: int = 0
    count: int = 1

    def of(self, file: pq.FileMetaData) -> tuple[range, int]:
        """Return the row groups of the split, and the position of their first row."""
        ends = [file.num_row_groups * number // self.count for number in (self.number, self.number + 1)]
        return range(*ends), sum(file.row_group(group).num_rows for group in range(ends[0]))


WHOLE_FILE = FileSplit()


def file_identity(task: FileScanTask) -> tuple[str, frozenset[str]]:
    """Return the file's path and its delete files, which determine its live rows."""
    return task.file.file_path, frozenset(deletes.file_path for deletes in task.delete_files)


@dataclass
class StoredFile:
    """A data file of a table with its delete files, which are read once."""

    io: FileIO
    metadata: TableMetadata
    task: FileScanTask

    def live_rows(self, columns: Schema, split: FileSplit = WHOLE_FILE) -> Iterator[pa.RecordBatch]:
        """Yield top-level columns of the live rows, always in the same order."""
        data = self.task.file
        if data.file_format != FileFormat.PARQUET:
            raise TableRefusedError(
                f"the file {data.file_path} is {data.file_format.value}, and only Parquet files can be "
                "rewritten: compact the table with write.format.default set to parquet",
                condition="TABLE_REFUSED.FILE_FORMAT",
                file=data.file_path,
            )
        deleted = self.deleted_positions(self.task.delete_files)
        constants = _partition_values(self.metadata, data)
        target = schema_to_pyarrow(columns, include_field_ids=False)
        with self.io.new_input(data.file_path).open() as stream:
            file = pq.ParquetFile(stream, coerce_int96_timestamp_unit="us")
            file_schema = pyarrow_to_schema(
                file.schema_arrow, self.metadata.name_mapping(), downcast_ns_timestamp_to_us=True
            )
            stored_fields = {field.field_id: field for field in file_schema.fields}
            names = [field.name for column in columns.fields if (field := stored_fields.get(column.field_id))]
            groups, start = split.of(file.metadata)
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=names):
                live_batch = _without_deleted(batch, deleted, start)
                start += batch.num_rows
                arrays = [
                    current_column(live_batch, stored_fields.get(column.field_id), column, constants).cast(
                        field.type
                    )
                    for column, field in zip(columns.fields, target, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=target)

    def live_positions(self) -> Positions:
        """Return the positions of the live rows."""
        count, deleted = self.task.file.record_count, self.deleted_positions(self.task.delete_files)
        return np.delete(np.arange(count), deleted[: np.searchsorted(deleted, count)])

    def deleted_positions(self, deletes: Iterable[DataFile]) -> Positions:
        """Return the sorted positions that the given delete files list for the data file."""
        return np.unique(np.concatenate([NONE, *(self._positions[file.file_path] for file in deletes)]))

    @cached_property
    def _positions(self) -> dict[str, Positions]:
        """The positions in each delete file, by its path."""
        paths = [file.file_path for file in self.task.delete_files]
        return {path: positions(self.io, DeleteFile(path), self.task.file.file_path) for path in paths}


def _without_deleted(batch: pa.RecordBatch, deleted: Positions, start: int) -> pa.RecordBatch:
    low, high = np.searchsorted(deleted, [start, start + batch.num_rows])
    if low == high:
        return batch
    is_live = np.ones(batch.num_rows, np.bool_)
    is_live[deleted[low:high] - start] = False
    return batch.filter(pa.array(is_live))


def _partition_values(metadata: TableMetadata, file: DataFile) -> dict[int, object]:
    """Return the partition values of columns that a file may lack, as all of its rows have that value."""
    return {
        field.source_id: file.partition[position]
        for position, field in enumerate(metadata.specs()[file.spec_id].fields)
        if isinstance(field.transform, IdentityTransform)
    }
