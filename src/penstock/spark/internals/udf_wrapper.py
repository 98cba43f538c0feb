"""Wrappers that call users' Python functions only with rows of the source, without markers and fillers.

A wrapped function gets the kind of each row as an additional first argument. For markers and fillers it
returns nulls, which are not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.types import DataType, StructType

from penstock.errors import SchemaMismatchError
from penstock.spark.internals.python_workers import arrow_type, parse_type

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.serializers import CloudPickleSerializer


Indices = NDArray[np.int64]
Function = Callable[..., object]
ROW = 0
"""The kind of a row of the source; markers and fillers have other kinds. It is a number's default value."""


def wrap_command(command: bytes, eval_type: int, return_type: str) -> bytes:
    """Wrap a Python function, which Spark holds as a pickled function and return type, or a broadcast of
    these.

    ``eval_type`` is Spark's number for the kind of function, and ``return_type`` is JSON.
    """
    wrapped = _PickledFunction(command, eval_type), parse_type(return_type)
    return bytes(_serializer().dumps(wrapped))  # type: ignore[no-untyped-call]  # Spark's


def _serializer() -> CloudPickleSerializer:
    from pyspark.serializers import CloudPickleSerializer as Serializer

    return Serializer()  # type: ignore[no-untyped-call]  # Spark's


class _PickledFunction:
    """Unpickles as a wrapped function, so that the user's function is unpickled in the worker."""

    def __init__(self, command: bytes, eval_type: int) -> None:
        self._arguments = command, eval_type

    def __reduce__(self) -> tuple[Callable[[bytes, int], Function], tuple[bytes, int]]:
        return wrap_function, self._arguments


def wrap_function(command: bytes, eval_type: int) -> Function:
    """Return the wrapped function, in a Python worker; for the parameters, see `wrap_command`."""
    from pyspark.broadcast import Broadcast
    from pyspark.util import PythonEvalType

    serializer = _serializer()
    unpickled = serializer.loads(command)  # type: ignore[no-untyped-call]  # Spark's
    if isinstance(unpickled, Broadcast):
        unpickled = serializer.loads(unpickled.value)  # type: ignore[no-untyped-call]  # Spark's
    function, return_type = unpickled
    if eval_type == PythonEvalType.SQL_SCALAR_PANDAS_UDF:
        return _wrap_column_function(function, _PandasOperations(return_type))
    if eval_type == PythonEvalType.SQL_SCALAR_ARROW_UDF:
        return _wrap_column_function(function, _ArrowOperations(return_type))
    if eval_type == PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF:
        return _wrap_batch_function(function, _PandasOperations(return_type))
    if eval_type == PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF:
        return _wrap_batch_function(function, _ArrowOperations(return_type))
    return _wrap_row_function(function)


def _wrap_row_function(function: Function) -> Function:
    def call(kind: int, *arguments: object, **named: object) -> object:
        return function(*arguments, **named) if kind == ROW else None

    return call


ColumnT = TypeVar("ColumnT", bound=Sized)
"""A column of values: a ``pyarrow.Array``, or a ``pandas.Series`` (a ``DataFrame`` for a struct)."""
Batch: TypeAlias = ColumnT | tuple[ColumnT, ...]


class _ColumnOperations(Protocol[ColumnT]):
    """Operations on the columns of one library."""

    def source_rows(self, kinds: ColumnT) -> Indices:
        """Return the indices of rows of the source."""

    def take(self, column: ColumnT, indices: Indices) -> ColumnT: ...

    def null_column(self, count: int) -> ColumnT: ...


def _wrap_column_function(
    function: Callable[..., ColumnT], operations: _ColumnOperations[ColumnT]
) -> Callable[..., ColumnT]:
    def call(kinds: ColumnT, *arguments: ColumnT, **named: ColumnT) -> ColumnT:
        count, rows = len(kinds), operations.source_rows(kinds)
        if len(rows) == count:
            return function(*arguments, **named)
        if not len(rows):
            return operations.null_column(count)
        result = function(
            *[operations.take(column, rows) for column in arguments],
            **{name: operations.take(column, rows) for name, column in named.items()},
        )
        return operations.take(_check_length(result, len(rows)), _result_indices(rows, count))

    return call


@dataclass(frozen=True)
class _PassedBatch:
    """A batch that was passed to a function: its length, and the indices of its source rows."""

    count: int
    rows: Indices | None
    """None for a batch without source rows; the function got the last row again instead."""


def _wrap_batch_function(
    function: Callable[[Iterator[Batch[ColumnT]]], Iterator[ColumnT]], operations: _ColumnOperations[ColumnT]
) -> Callable[[Iterator[Batch[ColumnT]]], Iterator[ColumnT]]:
    """Wrap a function that takes an iterator of batches.

    Instead of a batch without source rows, the function gets the last row again, and the result is dropped.
    The function must get something, because it may read a batch before it returns the result of the previous
    one.
    """

    def call(batches: Iterator[Batch[ColumnT]]) -> Iterator[ColumnT]:
        for batch in batches:
            kinds = batch[0] if isinstance(batch, tuple) else batch
            if len(operations.source_rows(kinds)):
                passed: deque[_PassedBatch] = deque()
                results = function(_source_rows(chain([batch], batches), operations, passed))
                yield from _restore_rows(results, passed, operations)
                return
            yield operations.null_column(len(kinds))

    return call


def _source_rows(
    batches: Iterator[Batch[ColumnT]], operations: _ColumnOperations[ColumnT], passed: deque[_PassedBatch]
) -> Iterator[Batch[ColumnT]]:
    """Yield the batches for the function, and record them in ``passed``; the first has a source row."""
    last: list[ColumnT] = []
    for batch in batches:
        kinds, *arguments = batch if isinstance(batch, tuple) else (batch,)
        count, rows = len(kinds), operations.source_rows(kinds)
        if len(rows):
            if len(rows) < count:
                arguments = [operations.take(column, rows) for column in arguments]
            last = [operations.take(column, np.array([len(rows) - 1])) for column in arguments]
            passed.append(_PassedBatch(count, rows))
        else:
            arguments = last
            passed.append(_PassedBatch(count, None))
        yield arguments[0] if len(arguments) == 1 else tuple(arguments)


def _restore_rows(
    results: Iterator[ColumnT], passed: deque[_PassedBatch], operations: _ColumnOperations[ColumnT]
) -> Iterator[ColumnT]:
    """Expand the results to the rows of the original batches."""
    for result in results:
        if not passed:
            raise SchemaMismatchError(
                "a function over an iterator of batches returned more batches than it got: return one for "
                "each batch",
                condition="SCHEMA_MISMATCH.FUNCTION_RESULT",
            )
        batch = passed.popleft()
        _check_length(result, 1 if batch.rows is None else len(batch.rows))
        if batch.rows is None:
            yield operations.null_column(batch.count)
        elif len(batch.rows) == batch.count:
            yield result
        else:
            yield operations.take(result, _result_indices(batch.rows, batch.count))


def _check_length(result: ColumnT, expected: int) -> ColumnT:
    if len(result) != expected:
        raise SchemaMismatchError(
            f"a function over batches of rows returned {len(result)} values for {expected} rows: "
            "in a continuous query, return one for each row of each batch",
            condition="SCHEMA_MISMATCH.FUNCTION_RESULT",
        )
    return result


def _result_indices(rows: Indices, count: int) -> Indices:
    """Return the index of the result for each of `count` rows; arbitrary for markers and fillers."""
    indices = np.zeros(count, dtype=np.int64)
    indices[rows] = np.arange(len(rows))
    return indices


class _PandasOperations:
    def __init__(self, return_type: DataType) -> None:
        self._return_type = return_type

    def source_rows(self, kinds: pd.Series) -> Indices:
        rows: Indices = (kinds.to_numpy() == ROW).nonzero()[0]
        return rows

    def take(self, column: pd.Series, indices: Indices) -> pd.Series:
        import pandas as pd

        series = column if hasattr(column, "iloc") else pd.Series(column)
        return series.iloc[indices].reset_index(drop=True)

    def null_column(self, count: int) -> pd.Series | pd.DataFrame:
        import pandas as pd

        if isinstance(self._return_type, StructType):
            return pd.DataFrame({name: [None] * count for name in self._return_type.names}, dtype=object)
        return pd.Series([None] * count, dtype=object)


class _ArrowOperations:
    def __init__(self, return_type: DataType) -> None:
        self._return_type = return_type

    def source_rows(self, kinds: pa.Array) -> Indices:
        rows: Indices = pc.indices_nonzero(pc.equal(kinds, ROW)).to_numpy()
        return rows

    def take(self, column: pa.Array, indices: Indices) -> pa.Array:
        return column.take(pa.array(indices))

    def null_column(self, count: int) -> pa.Array:
        return pa.nulls(count, arrow_type(self._return_type))
