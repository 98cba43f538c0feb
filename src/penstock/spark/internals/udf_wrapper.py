"""Keeps users' functions, in Python workers, from markers and fillers: a function sees real rows only.

A shielded function has one argument more than the user's, the first: what each row is. For what is no row it gives nothing back,
and what it gives is not looked at.
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
"""The kind of what is a row, the default of a number; markers and fillers have others."""


def wrap_command(command: bytes, eval_type: int, return_type: str) -> bytes:
    """The shielded form of a Python function as Spark holds it, pickled.

    Parameters
    ----------
    command
        The pickled function and its return type, or a pickled broadcast of that.
    eval_type
        Spark's number for the kind of function.
    return_type
        Its return type as Spark's JSON.
    """
    pickled: bytes = _pickles().dumps((_Pickled(command, eval_type), parse_type(return_type)))
    return pickled


def _pickles() -> Any:
    from pyspark.serializers import CloudPickleSerializer

    untyped: Any = CloudPickleSerializer
    return untyped()


class _Pickled:
    """Is a shielded function once it has been through pickle: the user's own is opened in the worker, as Spark would."""

    def __init__(self, command: bytes, eval_type: int) -> None:
        self._given = command, eval_type

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap_function, self._given


def wrap_function(command: bytes, eval_type: int) -> Function:
    """The shielded function, in a Python worker; the parameters are those of `shielded_command`."""
    from pyspark.broadcast import Broadcast
    from pyspark.util import PythonEvalType

    opened = _pickles().loads(command)
    if isinstance(opened, Broadcast):
        opened = _pickles().loads(opened.value)
    function, return_type = opened
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
    """How columns of one kind are taken apart and put together."""

    def rows(self, kind: Any) -> Any:
        """The places of the rows."""

    def places(self, rows: Any, count: int) -> Any:
        """Which result each of `count` rows gets; those that are no rows get any."""

    def take(self, column: Any, places: Any) -> Any: ...

    def last(self, column: Any) -> Any:
        """The last value alone."""

    def nothing(self, count: int) -> Any:
        """A column of `count` nulls."""


def _by_columns(function: Function, columns: _Columns) -> Function:
    def call(kind: Any, *arguments: Any, **named: Any) -> Any:
        count, rows = len(kind), columns.rows(kind)
        if len(rows) == count:
            return function(*arguments, **named)
        if not len(rows):
            return columns.nothing(count)
        result = function(
            *[columns.take(column, rows) for column in arguments],
            **{name: columns.take(column, rows) for name, column in named.items()},
        )
        return columns.take(_checked(result, len(rows)), columns.places(rows, count))

    return call


def _by_batches(function: Function, columns: _Columns) -> Function:
    """Of an iterator of batches: a batch without a row is answered for the function, which gets the last row again instead.

    It must get something, since it may be waiting for a batch before it gives back the one before.
    """

    def call(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            kind = batch[0] if isinstance(batch, tuple) else batch
            if len(columns.rows(kind)):
                given: deque[tuple[int, int, Any]] = deque()
                results = function(_rows_of(batch, batches, columns, given))
                yield from _restored(results, given, columns)
                return
            yield columns.nothing(len(kind))

    return call


def _rows_of(
    batch: Any, batches: Iterator[Any], columns: _Columns, given: deque[tuple[int, int, Any]]
) -> Iterator[Any]:
    last: list[Any] = []
    while batch is not None:
        kind, *arguments = batch if isinstance(batch, tuple) else (batch,)
        count, rows = len(kind), columns.rows(kind)
        if len(rows):
            if len(rows) < count:
                arguments = [columns.take(column, rows) for column in arguments]
            last = [columns.last(column) for column in arguments]
            given.append((count, len(rows), rows))
        else:
            arguments = last
            given.append((count, 1, None))
        yield arguments[0] if len(arguments) == 1 else tuple(arguments)
        batch = next(batches, None)


def _restored(results: Iterator[Any], given: deque[tuple[int, int, Any]], columns: _Columns) -> Iterator[Any]:
    for result in results:
        if not given:
            raise SchemaMismatch(
                "A function over an iterator of batches gave more batches than it was given."
            )
        count, expected, rows = given.popleft()
        _checked(result, expected)
        if rows is None:
            yield columns.nothing(count)
        elif expected == count:
            yield result
        else:
            yield columns.take(result, columns.places(rows, count))


def _checked(result: Any, expected: int) -> Any:
    if len(result) != expected:
        raise SchemaMismatch(
            f"A function over batches of rows gave {len(result)} values for {expected} rows; "
            "in a continuous query it gives one for each row of each batch."
        )
    return result


class _Pandas:
    def __init__(self, return_type: Any) -> None:
        self._return_type = return_type

    def rows(self, kind: Any) -> Any:
        return (kind.to_numpy() == ROW).nonzero()[0]

    def places(self, rows: Any, count: int) -> Any:
        import numpy as np

        places = np.zeros(count, dtype=np.int64)
        places[rows] = np.arange(len(rows))
        return places

    def take(self, column: Any, places: Any) -> Any:
        import pandas as pd

        taken = column if hasattr(column, "iloc") else pd.Series(column)
        return taken.iloc[places].reset_index(drop=True)

    def last(self, column: Any) -> Any:
        return column.iloc[-1:].reset_index(drop=True)

    def nothing(self, count: int) -> Any:
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

    def places(self, rows: pa.Array, count: int) -> pa.Array:
        import numpy as np

        places = np.zeros(count, dtype=np.int64)
        places[rows.to_numpy(zero_copy_only=False)] = np.arange(len(rows))
        return pa.array(places)

    def take(self, column: pa.Array, places: pa.Array) -> pa.Array:
        return column.take(places)

    def last(self, column: pa.Array) -> pa.Array:
        return column.slice(len(column) - 1)

    def nothing(self, count: int) -> pa.Array:
        return pa.nulls(count, arrow_type(self._return_type))
