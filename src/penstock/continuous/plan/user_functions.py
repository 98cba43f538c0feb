"""A user's mapInArrow and mapInPandas functions in a continuous query.

They are called for each run of rows between markers and fillers. A function gets only rows and ends where the
run ends. Markers and fillers bypass it in their order, as copies of the last row that it returned, or as
nulls if it has not returned one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.types import StructType

from penstock.continuous.plan.metadata_columns import EPOCH, HIDDEN, KIND
from penstock.errors import SchemaMismatch
from penstock.spark.internals.arrow_types import arrow_schema, round_trip_type
from penstock.spark.internals.udf_wrapper import ROW

Function = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True)
class _Piece:
    """Consecutive rows of a batch: real ones of one epoch, or markers and fillers."""

    real: bool
    rows: Any
    """The rows without the metadata columns."""
    kind: Any
    epoch: Any


class _Batches(Protocol):
    """Operations on batches of one library."""

    def hidden(self, batch: Any) -> tuple[Any, Any]:
        """Return the two metadata columns as numpy arrays."""

    def part(self, batch: Any, start: int, end: int) -> Any:
        """Return some rows, without the metadata columns."""

    def checked(self, returned: Any) -> Any:
        """Check what the user's function returned, and return it ready for Spark."""

    def last(self, rows: Any) -> Any:
        """Return the last row."""

    def copies(self, row: Any, count: int) -> Any:
        """Return copies of a row, or of nulls without one."""

    def joined(self, rows: Any, kind: Any, epoch: Any) -> Any:
        """Return rows with the metadata columns."""


def arrow_runs(function: Function, schema: StructType) -> Function:
    """Wrap a user's function for `mapInArrow` over the carried frame; it returns rows of a schema."""
    return _Runs(function, _Arrow(schema))


def pandas_runs(function: Function, schema: StructType) -> Function:
    """Wrap a user's function for `mapInPandas` over the carried frame; it returns rows of a schema."""
    return _Runs(function, _Pandas(schema))


class _Runs:
    def __init__(self, function: Function, batches: _Batches) -> None:
        self._function = function
        self._batches = batches

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        pieces = _Pieces(self._pieces(batches))
        last = None
        while (piece := pieces.peek()) is not None:
            if not piece.real:
                pieces.take()
                copies = self._batches.copies(last, len(piece.kind))
                yield self._batches.joined(copies, piece.kind, piece.epoch)
                continue
            for out in self._function(pieces.run()):
                rows = self._batches.checked(out)
                if not len(rows):
                    continue
                last = self._batches.last(rows)
                kind = np.full(len(rows), ROW, dtype=np.int8)
                yield self._batches.joined(rows, kind, np.full(len(rows), piece.epoch[0], dtype=np.int64))
            pieces.drop_run()

    def _pieces(self, batches: Iterator[Any]) -> Iterator[_Piece]:
        for batch in batches:
            kind, epoch = self._batches.hidden(batch)
            signal = kind != ROW
            edges = [0, *(np.flatnonzero(signal[1:] != signal[:-1]) + 1).tolist(), len(kind)]
            for start, end in pairwise(edges):
                if start < end:
                    rows = self._batches.part(batch, start, end)
                    yield _Piece(not signal[start], rows, kind[start:end], epoch[start:end])


class _Pieces:
    """Iterator over the pieces of a stream that can peek at the next one."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._next: _Piece | None = None

    def peek(self) -> _Piece | None:
        if self._next is None:
            self._next = next(self._pieces, None)
        return self._next

    def take(self) -> Any:
        taken, self._next = self._next, None
        return taken

    def run(self) -> Iterator[Any]:
        """Yield the rows up to the next marker or filler."""
        while (piece := self.peek()) is not None and piece.real:
            self.take()
            yield piece.rows

    def drop_run(self) -> None:
        for _ in self.run():
            pass


class _Arrow:
    def __init__(self, schema: StructType) -> None:
        self._schema = schema
        fields = arrow_schema(schema)
        self._fields: list[pa.Field] = [pa.field(field.name, field.type) for field in fields]

    def hidden(self, batch: pa.RecordBatch) -> tuple[Any, Any]:
        count = batch.num_columns
        kind, epoch = batch.column(count - 2), batch.column(count - 1)
        return kind.to_numpy(zero_copy_only=False), epoch.to_numpy(zero_copy_only=False)

    def part(self, batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
        return batch.select(list(range(batch.num_columns - 2))).slice(start, end - start)

    def checked(self, returned: Any) -> pa.RecordBatch:
        if not isinstance(returned, pa.RecordBatch):
            raise _wrong_type("pyarrow.RecordBatch", returned)
        if returned.num_columns != len(self._fields) and not (returned.num_columns == 0 == returned.num_rows):
            raise _wrong_columns("mapInArrow", returned.schema.names, [field.name for field in self._fields])
        return returned

    def last(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        # A slice would keep Spark's whole batch alive.
        return rows.take(pa.array([rows.num_rows - 1]))

    def copies(self, row: pa.RecordBatch | None, count: int) -> pa.RecordBatch:
        if row is None:
            columns = [pa.nulls(count, field.type) for field in self._fields]
            return pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._fields))
        return row.take(pa.array(np.zeros(count, dtype=np.int64)))

    def joined(self, rows: pa.RecordBatch, kind: Any, epoch: Any) -> pa.RecordBatch:
        columns = [
            self._as_declared(*pair) for pair in zip(rows.columns, range(len(rows.columns)), strict=True)
        ]
        fields = [
            pa.field(field.name, column.type) for field, column in zip(self._fields, columns, strict=True)
        ]
        columns += [pa.array(kind, HIDDEN.field(0).type), pa.array(epoch, HIDDEN.field(1).type)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, *HIDDEN]))

    def _as_declared(self, column: pa.Array, place: int) -> pa.Array:
        """Cast to the Arrow type of the stream, which all batches must share.

        Spark refuses types that differ for it, too.
        """
        expected = self._fields[place].type
        if column.type.equals(expected):
            return column
        return column.cast(expected) if round_trip_type(column.type) == expected else column


class _Pandas:
    def __init__(self, schema: StructType) -> None:
        self._names = schema.names

    def hidden(self, batch: Any) -> tuple[Any, Any]:
        return batch.iloc[:, -2].to_numpy(), batch.iloc[:, -1].to_numpy()

    def part(self, batch: Any, start: int, end: int) -> Any:
        return batch.iloc[start:end, :-2].reset_index(drop=True)

    def checked(self, returned: Any) -> Any:
        import pandas as pd

        if not isinstance(returned, pd.DataFrame):
            raise _wrong_type("pandas.DataFrame", returned)
        named = any(isinstance(name, str) for name in returned.columns)
        if returned.empty and len(returned.columns) == 0:
            return returned
        # By name, or by position if there are no names, as Spark does.
        if named:
            missing = [name for name in self._names if name not in returned.columns]
        else:
            missing = [] if len(returned.columns) == len(self._names) else self._names
        if missing:
            raise _wrong_columns("mapInPandas", list(returned.columns), self._names)
        return returned[self._names] if named else returned.set_axis(self._names, axis=1)

    def last(self, rows: Any) -> Any:
        return rows.iloc[-1:].copy()

    def copies(self, row: Any, count: int) -> Any:
        import pandas as pd

        if row is None:
            return pd.DataFrame({name: [None] * count for name in self._names}, dtype=object)
        return row.iloc[np.zeros(count, dtype=np.int64)]

    def joined(self, rows: Any, kind: Any, epoch: Any) -> Any:
        return rows.reset_index(drop=True).assign(**{KIND: kind, EPOCH: epoch})


def _wrong_type(expected: str, returned: Any) -> PySparkTypeError:
    return PySparkTypeError(
        errorClass="UDF_RETURN_TYPE",
        messageParameters={
            "expected": f"iterator of {expected}",
            "actual": f"iterator of {type(returned).__name__}",
        },
    )


def _wrong_columns(operation: str, returned: list[Any], expected: list[str]) -> SchemaMismatch:
    return SchemaMismatch(
        f"The function of {operation} returned the columns {returned}, and its schema has {expected}; they "
        "must be the same.",
        given=returned,
        expected=expected,
    )
