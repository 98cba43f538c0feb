"""A user's mapInArrow and mapInPandas functions in a continuous query.

A function is called once for each run of source rows between markers and fillers. Markers and fillers bypass
the function: they stay in their place, as rows of nulls.
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

from penstock.continuous.channel import EPOCH, KIND, METADATA_COLUMNS
from penstock.errors import SchemaMismatchError
from penstock.spark.internals.python_workers import arrow_schema, round_trip_type
from penstock.spark.internals.udf_wrapper import ROW

if TYPE_CHECKING:
    import pandas as pd

Batch = TypeVar("Batch", bound=Sized)
"""A batch of rows: a ``pyarrow.RecordBatch`` or a ``pandas.DataFrame``."""
Function = Callable[[Iterator[Batch]], Iterator[Batch]]
Kinds = NDArray[np.int8]
EpochNumbers = NDArray[np.int64]


@dataclass(frozen=True)
class _Slice(Generic[Batch]):
    """Consecutive rows of a batch: either source rows of one epoch, or markers and fillers."""

    from_source: bool
    rows: Batch
    """The rows without the metadata columns."""
    kinds: Kinds
    epochs: EpochNumbers


class _BatchOperations(Protocol[Batch]):
    """Operations on the batches of one library."""

    def metadata(self, batch: Batch) -> tuple[Kinds, EpochNumbers]: ...

    def slice_rows(self, batch: Batch, start: int, end: int) -> Batch:
        """Return rows without the metadata columns."""

    def check_result(self, returned: object) -> Batch:
        """Check what the user's function returned; return it ready for Spark."""

    def null_rows(self, count: int) -> Batch:
        """Return rows of nulls."""

    def add_metadata(self, rows: Batch, kinds: Kinds, epochs: EpochNumbers) -> Batch:
        """Return rows with the metadata columns."""


def wrap_arrow_function(function: Function[pa.RecordBatch], schema: StructType) -> Function[pa.RecordBatch]:
    """Wrap a user's function, which returns rows of this schema, for `mapInArrow` with metadata columns."""
    return _RunFunction(function, _ArrowOperations(schema))


def wrap_pandas_function(function: Function[pd.DataFrame], schema: StructType) -> Function[pd.DataFrame]:
    """Wrap a user's function, which returns rows of this schema, for `mapInPandas` with metadata columns."""
    return _RunFunction(function, _PandasOperations(schema))


class _RunFunction(Generic[Batch]):
    def __init__(self, function: Function[Batch], operations: _BatchOperations[Batch]) -> None:
        self._function = function
        self._operations = operations

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        # groupby skips rows of a run that the function does not read.
        for from_source, run in groupby(self._slices(batches), key=lambda part: part.from_source):
            if not from_source:
                for part in run:
                    nulls = self._operations.null_rows(len(part.kinds))
                    yield self._operations.add_metadata(nulls, part.kinds, part.epochs)
                continue
            first = next(run)
            for returned in self._function(part.rows for part in chain([first], run)):
                rows = self._operations.check_result(returned)
                if not len(rows):
                    continue
                kinds = np.full(len(rows), ROW, dtype=np.int8)
                yield self._operations.add_metadata(
                    rows, kinds, np.full(len(rows), first.epochs[0], dtype=np.int64)
                )

    def _slices(self, batches: Iterator[Batch]) -> Iterator[_Slice[Batch]]:
        for batch in batches:
            kinds, epochs = self._operations.metadata(batch)
            is_signal = kinds != ROW
            boundaries = [0, *(np.flatnonzero(is_signal[1:] != is_signal[:-1]) + 1).tolist(), len(kinds)]
            for start, end in pairwise(boundaries):
                if start < end:
                    rows = self._operations.slice_rows(batch, start, end)
                    yield _Slice(not is_signal[start], rows, kinds[start:end], epochs[start:end])


class _ArrowOperations:
    def __init__(self, schema: StructType) -> None:
        self._fields = [pa.field(field.name, field.type) for field in arrow_schema(schema)]

    def metadata(self, batch: pa.RecordBatch) -> tuple[Kinds, EpochNumbers]:
        kinds, epochs = batch.columns[-2:]
        return kinds.to_numpy(zero_copy_only=False), epochs.to_numpy(zero_copy_only=False)

    def slice_rows(self, batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
        return batch.select(list(range(batch.num_columns - 2))).slice(start, end - start)

    def check_result(self, returned: object) -> pa.RecordBatch:
        if not isinstance(returned, pa.RecordBatch):
            raise _return_type_error("pyarrow.RecordBatch", returned)
        if returned.num_columns != len(self._fields) and not (returned.num_columns == 0 == returned.num_rows):
            raise _columns_error("mapInArrow", returned.schema.names, [field.name for field in self._fields])
        return returned

    def null_rows(self, count: int) -> pa.RecordBatch:
        columns = [pa.nulls(count, field.type) for field in self._fields]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._fields))

    def add_metadata(self, rows: pa.RecordBatch, kinds: Kinds, epochs: EpochNumbers) -> pa.RecordBatch:
        declared = zip(rows.columns, self._fields, strict=True)
        columns = [_cast_to_declared(column, field.type) for column, field in declared]
        own = zip(self._fields, columns, strict=True)
        fields = [pa.field(field.name, column.type) for field, column in own]
        columns += [
            pa.array(kinds, METADATA_COLUMNS.field(0).type),
            pa.array(epochs, METADATA_COLUMNS.field(1).type),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, *METADATA_COLUMNS]))


def _cast_to_declared(column: pa.Array, expected: pa.DataType) -> pa.Array:
    """Cast a column to the stream's Arrow type, if Spark has the same type for both."""
    if column.type.equals(expected) or round_trip_type(column.type) != expected:
        return column
    return column.cast(expected)


class _PandasOperations:
    def __init__(self, schema: StructType) -> None:
        self._names = schema.names

    def metadata(self, batch: pd.DataFrame) -> tuple[Kinds, EpochNumbers]:
        return batch.iloc[:, -2].to_numpy(), batch.iloc[:, -1].to_numpy()

    def slice_rows(self, batch: pd.DataFrame, start: int, end: int) -> pd.DataFrame:
        return batch.iloc[start:end, :-2].reset_index(drop=True)

    def check_result(self, returned: object) -> pd.DataFrame:
        import pandas as pd

        if not isinstance(returned, pd.DataFrame):
            raise _return_type_error("pandas.DataFrame", returned)
        by_name = any(isinstance(name, str) for name in returned.columns)
        if returned.empty and len(returned.columns) == 0:
            return returned
        # Match columns by name, or, without names, by position, as Spark does.
        if by_name:
            missing = [name for name in self._names if name not in returned.columns]
        else:
            missing = [] if len(returned.columns) == len(self._names) else self._names
        if missing:
            raise _columns_error("mapInPandas", list(returned.columns), self._names)
        return returned[self._names] if by_name else returned.set_axis(self._names, axis=1)

    def null_rows(self, count: int) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame({name: [None] * count for name in self._names}, dtype=object)

    def add_metadata(self, rows: pd.DataFrame, kinds: Kinds, epochs: EpochNumbers) -> pd.DataFrame:
        return rows.reset_index(drop=True).assign(**{KIND: kinds, EPOCH: epochs})


def _return_type_error(expected: str, returned: object) -> PySparkTypeError:
    parameters = {"expected": f"iterator of {expected}", "actual": f"iterator of {type(returned).__name__}"}
    return PySparkTypeError(errorClass="UDF_RETURN_TYPE", messageParameters=parameters)


def _columns_error(operation: str, returned: list[object], expected: list[str]) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"the function of {operation} returned the columns {returned}, but its schema has {expected}: make "
        "them match",
        condition="SCHEMA_MISMATCH.FUNCTION_RESULT",
        given=returned,
        expected=expected,
    )
