"""How many rows of each key have come, and which further ones are among the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming.state import GroupState

from penstock.arrow.key_hash import key_hash
from penstock.arrow.segments import kept_table
from penstock.errors import CheckpointMismatch
from penstock.spark import shuffle_batches
from penstock.spark.error_boundary import iterate_without_tracebacks
from penstock.spark.factorize import cumcount, factorize
from penstock.spark.shuffle_batches import PLACE, ROWS

_KEY = "key_"
_COUNT, _LAST = "count", "last"


@dataclass(frozen=True)
class KeyCounts:
    """The keys of which rows have passed, with how many, and when the last row of each came: milliseconds since 1970."""

    table: pa.Table

    @classmethod
    def nothing(cls, keys: list[pa.Array]) -> KeyCounts:
        """Before the first row of keys with these types."""
        kinds = [(f"{_KEY}{place}", column.type) for place, column in enumerate(keys)]
        return cls(pa.schema([*kinds, (_COUNT, pa.int32()), (_LAST, pa.int64())]).empty_table())

    @classmethod
    def from_bytes(cls, kept: bytes) -> KeyCounts:
        try:
            return cls(kept_table(kept))
        except ValueError as error:
            raise CheckpointMismatch(
                f"the state of the limit is not as a limit writes it ({error}): bring the checkpoint back from a copy, or start with a new one"
            ) from error

    def to_bytes(self) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as writer:
            writer.write_table(self.table)
        return bytes(sink.getvalue())

    def since(self, moment: int, now: int) -> KeyCounts:
        """Without the keys of which no row has come from a moment on.

        Parameters
        ----------
        now
            Stands for the last row of a key that was counted while none was ever forgotten: when it came is not known.
        """
        last = self.table[_LAST].to_numpy()
        last = np.where(last == 0, now, last)
        place = self.table.schema.get_field_index(_LAST)
        dated = self.table.set_column(place, self.table.schema.field(place), pa.array(last, pa.int64()))
        return KeyCounts(dated.filter(pa.array(last >= moment)))

    def take(self, keys: list[pa.Array], rows: int, now: int) -> tuple[Any, KeyCounts]:
        """Which of further rows are among the first of their keys, and what has been seen with them.

        Parameters
        ----------
        keys
            The key columns of the rows, in their order; one row at the least.
        rows
            How many rows of each key pass.
        now
            When they came.
        """
        known = self.table.num_rows
        together = [self._with(place, column) for place, column in enumerate(keys)]
        codes = factorize(together).dense()
        before, last = np.zeros(codes.size, np.int64), np.zeros(codes.size, np.int64)
        old, new = codes.values[:known], codes.values[known:]
        before[old], last[old] = self.table[_COUNT].to_numpy(), self.table[_LAST].to_numpy()
        passes = before[new] + cumcount(new) < rows
        after = np.minimum(before + np.bincount(new, minlength=codes.size), np.maximum(before, rows))
        last[new] = now
        where = np.zeros(codes.size, np.int64)
        where[codes.values[::-1]] = np.arange(len(codes.values))[::-1]
        columns = [column.take(pa.array(where)) for column in together]
        columns += [pa.array(after, pa.int32()), pa.array(last, pa.int64())]
        return passes, KeyCounts(pa.table(columns, schema=self.table.schema))

    def _with(self, place: int, column: pa.Array) -> pa.Array:
        kept = self.table.column(place)
        return pa.concat_arrays([*kept.chunks, column.cast(kept.type)])


# ---- stages: What Spark's tasks run of a limit for each key: Arrow batches in, parcels of rows through the shuffle, the first rows out.
#
# The shuffle has few places, each with the keys that hash to it, so that a stateful call has many keys at once and its state is
# one table of them: there is no call, and no Python object, for each key.

ORDER = "__penstock_order"
PACKED = pa.schema([*shuffle_batches.SCHEMA, pa.field(ORDER, pa.int64(), nullable=False)])
PLACES = 64
"""It is part of the state: the place of a key must not change."""
_CHUNK_ROWS, _CHUNK_BYTES = 1_000_000, 128 << 20
_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class KeyColumns:
    """The key columns, by their positions in the rows."""

    columns: tuple[int, ...]

    def of(self, table: pa.Table) -> list[pa.Array]:
        return [table.column(place).combine_chunks() for place in self.columns]


@dataclass(frozen=True)
class PackRows:
    """Drops what cannot be among the first rows of its key, and makes parcels of the rest, in order."""

    key: KeyColumns
    rows: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._packed(batches))

    def _packed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        # Tasks are in the order of the source's partitions, and of the ranges within one.
        number = 0 if context is None else context.partitionId() << 32
        for chunk in _chunks(batches):
            table = first_rows_of_keys(chunk, self.key, self.rows)
            for packed in shuffle_batches.pack(
                table, self._targets(table), shuffle_batches.shuffle_keys(PLACES)
            ):
                order = np.arange(number, number + packed.num_rows)
                number += packed.num_rows
                yield pa.RecordBatch.from_arrays([*packed.columns, pa.array(order)], schema=PACKED)

    def _targets(self, table: pa.Table) -> Any:
        names = [str(place) for place in range(len(self.key.columns))]
        hashes = key_hash(pa.RecordBatch.from_arrays(self.key.of(table), names), names).to_numpy()
        return (hashes % np.uint32(PLACES)).astype(np.uint8)


def first_rows_of_keys(table: pa.Table, key: KeyColumns, rows: int) -> pa.Table:
    """The first rows of each key."""
    among = cumcount(factorize(key.of(table)).values) < rows
    return table if among.all() else table.filter(pa.array(among))


@dataclass(frozen=True)
class CountInState:
    """The rows of one place that are among the first of their keys, over all micro-batches: for ``applyInPandasWithState``."""

    key: KeyColumns
    rows: int
    forget_ms: int | None

    def __call__(
        self, place: tuple[int], frames: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        # All of them before the next one is asked for: they are views of one buffer.
        packed = [pair for frame in frames for pair in zip(frame[ORDER], frame[ROWS], strict=True)]
        if not packed:
            return
        table = pa.concat_tables([_opened(rows) for _, rows in sorted(packed, key=lambda pair: pair[0])])
        keys = self.key.of(table)
        seen = KeyCounts.from_bytes(state.get[0]) if state.exists else KeyCounts.nothing(keys)
        now = 0
        if self.forget_ms is not None:
            # Of the micro-batch, the same when it is repeated.
            now = state.getCurrentProcessingTimeMs()
            seen = seen.since(now - self.forget_ms, now)
        passes, after = seen.take(keys, self.rows, now)
        if passes.any() or self.forget_ms is not None:
            state.update((after.to_bytes(),))
        if passes.any():
            rows = table.filter(pa.array(passes))
            yield pd.DataFrame({PLACE: [place[0]], ROWS: [_closed(rows)]})


@dataclass(frozen=True)
class FirstRowsOfBatch:
    """The same where all rows are there at once: a batch."""

    key: KeyColumns
    rows: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found: list[tuple[int, int, pa.Scalar]] = []
        for batch in batches:
            places, rows, order = (
                batch.column(PACKED.get_field_index(each)) for each in (PLACE, ROWS, ORDER)
            )
            found += zip(places.to_pylist(), order.to_pylist(), rows, strict=True)
        found.sort(key=lambda each: each[:2])
        for _, packed in groupby(found, key=lambda each: each[0]):
            table = pa.concat_tables([_opened(rows.as_buffer()) for *_, rows in packed])
            yield from first_rows_of_keys(table, self.key, self.rows).to_batches(max_chunksize=_BATCH_ROWS)


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of a bounded size, none of them empty."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(held)


def _opened(rows: Any) -> pa.Table:
    return pa.ipc.open_stream(rows).read_all()


def _closed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
