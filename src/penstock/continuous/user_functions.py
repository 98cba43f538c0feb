"""A user's mapInArrow and mapInPandas functions in a continuous query.

A function is called for each run of rows between markers and fillers; it gets only these rows, and ends where
the run ends. Markers and fillers bypass it in order, as rows of nulls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.errors import PySparkTypeError
from pyspark.sql.types import StructType

from penstock.continuous.channel import EPOCH, HIDDEN, KIND
from penstock.errors import SchemaMismatchError
from penstock.spark.internals.python_workers import arrow_schema, round_trip_type
from penstock.spark.internals.udf_wrapper import ROW

if TYPE_CHECKING:
    import pandas as pd

B = TypeVar("B", bound=Sized)
"""A batch of rows: a ``pyarrow.RecordBatch`` or a ``pandas.DataFrame``."""
Function = Callable[[Iterator[B]], Iterator[B]]
Kinds = NDArray[np.int8]
EpochNumbers = NDArray[np.int64]


@dataclass(frozen=True)
class _Piece(Generic[B]):
    """Consecutive rows of a batch: real ones of one epoch, or markers and fillers."""

    real: bool
    rows: B
    """The rows without the metadata columns."""
    kind: Kinds
    epoch: EpochNumbers


class _Batches(Protocol[B]):
    """Operations on batches of one library."""

    def hidden(self, batch: B) -> tuple[Kinds, EpochNumbers]: ...

    def part(self, batch: B, start: int, end: int) -> B:
        """Return some rows, without the metadata columns."""

    def checked(self, returned: object) -> B:
        """Check what the user's function returned, and return it ready for Spark."""

    def nulls(self, count: int) -> B:
        """Return rows of nulls."""

    def joined(self, rows: B, kind: Kinds, epoch: EpochNumbers) -> B:
        """Return rows with the metadata columns."""


def arrow_runs(function: Function[pa.RecordBatch], schema: StructType) -> Function[pa.RecordBatch]:
    """Wrap a user's function for `mapInArrow` over the carried frame; it returns rows of a schema."""
    return _Runs(function, _Arrow(schema))


def pandas_runs(function: Function[pd.DataFrame], schema: StructType) -> Function[pd.DataFrame]:
    """Wrap a user's function for `mapInPandas` over the carried frame; it returns rows of a schema."""
    return _Runs(function, _Pandas(schema))


class _Runs(Generic[B]):
    def __init__(self, function: Function[B], batches: _Batches[B]) -> None:
        self._function = function
        self._batches = batches

    def __call__(self, batches: Iterator[B]) -> Iterator[B]:
        # Rows of a run that the function does not read are skipped.
        for real, run in groupby(self._pieces(batches), key=lambda piece: piece.real):
            if not real:
                for piece in run:
                    nulls = self._batches.nulls(len(piece.kind))
                    yield self._batches.joined(nulls, piece.kind, piece.epoch)
                continue
            first = next(run)
            for returned in self._function(piece.rows for piece in chain([first], run)):
                rows = self._batches.checked(returned)
                if not len(rows):
                    continue
                kind = np.full(len(rows), ROW, dtype=np.int8)
                yield self._batches.joined(rows, kind, np.full(len(rows), first.epoch[0], dtype=np.int64))

    def _pieces(self, batches: Iterator[B]) -> Iterator[_Piece[B]]:
        for batch in batches:
            kind, epoch = self._batches.hidden(batch)
            signal = kind != ROW
            edges = [0, *(np.flatnonzero(signal[1:] != signal[:-1]) + 1).tolist(), len(kind)]
            for start, end in pairwise(edges):
                if start < end:
                    rows = self._batches.part(batch, start, end)
                    yield _Piece(not signal[start], rows, kind[start:end], epoch[start:end])


class _Arrow:
    def __init__(self, schema: StructType) -> None:
        self._fields = [pa.field(field.name, field.type) for field in arrow_schema(schema)]

    def hidden(self, batch: pa.RecordBatch) -> tuple[Kinds, EpochNumbers]:
        kind, epoch = batch.columns[-2:]
        return kind.to_numpy(zero_copy_only=False), epoch.to_numpy(zero_copy_only=False)

    def part(self, batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
        return batch.select(list(range(batch.num_columns - 2))).slice(start, end - start)

    def checked(self, returned: object) -> pa.RecordBatch:
        if not isinstance(returned, pa.RecordBatch):
            raise _wrong_type("pyarrow.RecordBatch", returned)
        if returned.num_columns != len(self._fields) and not (returned.num_columns == 0 == returned.num_rows):
            raise _wrong_columns("mapInArrow", returned.schema.names, [field.name for field in self._fields])
        return returned

    def nulls(self, count: int) -> pa.RecordBatch:
        columns = [pa.nulls(count, field.type) for field in self._fields]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._fields))

    def joined(self, rows: pa.RecordBatch, kind: Kinds, epoch: EpochNumbers) -> pa.RecordBatch:
        declared = zip(rows.columns, self._fields, strict=True)
        columns = [_as_declared(column, field.type) for column, field in declared]
        own = zip(self._fields, columns, strict=True)
        fields = [pa.field(field.name, column.type) for field, column in own]
        columns += [pa.array(kind, HIDDEN.field(0).type), pa.array(epoch, HIDDEN.field(1).type)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, *HIDDEN]))


def _as_declared(column: pa.Array, expected: pa.DataType) -> pa.Array:
    """Cast to the stream's Arrow type, which all batches must share; Spark refuses other types, too."""
    if column.type.equals(expected) or round_trip_type(column.type) != expected:
        return column
    return column.cast(expected)


class _Pandas:
    def __init__(self, schema: StructType) -> None:
        self._names = schema.names

    def hidden(self, batch: pd.DataFrame) -> tuple[Kinds, EpochNumbers]:
        return batch.iloc[:, -2].to_numpy(), batch.iloc[:, -1].to_numpy()

    def part(self, batch: pd.DataFrame, start: int, end: int) -> pd.DataFrame:
        return batch.iloc[start:end, :-2].reset_index(drop=True)

    def checked(self, returned: object) -> pd.DataFrame:
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

    def nulls(self, count: int) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame({name: [None] * count for name in self._names}, dtype=object)

    def joined(self, rows: pd.DataFrame, kind: Kinds, epoch: EpochNumbers) -> pd.DataFrame:
        return rows.reset_index(drop=True).assign(**{KIND: kind, EPOCH: epoch})


def _wrong_type(expected: str, returned: object) -> PySparkTypeError:
    names = {"expected": f"iterator of {expected}", "actual": f"iterator of {type(returned).__name__}"}
    return PySparkTypeError(errorClass="UDF_RETURN_TYPE", messageParameters=names)


def _wrong_columns(operation: str, returned: list[object], expected: list[str]) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"the function of {operation} returned the columns {returned}, but its schema has {expected}: make "
        "them match",
        condition="SCHEMA_MISMATCH.FUNCTION_RESULT",
        given=returned,
        expected=expected,
    )
