"""Reader for splits of Parquet files, with columns cast to the schema of a read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat

from penstock.errors import FeedUnavailableError

BATCH_ROWS = 65_536
BATCH_BYTES = 16 * 2**20
"""Approximate size of a batch of wide rows."""
_INT96_METADATA = {b"penstock.int96": b"true"}
"""Arrow metadata of INT96 timestamps, which Spark writes for instants; they have no time zone in the file."""
_CASTABLE = (
    (pat.is_integer,),
    (pat.is_floating,),
    (pat.is_decimal,),
    (pat.is_string, pat.is_large_string, pat.is_string_view),
    (pat.is_binary, pat.is_large_binary, pat.is_binary_view, pat.is_fixed_size_binary),
    (pat.is_date,),
    (pat.is_boolean,),
    (pat.is_time,),
    (pat.is_duration,),
)


@dataclass(frozen=True)
class FileSplit:
    """One of ``count`` equal splits of a file; a row group belongs to the split with its middle row."""

    index: int = 0
    count: int = 1

    def row_groups(self, metadata: pq.FileMetaData) -> list[int]:
        """Return the indexes of the split's row groups."""
        indexes, first_row, total = [], 0, max(metadata.num_rows, 1)
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            if (2 * first_row + rows) * self.count // (2 * total) == self.index:
                indexes.append(group)
            first_row += rows
        return indexes


def split_file(rows: int, rows_per_split: int) -> list[FileSplit]:
    """Divide a file with about ``rows`` rows into splits."""
    splits = max(1, -(-rows // rows_per_split))
    return [FileSplit(index, splits) for index in range(splits)]


def read_split(source: pa.NativeFile, split: FileSplit, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the rows of a split, without columns that the file lacks.

    Column names match regardless of case, as in table formats.
    """
    file = open_parquet(source)
    yield from read_row_groups(file, split.row_groups(file.metadata), columns)


def open_parquet(source: pa.NativeFile, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file; pass ``metadata`` if its footer has already been read."""
    return pq.ParquetFile(source, metadata=metadata, pre_buffer=False, coerce_int96_timestamp_unit="us")


def read_row_groups(
    file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read the rows of the given row groups, like :func:`read_split`."""
    if not groups:
        return
    stored = _names_in_file(file.schema_arrow.names, columns)
    # Parquet's schema has a column for each leaf field.
    int96 = {leaf.path.split(".")[0] for leaf in file.schema if leaf.physical_type == "INT96"}
    for batch in file.iter_batches(
        batch_size=_batch_rows(file.metadata, groups), row_groups=groups, columns=list(stored.values())
    ):
        fields = [
            pa.field(
                name, batch.schema.field(in_file).type, metadata=_INT96_METADATA if in_file in int96 else None
            )
            for name, in_file in stored.items()
        ]
        arrays = [batch.column(in_file) for in_file in stored.values()]
        # A batch without columns must keep its row count.
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)) if fields else batch


def _names_in_file(in_file: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Map each requested column that the file has to its name in the file."""
    by_lower_name = {name.lower(): name for name in in_file}
    exact = set(in_file)
    names = {name: name if name in exact else by_lower_name.get(name.lower()) for name in columns}
    return {name: stored for name, stored in names.items() if stored is not None}


def _batch_rows(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    row_groups = [metadata.row_group(index) for index in groups]
    rows: int = sum(group.num_rows for group in row_groups)
    size: int = sum(group.total_byte_size for group in row_groups)
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def count_rows(source: pa.NativeFile) -> int:
    """Read the number of rows from a file's footer."""
    return int(pq.read_metadata(source).num_rows)


def cast_to_schema(
    data: pa.RecordBatch, schema: pa.Schema, refuse: Callable[[str], Exception]
) -> pa.RecordBatch:
    """Cast columns of a file to a schema without loss; ``refuse`` returns the error to raise for a reason."""
    fields, arrays = [], []
    for field, column in zip(data.schema, data.columns, strict=True):
        index = schema.get_field_index(field.name)
        target_type = schema.field(index).type if index >= 0 else field.type
        fields.append(pa.field(field.name, target_type))
        arrays.append(
            column if target_type.equals(column.type) else _cast(column, target_type, field, refuse)
        )
    if not arrays:
        return data
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def align_to_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema, matched regardless of case; columns that the batch lacks are null."""
    batch_columns = {name.lower(): number for number, name in enumerate(batch.schema.names)}
    indexes = [batch_columns.get(field.name.lower()) for field in schema]
    arrays = [
        pa.nulls(batch.num_rows, field.type) if index is None else batch.column(index)
        for field, index in zip(schema, indexes, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(
    column: pa.Array, target_type: pa.DataType, field: pa.Field, refuse: Callable[[str], Exception]
) -> pa.Array:
    name = field.name
    if can_read_as(column.type, target_type, int96_instants=field.metadata == _INT96_METADATA):
        try:
            return column.cast(target_type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise refuse(f"its column {name!r} is {column.type}, not {target_type} ({error})") from None
    raise refuse(f"its column {name!r} is {column.type}, not {target_type}")


def can_read_as(stored: pa.DataType, target: pa.DataType, *, int96_instants: bool = False) -> bool:
    """Whether a stored type may be read as another type; a checked cast can still refuse single values.

    With ``int96_instants``, timestamps without a time zone may be read as instants.
    """
    nested = partial(can_read_as, int96_instants=int96_instants)
    if stored.equals(target) or pat.is_null(stored):
        return True
    if pat.is_dictionary(stored):
        return nested(stored.value_type, target)
    if pat.is_struct(stored) and pat.is_struct(target):
        names = {field.name: field.type for field in stored}
        # Arrow's field names are case-sensitive, those of table formats are not, so a field whose name only
        # differs in case would look missing.
        lower_names = {name.lower() for name in names}
        return all(
            nested(names[field.name], field.type)
            if field.name in names
            else field.name.lower() not in lower_names
            for field in target
        )
    if pat.is_map(stored) and pat.is_map(target):
        return nested(stored.key_type, target.key_type) and nested(stored.item_type, target.item_type)
    if _is_list(stored) and _is_list(target):
        return nested(stored.value_type, target.value_type)
    if pat.is_timestamp(stored) and pat.is_timestamp(target):
        # Without a time zone, it is unknown which instant a time represents.
        return (stored.tz is None) == (target.tz is None) or (int96_instants and stored.tz is None)
    if pat.is_floating(stored) and pat.is_floating(target):
        return bool(stored.bit_width <= target.bit_width)
    if pat.is_integer(stored) and (pat.is_floating(target) or pat.is_decimal(target)):
        return True
    if pat.is_date(stored) and pat.is_timestamp(target):
        return target.tz is None
    return any(_is_any_of(kinds, stored) and _is_any_of(kinds, target) for kinds in _CASTABLE)


def nullable(kind: pa.DataType) -> pa.DataType:
    """Return the type with all nested fields nullable, since older rows may contain nulls."""
    if pat.is_struct(kind):
        return pa.struct([pa.field(field.name, nullable(field.type)) for field in kind])
    if pat.is_list(kind):
        return pa.list_(pa.field("element", nullable(kind.value_type)))
    if pat.is_map(kind):
        return pa.map_(
            pa.field("key", kind.key_type, nullable=False), pa.field("value", nullable(kind.item_type))
        )
    return kind


def _is_any_of(kinds: Sequence[Callable[[pa.DataType], bool]], data_type: pa.DataType) -> bool:
    return any(kind(data_type) for kind in kinds)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind))


@contextmanager
def translating_read_errors(what: str, message: Callable[[Exception], str] = str) -> Iterator[None]:
    """Translate read errors, and name the file in them; ``message`` returns an error's text for users."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise FeedUnavailableError(
            f"{what} cannot be read ({message(error).splitlines()[0]}): check that it is complete and "
            "readable",
            condition="FEED_UNAVAILABLE.UNREADABLE_FILE",
            file=what,
        ) from None
