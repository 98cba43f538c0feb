"""A user's mapInArrow and mapInPandas in a continuous query: called anew for each run of rows between markers and fillers.

The function gets its rows and nothing else, and ends where the run ends; markers and fillers pass it by, each in its place, as
copies of the last row that it gave, or as nulls where it has given none yet.
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
    """Rows of a batch that belong together: real ones of one epoch, or markers and fillers."""

    real: bool
    rows: Any
    """Without the hidden columns."""
    kind: Any
    epoch: Any


class _Batches(Protocol):
    """How batches of one kind are taken apart and put together."""

    def hidden(self, batch: Any) -> tuple[Any, Any]:
        """The two hidden columns, as numpy arrays."""

    def part(self, batch: Any, start: int, end: int) -> Any:
        """Some rows, without the hidden columns."""

    def checked(self, given: Any) -> Any:
        """What the user's function gave, ready for Spark."""

    def last(self, rows: Any) -> Any:
        """The last row, to be copied."""

    def copies(self, row: Any, count: int) -> Any:
        """`count` copies of a row, or of nulls where there is none."""

    def joined(self, rows: Any, kind: Any, epoch: Any) -> Any:
        """Rows with the hidden columns."""


def arrow_runs(function: Function, schema: StructType) -> Function:
    """The function for `mapInArrow` over the carried frame that stands for a user's.

    Parameters
    ----------
    function
        The user's: an iterator of ``pyarrow.RecordBatch`` to another.
    schema
        What it gives.
    """
    return _Runs(function, _Arrow(schema))


def pandas_runs(function: Function, schema: StructType) -> Function:
    """The same for `mapInPandas`."""
    return _Runs(function, _Pandas(schema))


class _Runs:
    def __init__(self, function: Function, batches: _Batches) -> None:
        self._function = function
        self._batches = batches

    def __call__(self, given: Iterator[Any]) -> Iterator[Any]:
        pieces = _Pieces(self._pieces(given))
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

    def _pieces(self, given: Iterator[Any]) -> Iterator[_Piece]:
        for batch in given:
            kind, epoch = self._batches.hidden(batch)
            signal = kind != ROW
            edges = [0, *(np.flatnonzero(signal[1:] != signal[:-1]) + 1).tolist(), len(kind)]
            for start, end in pairwise(edges):
                if start < end:
                    rows = self._batches.part(batch, start, end)
                    yield _Piece(not signal[start], rows, kind[start:end], epoch[start:end])


class _Pieces:
    """The pieces of a stream, with a look at the next one."""

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
        """The rows up to the next marker or filler."""
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

    def checked(self, given: Any) -> pa.RecordBatch:
        if not isinstance(given, pa.RecordBatch):
            raise _wrong_type("pyarrow.RecordBatch", given)
        if given.num_columns != len(self._fields) and not (given.num_columns == 0 == given.num_rows):
            raise _wrong_columns("mapInArrow", given.schema.names, [field.name for field in self._fields])
        return given

    def last(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        # Spark's batches live on in a slice of them.
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
        """In the one Arrow type that every batch has, as a stream must; a type that is another to Spark is left for it to refuse."""
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

    def checked(self, given: Any) -> Any:
        import pandas as pd

        if not isinstance(given, pd.DataFrame):
            raise _wrong_type("pandas.DataFrame", given)
        named = any(isinstance(name, str) for name in given.columns)
        if given.empty and len(given.columns) == 0:
            return given
        # By name, or by place where there are no names, as Spark does.
        if named:
            missing = [name for name in self._names if name not in given.columns]
        else:
            missing = [] if len(given.columns) == len(self._names) else self._names
        if missing:
            raise _wrong_columns("mapInPandas", list(given.columns), self._names)
        return given[self._names] if named else given.set_axis(self._names, axis=1)

    def last(self, rows: Any) -> Any:
        return rows.iloc[-1:].copy()

    def copies(self, row: Any, count: int) -> Any:
        import pandas as pd

        if row is None:
            return pd.DataFrame({name: [None] * count for name in self._names}, dtype=object)
        return row.iloc[np.zeros(count, dtype=np.int64)]

    def joined(self, rows: Any, kind: Any, epoch: Any) -> Any:
        return rows.reset_index(drop=True).assign(**{KIND: kind, EPOCH: epoch})


def _wrong_type(expected: str, given: Any) -> PySparkTypeError:
    return PySparkTypeError(
        errorClass="UDF_RETURN_TYPE",
        messageParameters={
            "expected": f"iterator of {expected}",
            "actual": f"iterator of {type(given).__name__}",
        },
    )


def _wrong_columns(operation: str, given: list[Any], expected: list[str]) -> SchemaMismatch:
    return SchemaMismatch(
        f"The function of {operation} gave the columns {given}, and its schema has {expected}; they must be the same.",
        given=given,
        expected=expected,
    )
