"""Wrappers of users' Python functions, in Python workers, that call them with real rows only, without markers
and fillers.

A wrapped function takes the kind of each row as an additional first argument. It returns nulls for markers
and fillers, which nothing reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import SchemaMismatch
from penstock.spark.internals.arrow_types import arrow_type, parse_type

Function = Callable[..., Any]
ROW = 0
"""The kind of a real row, the default of a number; markers and fillers have other kinds."""


def wrap_command(command: bytes, eval_type: int, return_type: str) -> bytes:
    """Wrap a pickled Python function as Spark holds it.

    Parameters
    ----------
    command
        The pickled function and its return type, or a pickled broadcast of that.
    eval_type
        Spark's number for the kind of function.
    return_type
        The return type as Spark's JSON.
    """
    pickled: bytes = _pickles().dumps((_Pickled(command, eval_type), parse_type(return_type)))
    return pickled


def _pickles() -> Any:
    from pyspark.serializers import CloudPickleSerializer

    untyped: Any = CloudPickleSerializer
    return untyped()


class _Pickled:
    """Unpickles as a wrapped function, so that the user's own is unpickled in the worker, as Spark would do
    it.
    """

    def __init__(self, command: bytes, eval_type: int) -> None:
        self._arguments = command, eval_type

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap_function, self._arguments


def wrap_function(command: bytes, eval_type: int) -> Function:
    """Return the wrapped function, in a Python worker; the parameters are those of `wrap_command`."""
    from pyspark.broadcast import Broadcast
    from pyspark.util import PythonEvalType

    unpickled = _pickles().loads(command)
    if isinstance(unpickled, Broadcast):
        unpickled = _pickles().loads(unpickled.value)
    function, return_type = unpickled
    if eval_type == PythonEvalType.SQL_SCALAR_PANDAS_UDF:
        return _by_columns(function, _Pandas(return_type))
    if eval_type == PythonEvalType.SQL_SCALAR_ARROW_UDF:
        return _by_columns(function, _Arrow(return_type))
    if eval_type == PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF:
        return _by_batches(function, _Pandas(return_type))
    if eval_type == PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF:
        return _by_batches(function, _Arrow(return_type))
    return _by_rows(function)


def _by_rows(function: Function) -> Function:
    def call(kind: int, *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named) if kind == ROW else None

    return call


class _Columns(Protocol):
    """Operations on the columns of one library."""

    def rows(self, kind: Any) -> Any:
        """Return the indices of the real rows."""

    def result_indices(self, rows: Any, count: int) -> Any:
        """Return the index of the result for each of `count` rows; markers and fillers get any."""

    def take(self, column: Any, indices: Any) -> Any: ...

    def last(self, column: Any) -> Any:
        """Return a column of the last value."""

    def nulls(self, count: int) -> Any:
        """Return a column of `count` nulls."""


def _by_columns(function: Function, columns: _Columns) -> Function:
    def call(kind: Any, *arguments: Any, **named: Any) -> Any:
        count, rows = len(kind), columns.rows(kind)
        if len(rows) == count:
            return function(*arguments, **named)
        if not len(rows):
            return columns.nulls(count)
        result = function(
            *[columns.take(column, rows) for column in arguments],
            **{name: columns.take(column, rows) for name, column in named.items()},
        )
        return columns.take(_checked(result, len(rows)), columns.result_indices(rows, count))

    return call


def _by_batches(function: Function, columns: _Columns) -> Function:
    """Wrap a function over an iterator of batches.

    Instead of a batch without real rows the function gets the last row once more, and its result is dropped.
    It must get something, since it may read a batch before it returns the previous one.
    """

    def call(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            kind = batch[0] if isinstance(batch, tuple) else batch
            if len(columns.rows(kind)):
                sent: deque[tuple[int, int, Any]] = deque()
                results = function(_real_rows(batch, batches, columns, sent))
                yield from _restored(results, sent, columns)
                return
            yield columns.nulls(len(kind))

    return call


def _real_rows(
    batch: Any, batches: Iterator[Any], columns: _Columns, sent: deque[tuple[int, int, Any]]
) -> Iterator[Any]:
    """Yield the batches for the function, and note the length of each, its real rows and their indices."""
    last: list[Any] = []
    while batch is not None:
        kind, *arguments = batch if isinstance(batch, tuple) else (batch,)
        count, rows = len(kind), columns.rows(kind)
        if len(rows):
            if len(rows) < count:
                arguments = [columns.take(column, rows) for column in arguments]
            last = [columns.last(column) for column in arguments]
            sent.append((count, len(rows), rows))
        else:
            arguments = last
            sent.append((count, 1, None))
        yield arguments[0] if len(arguments) == 1 else tuple(arguments)
        batch = next(batches, None)


def _restored(results: Iterator[Any], sent: deque[tuple[int, int, Any]], columns: _Columns) -> Iterator[Any]:
    """Expand the results to the rows of the original batches."""
    for result in results:
        if not sent:
            raise SchemaMismatch("A function over an iterator of batches returned more batches than it got.")
        count, expected, rows = sent.popleft()
        _checked(result, expected)
        if rows is None:
            yield columns.nulls(count)
        elif expected == count:
            yield result
        else:
            yield columns.take(result, columns.result_indices(rows, count))


def _checked(result: Any, expected: int) -> Any:
    if len(result) != expected:
        raise SchemaMismatch(
            f"A function over batches of rows returned {len(result)} values for {expected} rows; "
            "in a continuous query it must return one for each row of each batch."
        )
    return result


def _result_indices(rows: Any, count: int) -> Any:
    import numpy as np

    indices = np.zeros(count, dtype=np.int64)
    indices[rows] = np.arange(len(rows))
    return indices


class _Pandas:
    def __init__(self, return_type: Any) -> None:
        self._return_type = return_type

    def rows(self, kind: Any) -> Any:
        return (kind.to_numpy() == ROW).nonzero()[0]

    def result_indices(self, rows: Any, count: int) -> Any:
        return _result_indices(rows, count)

    def take(self, column: Any, indices: Any) -> Any:
        import pandas as pd

        series = column if hasattr(column, "iloc") else pd.Series(column)
        return series.iloc[indices].reset_index(drop=True)

    def last(self, column: Any) -> Any:
        return column.iloc[-1:].reset_index(drop=True)

    def nulls(self, count: int) -> Any:
        import pandas as pd
        from pyspark.sql.types import StructType

        if isinstance(self._return_type, StructType):
            return pd.DataFrame({name: [None] * count for name in self._return_type.names}, dtype=object)
        return pd.Series([None] * count, dtype=object)


class _Arrow:
    def __init__(self, return_type: Any) -> None:
        self._return_type = return_type

    def rows(self, kind: pa.Array) -> pa.Array:
        return pc.indices_nonzero(pc.equal(kind, ROW))

    def result_indices(self, rows: pa.Array, count: int) -> pa.Array:
        return pa.array(_result_indices(rows.to_numpy(zero_copy_only=False), count))

    def take(self, column: pa.Array, indices: pa.Array) -> pa.Array:
        return column.take(indices)

    def last(self, column: pa.Array) -> pa.Array:
        return column.slice(len(column) - 1)

    def nulls(self, count: int) -> pa.Array:
        return pa.nulls(count, arrow_type(self._return_type))
