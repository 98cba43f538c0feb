"""The first rows of each key, in a stream or a batch.

The shuffle distributes keys over 64 places by their hash. So each stateful call processes many keys together,
and keeps one table of keys as its state. There is no call and no Python object per key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DecimalType,
    FractionalType,
    IntegralType,
    StructField,
    StructType,
)

from penstock.arguments import column_names, did_you_mean, in_quotes, require
from penstock.arrow.arrays import grouped
from penstock.arrow.key_hash import check_key, key_hash
from penstock.arrow.schema import canonical_schema
from penstock.arrow.segments import read_stored_table
from penstock.errors import CheckpointMismatchError, InvalidInputError, InvalidOptionError
from penstock.instants import interval_micros
from penstock.limits.rows import check_rows
from penstock.spark import shuffle_batches
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.factorize import cumcount, factorize
from penstock.spark.schemas import is_case_sensitive, to_struct
from penstock.spark.shuffle_batches import ROWS, SCHEMA, SHUFFLE_KEY, unpack

_KEY = "key_"
_COUNT, _LAST = "count", "last"
ORDER = "__penstock_order"
PACKED = pa.schema([*shuffle_batches.SCHEMA, pa.field(ORDER, pa.int64(), nullable=False)])
PLACES = 64
"""The number of places. It must not change, since stored state depends on the place of each key."""
_CHUNK_ROWS, _CHUNK_BYTES = 1_000_000, 128 << 20
_BATCH_ROWS = 65_536
_STATE = StructType([StructField("seen", BinaryType())])


@dataclass(frozen=True)
class KeyLimit:
    """A limit on the rows of each key, as a transformation."""

    rows: int
    per: tuple[str, ...]
    forget_ms: int | None = None
    """How long after a key's last row its count is dropped, in milliseconds."""

    @classmethod
    def of(cls, rows: int, per: Sequence[str], ttl: str | None) -> KeyLimit:
        """Check and convert the arguments of ``stream.limit`` and ``first_rows``."""
        check_rows(rows)
        names = column_names("per", per)
        if not names or len(set(names)) != len(names):
            raise InvalidInputError(
                f"per names one or more columns, each once, not {in_quotes(per)}", parameter="per"
            )
        return cls(rows, names, _ttl_milliseconds(ttl))

    def __call__(self, frame: DataFrame) -> DataFrame:
        key = self._key(frame)
        packed = frame.mapInArrow(PackRows(key, self.rows), to_struct(PACKED))
        if not frame.isStreaming:
            return packed.repartition(SHUFFLE_KEY).mapInArrow(FirstRowsOfBatch(key, self.rows), frame.schema)
        counted = packed.groupBy(SHUFFLE_KEY).applyInPandasWithState(
            CountInState(key, self.rows, self.forget_ms),
            to_struct(SCHEMA),
            _STATE,
            "append",
            GroupStateTimeout.NoTimeout,
        )
        return counted.mapInArrow(unpack, frame.schema)

    def kinds(self, frame: DataFrame) -> tuple[str, ...]:
        """Return the kinds of a DataFrame's key columns, as far as the hash distinguishes them."""
        return tuple(_hash_kind(frame.schema[position].dataType) for position in self._key(frame))

    def _key(self, frame: DataFrame) -> tuple[int, ...]:
        is_exact = is_case_sensitive(frame.sparkSession)
        names = [name if is_exact else name.lower() for name in frame.columns]
        positions = []
        for name in self.per:
            lookup_name = name if is_exact else name.lower()
            if lookup_name not in names:
                column_list, hint = ", ".join(frame.columns[:20]), did_you_mean(name, frame.columns)
                raise InvalidInputError(
                    f"per names the column {in_quotes(name)}, which does not exist.{hint} The columns are "
                    f"{column_list}",
                    condition="INVALID_INPUT.UNKNOWN_COLUMN",
                    column=name,
                )
            positions.append(names.index(lookup_name))
        fields = StructType([frame.schema.fields[position] for position in positions])
        check_key(canonical_schema(fields), fields.names)
        return tuple(positions)


def _hash_kind(kind: DataType) -> str:
    """Return text for a type. Like the hashes, it stays the same if the column is widened."""
    if isinstance(kind, DecimalType):
        return f"decimal with scale {kind.scale}"
    if isinstance(kind, IntegralType):
        return "integer"
    return "float" if isinstance(kind, FractionalType) else kind.simpleString()


def first_rows(df: DataFrame, n: int, *, per: Sequence[str], ttl: str | None = None) -> DataFrame:
    """Return the first rows of each key in a batch or a stream. Both give the same rows if each key is in one
    partition.

    Rows are ordered by the input's partitions, and then by their order within the partition. In a stream,
    earlier micro-batches come first. A stream keeps the count of each key in Spark's state store, and needs
    output mode append.

    Parameters
    ----------
    df
        A static or streaming DataFrame.
    n
        The number of rows to return for each key.
    per
        The names of the key columns: numbers, strings, binary values, booleans, dates or times. Null is a key
        like any other.
    ttl
        How long after a key's last row a stream drops its count, such as ``"1 hour"``, by the clock of the
        micro-batches. The key's next row then counts as its first. None keeps counts for ever. A batch
        ignores this parameter.

    Raises
    ------
    InvalidInputError
        When a column does not exist, or an argument has the wrong type.
    UnsupportedTypeError
        When a key column has a type that cannot be hashed.
    """
    require("df", df, DataFrame, "a DataFrame")
    return KeyLimit.of(n, per, ttl)(df)


def _ttl_milliseconds(text: object) -> int | None:
    if text is None:
        return None
    micros = interval_micros(text) if isinstance(text, str) else None
    if not micros or micros < 1_000:
        raise InvalidOptionError(
            f"ttl is text such as '1 hour' or '500 ms', at least one millisecond, not {in_quotes(text)}",
            condition="INVALID_OPTION.VALUE",
            option="ttl",
        )
    return micros // 1_000


@dataclass(frozen=True)
class KeyCounts:
    """The keys seen so far, each with the number of rows that passed and the time of its last row in
    milliseconds.
    """

    table: pa.Table

    @classmethod
    def empty(cls, keys: list[pa.Array]) -> KeyCounts:
        """Return empty counts for keys with these types."""
        return cls(_counts_schema(keys).empty_table())

    @classmethod
    def from_bytes(cls, data: bytes) -> KeyCounts:
        try:
            table = read_stored_table(data)
            # Columns without values could claim to have any number of rows.
            count_columns = [(field.name, field.type) for field in list(table.schema)[-2:]]
            if count_columns != [(_COUNT, pa.int32()), (_LAST, pa.int64())]:
                raise ValueError("its columns do not fit counted keys")
            return cls(table)
        except ValueError as error:
            raise CheckpointMismatchError(
                f"the state of the limit is malformed ({error}): restore the checkpoint from a copy, or "
                "start with a new one",
                condition="CHECKPOINT_MISMATCH.MALFORMED",
            ) from error

    def to_bytes(self) -> bytes:
        return _ipc_bytes(self.table)

    def since(self, cutoff: int, now: int) -> KeyCounts:
        """Return the counts of keys that had a row at ``cutoff`` or later. Keys that were counted before
        times were recorded count as seen ``now``.
        """
        last = self.table[_LAST].to_numpy()
        last = np.where(last == 0, now, last)
        position = self.table.schema.get_field_index(_LAST)
        updated = self.table.set_column(
            position, self.table.schema.field(position), pa.array(last, pa.int64())
        )
        return KeyCounts(updated.filter(pa.array(last >= cutoff)))

    def take(self, keys: list[pa.Array], rows: int, now: int) -> tuple[NDArray[np.bool_], KeyCounts]:
        """Return which new rows are among the first of their keys, and the updated counts."""
        counted = self.table.num_rows
        all_keys = self._with(keys)
        codes = factorize(all_keys).dense()
        counts, last = np.zeros(codes.size, np.int64), np.zeros(codes.size, np.int64)
        old_codes, new_codes = codes.values[:counted], codes.values[counted:]
        counts[old_codes], last[old_codes] = self.table[_COUNT].to_numpy(), self.table[_LAST].to_numpy()
        passes = counts[new_codes] + cumcount(new_codes) < rows
        new_counts = np.minimum(
            counts + np.bincount(new_codes, minlength=codes.size), np.maximum(counts, rows)
        )
        last[new_codes] = now
        last_positions = np.zeros(codes.size, np.int64)
        last_positions[codes.values[::-1]] = np.arange(len(codes.values))[::-1]
        columns = [column.take(pa.array(last_positions)) for column in all_keys]
        columns += [pa.array(new_counts, pa.int32()), pa.array(last, pa.int64())]
        return passes, KeyCounts(pa.table(columns, schema=_counts_schema(all_keys)))

    def _with(self, keys: list[pa.Array]) -> list[pa.Array]:
        """Return the counted keys followed by new keys, in the wider of their types."""
        counted = self.table.columns[:-2]
        old_types, new_types = [column.type for column in counted], [column.type for column in keys]
        types = [_wider(*pair) for pair in zip(old_types, new_types, strict=False)]
        if len(old_types) != len(new_types) or None in types:
            raise CheckpointMismatchError(
                f"the limit has counted rows by a key of the type {_type_list(old_types)}, but now the "
                f"key's type is {_type_list(new_types)}: cast the key columns to their previous types, or "
                "start with a new checkpoint",
                condition="CHECKPOINT_MISMATCH.LIMIT_PER",
                before=_type_list(old_types),
                now=_type_list(new_types),
            )
        return [
            pa.concat_arrays([*counted_column.cast(kind).chunks, column.cast(kind)])
            for counted_column, column, kind in zip(counted, keys, types, strict=True)
        ]


def _counts_schema(keys: Sequence[pa.Array]) -> pa.Schema:
    kinds = [(f"{_KEY}{position}", column.type) for position, column in enumerate(keys)]
    return pa.schema([*kinds, (_COUNT, pa.int32()), (_LAST, pa.int64())])


def _wider(before: pa.DataType, now: pa.DataType) -> pa.DataType | None:
    """Return the wider of two types if hashes stay the same between them; otherwise None."""
    if before == now:
        return now
    if pat.is_decimal(before) and pat.is_decimal(now):
        return max(before, now, key=lambda kind: kind.precision) if before.scale == now.scale else None
    for is_kind in (pat.is_integer, pat.is_floating):
        if is_kind(before) and is_kind(now):
            return max(before, now, key=lambda kind: kind.bit_width)
    return None


def _type_list(types: Sequence[pa.DataType]) -> str:
    return ", ".join(map(str, types))


def key_arrays(table: pa.Table, key: tuple[int, ...]) -> list[pa.Array]:
    return [table.column(position).combine_chunks() for position in key]


@dataclass(frozen=True)
class PackRows:
    """Drops rows that cannot be among the first of their keys, and packs the others for the shuffle."""

    key: tuple[int, ...]
    """The positions of the key columns."""
    rows: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._packed(batches))

    def _packed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        # Tasks are numbered in the order of the source's partitions and of the ranges in each partition.
        number = 0 if context is None else context.partitionId() << 32
        for chunk in grouped(batches, _CHUNK_ROWS, _CHUNK_BYTES):
            table = first_rows_of_keys(pa.Table.from_batches(chunk), self.key, self.rows)
            for packed in shuffle_batches.pack(
                table, self._targets(table), shuffle_batches.shuffle_keys(PLACES)
            ):
                order = np.arange(number, number + packed.num_rows)
                number += packed.num_rows
                yield pa.RecordBatch.from_arrays([*packed.columns, pa.array(order)], schema=PACKED)

    def _targets(self, table: pa.Table) -> NDArray[np.uint8]:
        names = [str(position) for position in range(len(self.key))]
        hashes = key_hash(pa.RecordBatch.from_arrays(key_arrays(table, self.key), names), names).to_numpy()
        targets: NDArray[np.uint8] = (hashes % np.uint32(PLACES)).astype(np.uint8)
        return targets


def first_rows_of_keys(table: pa.Table, key: tuple[int, ...], rows: int) -> pa.Table:
    is_first = cumcount(factorize(key_arrays(table, key)).values) < rows
    return table if is_first.all() else table.filter(pa.array(is_first))


@dataclass(frozen=True)
class CountInState:
    """Returns those rows of a place that are among the first of their keys over all micro-batches."""

    key: tuple[int, ...]
    rows: int
    forget_ms: int | None

    def __call__(
        self, place: tuple[int], frames: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        # Read each frame completely before the next one, since all are views of one buffer.
        packed = [pair for frame in frames for pair in zip(frame[ORDER], frame[ROWS], strict=True)]
        if not packed:
            return
        table = pa.concat_tables([_read_ipc(rows) for _, rows in sorted(packed, key=lambda pair: pair[0])])
        keys = key_arrays(table, self.key)
        counts = KeyCounts.from_bytes(state.get[0]) if state.exists else KeyCounts.empty(keys)
        now = 0
        if self.forget_ms is not None:
            # The time of the micro-batch stays the same if the micro-batch is repeated.
            now = state.getCurrentProcessingTimeMs()
            counts = counts.since(now - self.forget_ms, now)
        passes, new_counts = counts.take(keys, self.rows, now)
        if passes.any() or self.forget_ms is not None:
            state.update((new_counts.to_bytes(),))
        if passes.any():
            rows = table.filter(pa.array(passes))
            yield pd.DataFrame({SHUFFLE_KEY: [place[0]], ROWS: [_ipc_bytes(rows)]})


@dataclass(frozen=True)
class FirstRowsOfBatch:
    """Returns those rows of a batch that are among the first of their keys."""

    key: tuple[int, ...]
    rows: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        packed_rows: list[tuple[int, int, pa.Scalar]] = []
        for batch in batches:
            places, rows, order = (batch[name] for name in PACKED.names)
            packed_rows += zip(places.to_pylist(), order.to_pylist(), rows, strict=True)
        packed_rows.sort(key=itemgetter(0, 1))
        for _, packed in groupby(packed_rows, key=itemgetter(0)):
            table = pa.concat_tables([_read_ipc(rows.as_buffer()) for *_, rows in packed])
            yield from first_rows_of_keys(table, self.key, self.rows).to_batches(max_chunksize=_BATCH_ROWS)


def _read_ipc(rows: bytes | pa.Buffer) -> pa.Table:
    return pa.ipc.open_stream(rows).read_all()


def _ipc_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
