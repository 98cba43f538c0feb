"""Wrapped user functions with any sequence of rows, markers and fillers in any batches, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.cloudpickle import dumps
from pyspark.sql.types import LongType, StructField, StructType
from pyspark.util import PythonEvalType

from penstock.continuous.channel import MARKER, METADATA_COLUMNS
from penstock.continuous.user_functions import wrap_arrow_function, wrap_pandas_function
from penstock.errors import SchemaMismatchError
from penstock.spark.internals.udf_wrapper import ROW, wrap_function

SCHEMA = StructType([StructField("id", LongType())])

kind_lists = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=30)
cut_lists = st.lists(st.integers(0, 30), max_size=5)


def create_stream(kinds: list[int]) -> pa.Table:
    """Return a table of rows, markers and fillers, numbered by position. A marker ends its epoch."""
    epochs = [sum(kind == MARKER for kind in kinds[:position]) for position in range(len(kinds))]
    columns = [list(range(len(kinds))), kinds, epochs]
    schema = pa.schema([pa.field("id", pa.int64()), *METADATA_COLUMNS])
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema)


def split(count: int, cuts: list[int]) -> list[tuple[int, int]]:
    boundaries = sorted({0, count, *(position for position in cuts if position < count)})
    return list(pairwise(boundaries))


def signals(kinds: list[int]) -> list[tuple[int, int]]:
    table = create_stream(kinds)
    pairs = zip(table.column(1).to_pylist(), table.column(2).to_pylist(), strict=True)
    return [pair for pair in pairs if pair[0] != ROW]


def rows_by_run(kinds: list[int]) -> list[list[int]]:
    """Return the rows between markers and fillers."""
    groups = groupby(enumerate(kinds), key=lambda pair: pair[1] == ROW)
    return [[position for position, _ in group] for real, group in groups if real]


def apply_function(
    wrapped: Callable[[Iterator[Any]], Iterator[Any]], kinds: list[int], cuts: list[int], pandas: bool
) -> pd.DataFrame:
    """Return the output of a wrapped function for the stream, cut into batches at these positions."""
    whole_batches = create_stream(kinds).combine_chunks().to_batches()
    batches = [
        batch.slice(start, end - start) for batch in whole_batches for start, end in split(len(batch), cuts)
    ]
    out = list(wrapped(batch.to_pandas() if pandas else batch for batch in batches))
    frames = [frame if pandas else frame.to_pandas() for frame in out]
    return pd.concat(frames) if frames else create_stream([]).to_pandas()


@pytest.mark.parametrize("pandas", [False, True])
@given(kind_lists, cut_lists)
def test_rows_markers_and_fillers_stay_in_order_with_any_batch_boundaries(
    pandas: bool, kinds: list[int], cuts: list[int]
) -> None:
    runs: list[list[int]] = []

    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        runs.append([])
        for batch in batches:
            assert len(batch)
            runs[-1].extend(batch["id"].to_list() if pandas else batch.column("id").to_pylist())
            yield batch

    wrapped = (wrap_pandas_function if pandas else wrap_arrow_function)(pass_through, SCHEMA)
    out = apply_function(wrapped, kinds, cuts, pandas)
    assert runs == rows_by_run(kinds)
    hidden = create_stream(kinds).to_pandas().iloc[:, 1:]
    assert out.iloc[:, 1:].to_numpy().tolist() == hidden.to_numpy().tolist()
    # Markers and fillers have no values, because values may be large.
    assert out[out.iloc[:, 1] != ROW].iloc[:, 0].isna().all()


@pytest.mark.parametrize("pandas", [False, True])
@given(kind_lists, cut_lists, st.integers(0, 2), st.booleans())
def test_a_function_delays_no_marker_however_many_batches_it_reads_and_yields(
    pandas: bool, kinds: list[int], cuts: list[int], reads: int, yields: bool
) -> None:
    def read_and_yield(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in range(reads):
            if next(batches, None) is None:
                return
        if yields:
            table = pa.table({"id": [-1, -2]})
            yield table.to_pandas() if pandas else table.to_batches()[0]

    out = apply_function(
        (wrap_pandas_function if pandas else wrap_arrow_function)(read_and_yield, SCHEMA), kinds, cuts, pandas
    )
    signal_rows = out[out.iloc[:, 1] != ROW].iloc[:, 1:]
    assert [tuple(pair) for pair in signal_rows.to_numpy().tolist()] == signals(kinds)
    if yields and not reads:
        assert (out.iloc[:, 1] == ROW).sum() == 2 * len(rows_by_run(kinds))


def wrap(function: Callable[..., Any], eval_type: int) -> Callable[..., Any]:
    return wrap_function(dumps((function, LongType())), eval_type)


PANDAS, ARROW = PythonEvalType.SQL_SCALAR_PANDAS_UDF, PythonEvalType.SQL_SCALAR_ARROW_UDF
PANDAS_ITER, ARROW_ITER = (
    PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF,
    PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF,
)


def create_column(values: list[int], eval_type: int, kind: bool = False) -> Any:
    if eval_type in (PANDAS, PANDAS_ITER):
        return pd.Series(values, dtype="int8" if kind else "int64")
    return pa.array(values, pa.int8() if kind else pa.int64())


def to_list(values: Any) -> list[Any]:
    return list(values.to_list() if isinstance(values, pd.Series) else values.to_pylist())


@pytest.mark.parametrize("eval_type", [PANDAS, ARROW])
@given(kind_lists)
def test_a_function_of_columns_sees_only_rows_and_its_values_are_assigned_to_them(
    eval_type: int, kinds: list[int]
) -> None:
    positions = list(range(len(kinds)))
    rows = [position for position in positions if kinds[position] == ROW]

    def negate(values: Any, *, again: Any) -> Any:
        assert to_list(values) == to_list(again) == rows
        return create_column([-value for value in to_list(values)], eval_type)

    values = create_column(positions, eval_type)
    out = to_list(wrap(negate, eval_type)(create_column(kinds, eval_type, kind=True), values, again=values))
    assert len(out) == len(positions)
    assert [out[position] for position in rows] == [-position for position in rows]
    if rows:
        assert all(isinstance(value, int) for value in out)


@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.parametrize("eval_type", [PANDAS_ITER, ARROW_ITER])
@given(kind_lists, cut_lists)
def test_a_function_of_an_iterator_yields_one_batch_per_batch_and_never_waits_for_rows(
    eval_type: int, reads_ahead: bool, kinds: list[int], cuts: list[int]
) -> None:
    rows = [position for position, kind in enumerate(kinds) if kind == ROW]

    def negate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        previous = None
        for values in batches:
            assert set(to_list(values)) <= set(rows)
            negated = create_column([-value for value in to_list(values)], eval_type)
            if reads_ahead:
                # A function may yield a batch after it has read the next one.
                if previous is not None:
                    yield previous
                previous = negated
            else:
                yield negated
        if previous is not None:
            yield previous

    positions = list(range(len(kinds)))
    batches = [(kinds[start:end], positions[start:end]) for start, end in split(len(positions), cuts)]
    columns = (
        (create_column(kind, eval_type, kind=True), create_column(values, eval_type))
        for kind, values in batches
    )
    out = [to_list(batch) for batch in wrap(negate, eval_type)(columns)]
    assert [len(batch) for batch in out] == [len(kind) for kind, _ in batches]
    flat = [value for batch in out for value in batch]
    assert [flat[position] for position in rows] == [-position for position in rows]


@pytest.mark.parametrize("eval_type", [PANDAS, ARROW, PANDAS_ITER, ARROW_ITER])
def test_a_function_that_returns_a_wrong_number_of_values_is_refused_with_both_numbers(
    eval_type: int,
) -> None:
    by_columns = eval_type in (PANDAS, ARROW)

    def drop_values(given_values: Any) -> Any:
        return given_values[:1] if by_columns else (values[:1] for values in given_values)

    wrapped = wrap(drop_values, eval_type)
    arguments = (create_column([0, 0, 1], eval_type, kind=True), create_column([5, 6, 7], eval_type))
    with pytest.raises(SchemaMismatchError, match=r"FUNCTION_RESULT\].*1 values for 2 rows"):
        wrapped(*arguments) if by_columns else list(wrapped(iter([arguments])))
