"""Position delete files: a data file gets a list of its deleted rows instead of a copy without them (merge on
read; https://iceberg.apache.org/spec, "Position Delete Files").

A copy reads and writes all columns of the file, while a delete file only needs the keys. Each delete file
slows down readers. So once a data file has many of them, the next one replaces them, and once a certain share
of its rows is deleted, it is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask

from penstock.feeds.iceberg.scan import Positions
from penstock.lake.iceberg_deletes import FILE_PATH_FIELD_ID, only_data_file
from penstock.tables.iceberg.data_files import FileTarget

MERGE_MODE_PROPERTY = "write.merge.mode"
"""The table property that sets the mode; by default only large files get position deletes."""
COPY_ON_WRITE, MERGE_ON_READ = "copy-on-write", "merge-on-read"
_MIN_FILE_BYTES = 4 << 20
"""The minimum size of files that get position deletes by default; smaller files are copied quickly enough."""
_MAX_DELETE_FILES = 8
_MAX_DELETED_SHARE = 0.1
_POSITION_FIELD = 2147483545
"""Reserved field id of ``pos`` in position delete files, the column of row positions."""


def _required_field(name: str, kind: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(field_id)})


_SCHEMA = pa.schema(
    [
        # With dictionary encoding, the path is in memory only once, not for each row.
        _required_field("file_path", pa.dictionary(pa.int32(), pa.string()), FILE_PATH_FIELD_ID),
        _required_field("pos", pa.int64(), _POSITION_FIELD),
    ]
)


@dataclass(frozen=True)
class PositionDeletes:
    """A position delete file that a task has written for one data file."""

    path: str
    rows: int
    size: int

    def as_delete_file(self, file: DataFile) -> DataFile:
        """Return the ``DataFile`` entry of the delete file for a snapshot; ``file`` is the data file."""
        # Equal bounds show that it applies to no other data file.
        bounds = {FILE_PATH_FIELD_ID: file.file_path.encode()}
        deletes = DataFile.from_args(
            content=DataFileContent.POSITION_DELETES,
            file_path=self.path,
            file_format=FileFormat.PARQUET,
            partition=file.partition,
            record_count=self.rows,
            file_size_in_bytes=self.size,
            lower_bounds=bounds,
            upper_bounds=bounds,
            sort_order_id=None,
            equality_ids=None,
            key_metadata=None,
        )
        deletes.spec_id = file.spec_id
        return deletes


def should_delete_by_position(
    target: FileTarget, file: FileScanTask, live_rows: int, removed_rows: int
) -> bool:
    """Whether to delete ``removed_rows`` of a file's live rows by position, instead of copying the file."""
    mode, data = target.metadata.properties.get(MERGE_MODE_PROPERTY, "").lower(), file.file
    if mode == COPY_ON_WRITE or removed_rows == live_rows:
        return False
    is_large = mode == MERGE_ON_READ or data.file_size_in_bytes >= _MIN_FILE_BYTES
    deleted_in_total = data.record_count - live_rows + removed_rows
    shared_files = len(file.delete_files) - len(_exclusive_deletes(file))
    return (
        is_large
        and shared_files < _MAX_DELETE_FILES
        and deleted_in_total <= _MAX_DELETED_SHARE * data.record_count
    )


def superseded_deletes(file: FileScanTask) -> list[DataFile]:
    """Return the delete files that the next delete file of a data file replaces: none while there are few,
    then all except those that also apply to other data files.
    """
    exclusive = _exclusive_deletes(file)
    return exclusive if len(exclusive) >= _MAX_DELETE_FILES else []


def _exclusive_deletes(file: FileScanTask) -> list[DataFile]:
    return [deletes for deletes in file.delete_files if only_data_file(deletes) == file.file.file_path]


def write_position_deletes(target: FileTarget, file: DataFile, positions: Positions) -> PositionDeletes:
    """Write a delete file with positions in ascending order."""
    path = target.new_path()
    paths = pa.DictionaryArray.from_arrays(np.zeros(len(positions), np.int32), [file.file_path])
    rows = pa.table([paths, pa.array(positions)], schema=_SCHEMA)
    with target.io.new_output(path).create(overwrite=True) as out:
        pq.write_table(rows, out, compression="zstd", store_schema=False)
        return PositionDeletes(path, len(positions), out.tell())
