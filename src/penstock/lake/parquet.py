"""Reading of Parquet files in pieces, with columns cast to the schema of a read."""

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
_INT96 = {b"penstock.int96": b"true"}
"""Marks a field of INT96 timestamps, as Spark writes instants; they have no time zone in the file."""
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
class Piece:
    """One of ``of`` equal pieces of a file; a row group belongs to the piece that has its middle row."""

    number: int = 0
    of: int = 1

    def row_groups(self, metadata: pq.FileMetaData) -> list[int]:
        """Return the indexes of the piece's row groups."""
        groups, first, total = [], 0, max(metadata.num_rows, 1)
        for index in range(metadata.num_row_groups):
            rows = metadata.row_group(index).num_rows
            if (2 * first + rows) * self.of // (2 * total) == self.number:
                groups.append(index)
            first += rows
        return groups


def pieces(rows: int, rows_per_piece: int) -> list[Piece]:
    """Divide a file with about ``rows`` rows into pieces."""
    count = max(1, -(-rows // rows_per_piece))
    return [Piece(number, count) for number in range(count)]


def read_piece(source: pa.NativeFile, piece: Piece, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the rows of a piece, without columns that the file lacks.

    The case of names may differ in the file, since table formats ignore it.
    """
    file = open_parquet(source)
    yield from read_row_groups(file, piece.row_groups(file.metadata), columns)


def open_parquet(source: pa.NativeFile, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a file of any writer; pass ``metadata`` if its footer has already been read."""
    return pq.ParquetFile(source, metadata=metadata, pre_buffer=False, coerce_int96_timestamp_unit="us")


def read_row_groups(
    file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read the rows of the given row groups, like :func:`read_piece`."""
    if not groups:
        return
    stored = _names_in_file(file.schema_arrow.names, columns)
    # Parquet's own schema has a column for each leaf.
    int96 = {leaf.path.split(".")[0] for leaf in file.schema if leaf.physical_type == "INT96"}
    for batch in file.iter_batches(
        batch_size=_batch_rows(file.metadata, groups), row_groups=groups, columns=list(stored.values())
    ):
        fields = [
            pa.field(name, batch.schema.field(in_file).type, metadata=_INT96 if in_file in int96 else None)
            for name, in_file in stored.items()
        ]
        arrays = [batch.column(in_file) for in_file in stored.values()]
        # A batch without columns still has a number of rows.
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)) if fields else batch


def _names_in_file(in_file: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Map the requested columns that a file has to their names in the file."""
    folded = {name.lower(): name for name in in_file}
    exact = set(in_file)
    names = {name: name if name in exact else folded.get(name.lower()) for name in columns}
    return {name: stored for name, stored in names.items() if stored is not None}


def _batch_rows(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    row_groups = [metadata.row_group(index) for index in groups]
    rows: int = sum(group.num_rows for group in row_groups)
    size: int = sum(group.total_byte_size for group in row_groups)
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def count_rows(source: pa.NativeFile) -> int:
    """Read the number of rows from a file's footer."""
    return int(pq.read_metadata(source).num_rows)


def fitted(data: pa.RecordBatch, schema: pa.Schema, refuse: Callable[[str], Exception]) -> pa.RecordBatch:
    """Cast columns of a file to a schema without loss; ``refuse`` returns the error for a reason."""
    fields, arrays = [], []
    for field, column in zip(data.schema, data.columns, strict=True):
        index = schema.get_field_index(field.name)
        wanted = schema.field(index).type if index >= 0 else field.type
        fields.append(pa.field(field.name, wanted))
        arrays.append(column if wanted.equals(column.type) else _cast(column, wanted, field, refuse))
    if not arrays:
        return data
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def completed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema; columns that the batch lacks are null. The case of names may differ."""
    own = {name.lower(): number for number, name in enumerate(batch.schema.names)}
    places = [own.get(field.name.lower()) for field in schema]
    arrays = [
        pa.nulls(batch.num_rows, field.type) if place is None else batch.column(place)
        for field, place in zip(schema, places, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(
    column: pa.Array, wanted: pa.DataType, field: pa.Field, refuse: Callable[[str], Exception]
) -> pa.Array:
    name = field.name
    if widens(column.type, wanted, old_instants=field.metadata == _INT96):
        try:
            return column.cast(wanted)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise refuse(f"its column {name!r} is {column.type}, not {wanted} ({error})") from None
    raise refuse(f"its column {name!r} is {column.type}, not {wanted}")


def widens(stored: pa.DataType, wanted: pa.DataType, *, old_instants: bool = False) -> bool:
    """Whether values of a stored type may be read as another type; a checked cast then refuses single values.

    With ``old_instants``, timestamps without a zone may be instants.
    """
    below = partial(widens, old_instants=old_instants)
    if stored.equals(wanted) or pat.is_null(stored):
        return True
    if pat.is_dictionary(stored):
        return below(stored.value_type, wanted)
    if pat.is_struct(stored) and pat.is_struct(wanted):
        names = {field.name: field.type for field in stored}
        # Arrow's field names are case-sensitive, those of table formats are not, so a field whose name only
        # differs in case would look missing.
        folded = {name.lower() for name in names}
        return all(
            below(names[field.name], field.type) if field.name in names else field.name.lower() not in folded
            for field in wanted
        )
    if pat.is_map(stored) and pat.is_map(wanted):
        return below(stored.key_type, wanted.key_type) and below(stored.item_type, wanted.item_type)
    if _is_list(stored) and _is_list(wanted):
        return below(stored.value_type, wanted.value_type)
    if pat.is_timestamp(stored) and pat.is_timestamp(wanted):
        # Without a zone, it is unknown which instant a time represents.
        return (stored.tz is None) == (wanted.tz is None) or (old_instants and stored.tz is None)
    if pat.is_floating(stored) and pat.is_floating(wanted):
        return bool(stored.bit_width <= wanted.bit_width)
    if pat.is_integer(stored) and (pat.is_floating(wanted) or pat.is_decimal(wanted)):
        return True
    if pat.is_date(stored) and pat.is_timestamp(wanted):
        return wanted.tz is None
    return any(_one_of(kinds, stored) and _one_of(kinds, wanted) for kinds in _CASTABLE)


def nullable(kind: pa.DataType) -> pa.DataType:
    """Return the type with nulls allowed at every level, since older rows may contain them."""
    if pat.is_struct(kind):
        return pa.struct([pa.field(field.name, nullable(field.type)) for field in kind])
    if pat.is_list(kind):
        return pa.list_(pa.field("element", nullable(kind.value_type)))
    if pat.is_map(kind):
        return pa.map_(
            pa.field("key", kind.key_type, nullable=False), pa.field("value", nullable(kind.item_type))
        )
    return kind


def _one_of(kinds: Sequence[Callable[[pa.DataType], bool]], tested: pa.DataType) -> bool:
    return any(kind(tested) for kind in kinds)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind))


@contextmanager
def readable(what: str, message: Callable[[Exception], str] = str) -> Iterator[None]:
    """Translate read errors, naming the file; ``message`` returns an error's text, without secrets."""
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
