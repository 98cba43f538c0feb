"""Reading of the live rows of an Iceberg table's data files, on executors.

A rewritten file must have exactly what it had before. pyiceberg's own conversion of old columns to the
current ones is not used for that: it turns null lists and maps of structs into empty ones, and loses fields
deep inside columns that were renamed or have other names in the file (up to 0.12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from penstock.errors import TableRefusedError
from penstock.feeds.iceberg.scan import NONE, DeleteFile, Positions, positions

_BATCH_ROWS = 131_072


def live_rows(
    io: FileIO, metadata: TableMetadata, task: FileScanTask, columns: Schema
) -> Iterator[pa.RecordBatch]:
    """Yield top-level columns of a data file's rows that are not deleted, always in the same order."""
    if task.file.file_format != FileFormat.PARQUET:
        raise TableRefusedError(
            f"the file {task.file.file_path} is {task.file.file_format.value}, and only Parquet files can be "
            "rewritten: compact the table with write.format.default set to parquet",
            condition="TABLE_REFUSED.FILE_FORMAT",
            file=task.file.file_path,
        )
    deleted = _deleted(io, task)
    constants = _partition_values(metadata, task.file)
    target = schema_to_pyarrow(columns, include_field_ids=False)
    with io.new_input(task.file.file_path).open() as stream:
        file = pq.ParquetFile(stream, coerce_int96_timestamp_unit="us")
        in_file = pyarrow_to_schema(
            file.schema_arrow, metadata.name_mapping(), downcast_ns_timestamp_to_us=True
        )
        stored = {field.field_id: field for field in in_file.fields}
        names = [field.name for wanted in columns.fields if (field := stored.get(wanted.field_id))]
        start = 0
        for batch in file.iter_batches(_BATCH_ROWS, columns=names):
            kept = _without(batch, deleted, start)
            start += batch.num_rows
            arrays = [
                _column(kept, stored.get(wanted.field_id), wanted, field.type, constants)
                for wanted, field in zip(columns.fields, target, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=target)


def _deleted(io: FileIO, task: FileScanTask) -> Positions:
    """Return the positions of the deleted rows of a file, in order."""
    path = task.file.file_path
    listed = [positions(io, DeleteFile(file.file_path), path) for file in task.delete_files]
    return np.unique(np.concatenate([NONE, *listed]))


def _without(batch: pa.RecordBatch, deleted: Positions, start: int) -> pa.RecordBatch:
    low, high = np.searchsorted(deleted, [start, start + batch.num_rows])
    if low == high:
        return batch
    kept = np.ones(batch.num_rows, np.bool_)
    kept[deleted[low:high] - start] = False
    return batch.filter(pa.array(kept))


def _partition_values(metadata: TableMetadata, file: DataFile) -> dict[int, object]:
    """Return the values of columns that a file may lack, since its partition has their only value."""
    return {
        part.source_id: file.partition[place]
        for place, part in enumerate(metadata.specs()[file.spec_id].fields)
        if isinstance(part.transform, IdentityTransform)
    }


def _column(
    batch: pa.RecordBatch,
    stored: NestedField | None,
    wanted: NestedField,
    kind: pa.DataType,
    constants: Mapping[int, object],
) -> pa.Array:
    if stored is not None:
        return projected(batch.column(stored.name), stored.field_type, wanted.field_type).cast(kind)
    value = constants.get(wanted.field_id)
    if value is None:
        return pa.nulls(batch.num_rows, kind)
    # Partition values are numbers where Iceberg's types are.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    physical = pa.scalar(value, _integer(kind)) if is_number else pa.scalar(value)
    return pa.repeat(physical.cast(kind), batch.num_rows)


def _integer(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if kind.bit_width == 32 else pa.int64()


def projected(array: pa.Array, stored: IcebergType, wanted: IcebergType) -> pa.Array:
    """Convert values to the type that their column has now; fields inside it are found by their ids."""
    if isinstance(stored, StructType) and isinstance(wanted, StructType):
        return _struct(array, stored, wanted)
    if isinstance(stored, ListType) and isinstance(wanted, ListType):
        offsets, start, length = _offsets(array)
        values = projected(array.values.slice(start, length), stored.element_type, wanted.element_type)
        field = pa.field("element", values.type, not wanted.element_required)
        return pa.LargeListArray.from_arrays(
            offsets.cast(pa.int64()), values, type=pa.large_list(field), mask=array.is_null()
        )
    if isinstance(stored, MapType) and isinstance(wanted, MapType):
        offsets, start, length = _offsets(array)
        keys = projected(array.keys.slice(start, length), stored.key_type, wanted.key_type)
        items = projected(array.items.slice(start, length), stored.value_type, wanted.value_type)
        kind = pa.map_(
            pa.field("key", keys.type, nullable=False),
            pa.field("value", items.type, not wanted.value_required),
        )
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=array.is_null())
    kind = schema_to_pyarrow(wanted, include_field_ids=False)
    # Nanoseconds that another engine wrote: the table has microseconds.
    return array if array.type == kind else array.cast(kind, safe=not pa.types.is_timestamp(array.type))


def _struct(array: pa.StructArray, stored: StructType, wanted: StructType) -> pa.StructArray:
    children = {
        field.field_id: (array.field(place), field.field_type) for place, field in enumerate(stored.fields)
    }
    arrays, fields = [], []
    for field in wanted.fields:
        if field.field_id in children:
            values = projected(*children[field.field_id], field.field_type)
        else:
            values = pa.nulls(len(array), schema_to_pyarrow(field.field_type, include_field_ids=False))
        arrays.append(values)
        fields.append(pa.field(field.name, values.type, not field.required))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())


def _offsets(array: pa.Array) -> tuple[pa.Array, int, int]:
    """Return the offsets of lists or maps from 0, and where their values begin and how many there are."""
    offsets = array.offsets
    start = offsets[0].as_py()
    return pc.subtract(offsets, offsets[0]), start, offsets[-1].as_py() - start
