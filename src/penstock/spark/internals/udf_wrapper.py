"""Wrappers that call users' Python functions with real rows only, without markers and fillers.

A wrapped function takes the kind of each row as an additional first argument. It returns nulls for markers
and fillers, which nothing reads.
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
"""The kind of a real row, the default of a number; markers and fillers have other kinds."""


def wrap_command(command: bytes, eval_type: int, return_type: str) -> bytes:
    """Wrap a pickled Python function with its return type, or a pickled broadcast of that, as Spark holds it.

    ``eval_type`` is Spark's number for the kind of function, and ``return_type`` JSON.
    """
    wrapped = _Pickled(command, eval_type), parse_type(return_type)
    return bytes(_serializer().dumps(wrapped))  # type: ignore[no-untyped-call]  # Spark's


def _serializer() -> CloudPickleSerializer:
    from pyspark.serializers import CloudPickleSerializer as Serializer

    return Serializer()  # type: ignore[no-untyped-call]  # Spark's


class _Pickled:
    """Unpickles as a wrapped function; the user's own is unpickled in the worker, as Spark would do."""

    def __init__(self, command: bytes, eval_type: int) -> None:
        self._arguments = command, eval_type

    def __reduce__(self) -> tuple[Callable[[bytes, int], Function], tuple[bytes, int]]:
        return wrap_function, self._arguments


def wrap_function(command: bytes, eval_type: int) -> Function:
    """Return the wrapped function, in a Python worker; the parameters are those of `wrap_command`."""
    from pyspark.broadcast import Broadcast
    from pyspark.util import PythonEvalType

    serializer = _serializer()
    unpickled = serializer.loads(command)  # type: ignore[no-untyped-call]  # Spark's
    if isinstance(unpickled, Broadcast):
        unpickled = serializer.loads(unpickled.value)  # type: ignore[no-untyped-call]  # Spark's
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
    def call(kind: int, *arguments: object, **named: object) -> object:
        return function(*arguments, **named) if kind == ROW else None

    return call


V = TypeVar("V", bound=Sized)
"""A column of values: a ``pyarrow.Array``, or a ``pandas.Series`` (a ``DataFrame`` for a struct)."""
Batch: TypeAlias = V | tuple[V, ...]


class _Columns(Protocol[V]):
    """Operations on the columns of one library."""

    def rows(self, kind: V) -> Indices:
        """Return the indices of the real rows."""

    def take(self, column: V, indices: Indices) -> V: ...

    def nulls(self, count: int) -> V: ...


def _by_columns(function: Callable[..., V], columns: _Columns[V]) -> Callable[..., V]:
    def call(kind: V, *arguments: V, **named: V) -> V:
        count, rows = len(kind), columns.rows(kind)
        if len(rows) == count:
            return function(*arguments, **named)
        if not len(rows):
            return columns.nulls(count)
        result = function(
            *[columns.take(column, rows) for column in arguments],
            **{name: columns.take(column, rows) for name, column in named.items()},
        )
        return columns.take(_checked(result, len(rows)), _result_indices(rows, count))

    return call


@dataclass(frozen=True)
class _Sent:
    """A batch that was passed to a function over batches: its length, and the indices of its real rows."""

    count: int
    rows: Indices | None
    """None for a batch without real rows, instead of which the function got the last row again."""


def _by_batches(
    function: Callable[[Iterator[Batch[V]]], Iterator[V]], columns: _Columns[V]
) -> Callable[[Iterator[Batch[V]]], Iterator[V]]:
    """Wrap a function over an iterator of batches.

    Instead of a batch without real rows, the function gets the last row again, and its result is dropped. It
    must get something, since it may read a batch before it returns the previous one.
    """

    def call(batches: Iterator[Batch[V]]) -> Iterator[V]:
        for batch in batches:
            kind = batch[0] if isinstance(batch, tuple) else batch
            if len(columns.rows(kind)):
                sent: deque[_Sent] = deque()
                results = function(_real_rows(chain([batch], batches), columns, sent))
                yield from _restored(results, sent, columns)
                return
            yield columns.nulls(len(kind))

    return call


def _real_rows(batches: Iterator[Batch[V]], columns: _Columns[V], sent: deque[_Sent]) -> Iterator[Batch[V]]:
    """Yield the batches for the function, and record each in ``sent``; the first one has a real row."""
    last: list[V] = []
    for batch in batches:
        kind, *arguments = batch if isinstance(batch, tuple) else (batch,)
        count, rows = len(kind), columns.rows(kind)
        if len(rows):
            if len(rows) < count:
                arguments = [columns.take(column, rows) for column in arguments]
            last = [columns.take(column, np.array([len(rows) - 1])) for column in arguments]
            sent.append(_Sent(count, rows))
        else:
            arguments = last
            sent.append(_Sent(count, None))
        yield arguments[0] if len(arguments) == 1 else tuple(arguments)


def _restored(results: Iterator[V], sent: deque[_Sent], columns: _Columns[V]) -> Iterator[V]:
    """Expand the results to the rows of the original batches."""
    for result in results:
        if not sent:
            raise SchemaMismatchError(
                "a function over an iterator of batches returned more batches than it got: return one for "
                "each",
                condition="SCHEMA_MISMATCH.FUNCTION_RESULT",
            )
        batch = sent.popleft()
        _checked(result, 1 if batch.rows is None else len(batch.rows))
        if batch.rows is None:
            yield columns.nulls(batch.count)
        elif len(batch.rows) == batch.count:
            yield result
        else:
            yield columns.take(result, _result_indices(batch.rows, batch.count))


def _checked(result: V, expected: int) -> V:
    if len(result) != expected:
        raise SchemaMismatchError(
            f"a function over batches of rows returned {len(result)} values for {expected} rows: "
            "in a continuous query return one for each row of each batch",
            condition="SCHEMA_MISMATCH.FUNCTION_RESULT",
        )
    return result


def _result_indices(rows: Indices, count: int) -> Indices:
    """Return the index of the result for each of `count` rows; for markers and fillers it is arbitrary."""
    indices = np.zeros(count, dtype=np.int64)
    indices[rows] = np.arange(len(rows))
    return indices


class _Pandas:
    def __init__(self, return_type: DataType) -> None:
        self._return_type = return_type

    def rows(self, kind: pd.Series) -> Indices:
        rows: Indices = (kind.to_numpy() == ROW).nonzero()[0]
        return rows

    def take(self, column: pd.Series, indices: Indices) -> pd.Series:
        import pandas as pd

        series = column if hasattr(column, "iloc") else pd.Series(column)
        return series.iloc[indices].reset_index(drop=True)

    def nulls(self, count: int) -> pd.Series | pd.DataFrame:
        import pandas as pd

        if isinstance(self._return_type, StructType):
            return pd.DataFrame({name: [None] * count for name in self._return_type.names}, dtype=object)
        return pd.Series([None] * count, dtype=object)


class _Arrow:
    def __init__(self, return_type: DataType) -> None:
        self._return_type = return_type

    def rows(self, kind: pa.Array) -> Indices:
        rows: Indices = pc.indices_nonzero(pc.equal(kind, ROW)).to_numpy()
        return rows

    def take(self, column: pa.Array, indices: Indices) -> pa.Array:
        return column.take(pa.array(indices))

    def nulls(self, count: int) -> pa.Array:
        return pa.nulls(count, arrow_type(self._return_type))
