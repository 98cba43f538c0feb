"""Parquet files as a read wants them: a piece of a file at a time, in its schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat

from penstock.errors import FeedUnavailable

BATCH_ROWS = 65_536
BATCH_BYTES = 16 * 2**20
"""About as much as a batch has in memory, where its rows are wide."""
_INT96 = {b"penstock.int96": b"true"}
"""On a field whose timestamps are of Parquet's old kind, which does not say whether they have a zone: Spark writes instants so."""
_GROUPS = (
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
    """One of so many equal pieces of a file; a row group belongs to the piece in which its middle lies."""

    number: int = 0
    of: int = 1

    def row_groups(self, metadata: pq.FileMetaData) -> list[int]:
        """The places of its row groups."""
        found, before, rows = [], 0, max(metadata.num_rows, 1)
        for place in range(metadata.num_row_groups):
            here = metadata.row_group(place).num_rows
            if (2 * before + here) * self.of // (2 * rows) == self.number:
                found.append(place)
            before += here
        return found


def pieces(rows: int, rows_per_piece: int) -> list[Piece]:
    """A file of about so many rows, cut."""
    count = max(1, -(-rows // rows_per_piece))
    return [Piece(number, count) for number in range(count)]


def read_piece(source: Any, piece: Piece, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a piece; columns that the file does not have are left out.

    Parameters
    ----------
    source
        A file of pyarrow's.
    columns
        Names of columns; a file may have them in another case, as tables do not tell names apart by it.
    """
    file = pq.ParquetFile(source, pre_buffer=False, coerce_int96_timestamp_unit="us")
    groups = piece.row_groups(file.metadata)
    if not groups:
        return
    stored = _stored(file.schema_arrow.names, columns)
    # Parquet's own schema has a column for each leaf.
    old = {leaf.path.split(".")[0] for leaf in file.schema if leaf.physical_type == "INT96"}
    for batch in file.iter_batches(
        batch_size=_batch_rows(file.metadata, groups), row_groups=groups, columns=list(stored.values())
    ):
        fields = [
            pa.field(name, batch.schema.field(there).type, metadata=_INT96 if there in old else None)
            for name, there in stored.items()
        ]
        arrays = [batch.column(there) for there in stored.values()]
        # A batch without columns has rows all the same.
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)) if fields else batch


def _stored(there: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """The wanted columns that a file has, each with the name that it has there."""
    folded = {name.lower(): name for name in there}
    exact = set(there)
    names = {name: name if name in exact else folded.get(name.lower()) for name in columns}
    return {name: stored for name, stored in names.items() if stored is not None}


def _batch_rows(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    found = [metadata.row_group(place) for place in groups]
    rows: int = sum(group.num_rows for group in found)
    size: int = sum(group.total_byte_size for group in found)
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def count_rows(source: Any) -> int:
    """The rows of a file, by its footer."""
    return int(pq.read_metadata(source).num_rows)


def with_constants(data: pa.RecordBatch, constants: Mapping[str, pa.Scalar]) -> pa.RecordBatch:
    """The rows with columns that have one value each."""
    for name, value in constants.items():
        data = data.append_column(name, pa.repeat(value, data.num_rows))
    return data


def fitted(data: pa.RecordBatch, schema: pa.Schema, refuse: Callable[[str], Exception]) -> pa.RecordBatch:
    """The columns of a file in the types of a schema, where nothing is lost by it; a struct's new fields are null.

    Parameters
    ----------
    refuse
        Makes the error for a column that cannot be brought into its type, of what is amiss.
    """
    fields, arrays = [], []
    for field, column in zip(data.schema, data.columns, strict=True):
        place = schema.get_field_index(field.name)
        wanted = schema.field(place).type if place >= 0 else field.type
        fields.append(pa.field(field.name, wanted))
        arrays.append(column if wanted.equals(column.type) else _cast(column, wanted, field, refuse))
    if not arrays:
        return data
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _cast(
    column: pa.Array, wanted: pa.DataType, field: pa.Field, refuse: Callable[[str], Exception]
) -> pa.Array:
    name = field.name
    if widens(column.type, wanted, old_instants=field.metadata == _INT96):
        try:
            return column.cast(wanted)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise refuse(f"the column {name!r} is {column.type} there, not {wanted} ({error})") from None
    raise refuse(f"the column {name!r} is {column.type} there, not {wanted}")


def widens(found: pa.DataType, wanted: pa.DataType, *, old_instants: bool = False) -> bool:
    """Whether values of one type may be another's; whether each one fits is for a checked cast to say.

    Parameters
    ----------
    old_instants
        Whether timestamps without a zone may be instants.
    """

    def below(found: pa.DataType, wanted: pa.DataType) -> bool:
        return widens(found, wanted, old_instants=old_instants)

    if found.equals(wanted) or pat.is_null(found):
        return True
    if pat.is_dictionary(found):
        return below(found.value_type, wanted)
    if pat.is_struct(found) and pat.is_struct(wanted):
        names = {field.name: field.type for field in found}
        # Arrow finds fields by their exact names, tables do not: one in another case would be taken for missing.
        folded = {name.lower() for name in names}
        return all(
            below(names[field.name], field.type) if field.name in names else field.name.lower() not in folded
            for field in wanted
        )
    if pat.is_map(found) and pat.is_map(wanted):
        return below(found.key_type, wanted.key_type) and below(found.item_type, wanted.item_type)
    if _is_list(found) and _is_list(wanted):
        return below(found.value_type, wanted.value_type)
    if pat.is_timestamp(found) and pat.is_timestamp(wanted):
        # Which instant a time without a zone was, and which time an instant, nobody said.
        return (found.tz is None) == (wanted.tz is None) or (old_instants and found.tz is None)
    if pat.is_floating(found) and pat.is_floating(wanted):
        return bool(found.bit_width <= wanted.bit_width)
    if pat.is_integer(found) and (pat.is_floating(wanted) or pat.is_decimal(wanted)):
        return True
    if pat.is_date(found) and pat.is_timestamp(wanted):
        return wanted.tz is None
    return any(_one_of(kinds, found) and _one_of(kinds, wanted) for kinds in _GROUPS)


def nullable(kind: pa.DataType) -> pa.DataType:
    """The type with nulls allowed everywhere in it: what has none now may have had some."""
    if pat.is_struct(kind):
        return pa.struct([pa.field(field.name, nullable(field.type)) for field in kind])
    if pat.is_list(kind):
        return pa.list_(pa.field("element", nullable(kind.value_type)))
    if pat.is_map(kind):
        return pa.map_(
            pa.field("key", kind.key_type, nullable=False), pa.field("value", nullable(kind.item_type))
        )
    return kind


def _one_of(kinds: Sequence[Callable[[pa.DataType], bool]], found: pa.DataType) -> bool:
    return any(kind(found) for kind in kinds)


def _is_list(found: pa.DataType) -> bool:
    return bool(pat.is_list(found) or pat.is_large_list(found) or pat.is_fixed_size_list(found))


@contextmanager
def readable(what: str, told: Callable[[Exception], str] = str) -> Iterator[None]:
    """Say which file it is that cannot be read.

    Parameters
    ----------
    told
        What an error says, without secrets.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise FeedUnavailable(
            f"{what} cannot be read ({told(error).splitlines()[0]}): is it whole, and may you read it?",
            condition="FEED_UNAVAILABLE.UNREADABLE_FILE",
            file=what,
        ) from None
