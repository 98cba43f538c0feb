"""Wrapped user functions, without Spark: any mixture of rows, markers and fillers in any batches."""

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

kinds = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=30)
cuts = st.lists(st.integers(0, 30), max_size=5)


def stream(given_kinds: list[int]) -> pa.Table:
    """Return rows numbered by position; an epoch ends with its marker."""
    epochs = [sum(kind == MARKER for kind in given_kinds[:place]) for place in range(len(given_kinds))]
    columns = [list(range(len(given_kinds))), given_kinds, epochs]
    schema = pa.schema([pa.field("id", pa.int64()), *METADATA_COLUMNS])
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema)


def cut(count: int, at: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, count, *(place for place in at if place < count)})
    return list(pairwise(edges))


def signals(given_kinds: list[int]) -> list[tuple[int, int]]:
    table = stream(given_kinds)
    pairs = zip(table.column(1).to_pylist(), table.column(2).to_pylist(), strict=True)
    return [pair for pair in pairs if pair[0] != ROW]


def runs_of(given_kinds: list[int]) -> list[list[int]]:
    """Return the rows between markers and fillers."""
    groups = groupby(enumerate(given_kinds), key=lambda pair: pair[1] == ROW)
    return [[place for place, _ in group] for real, group in groups if real]


def through(
    made: Callable[[Iterator[Any]], Iterator[Any]], given_kinds: list[int], at: list[int], pandas: bool
) -> pd.DataFrame:
    """Return the output for the stream cut into batches at these positions."""
    whole = stream(given_kinds).combine_chunks().to_batches()
    batches = [batch.slice(start, end - start) for batch in whole for start, end in cut(len(batch), at)]
    out = list(made(batch.to_pandas() if pandas else batch for batch in batches))
    frames = [frame if pandas else frame.to_pandas() for frame in out]
    return pd.concat(frames) if frames else stream([]).to_pandas()


@pytest.mark.parametrize("pandas", [False, True])
@given(kinds, cuts)
def test_rows_markers_and_fillers_stay_in_order_with_any_batch_boundaries(
    pandas: bool, given_kinds: list[int], at: list[int]
) -> None:
    runs: list[list[int]] = []

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        runs.append([])
        for batch in batches:
            assert len(batch)
            runs[-1].extend(batch["id"].to_list() if pandas else batch.column("id").to_pylist())
            yield batch

    made = (wrap_pandas_function if pandas else wrap_arrow_function)(same, SCHEMA)
    out = through(made, given_kinds, at, pandas)
    assert runs == runs_of(given_kinds)
    hidden = stream(given_kinds).to_pandas().iloc[:, 1:]
    assert out.iloc[:, 1:].to_numpy().tolist() == hidden.to_numpy().tolist()
    # A marker or a filler has no values, which may be large.
    assert out[out.iloc[:, 1] != ROW].iloc[:, 0].isna().all()


@pytest.mark.parametrize("pandas", [False, True])
@given(kinds, cuts, st.integers(0, 2), st.booleans())
def test_a_function_with_any_pattern_of_reading_and_yielding_delays_no_marker(
    pandas: bool, given_kinds: list[int], at: list[int], taken: int, giving: bool
) -> None:
    def some(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in range(taken):
            if next(batches, None) is None:
                return
        if giving:
            table = pa.table({"id": [-1, -2]})
            yield table.to_pandas() if pandas else table.to_batches()[0]

    out = through(
        (wrap_pandas_function if pandas else wrap_arrow_function)(some, SCHEMA), given_kinds, at, pandas
    )
    marked = out[out.iloc[:, 1] != ROW].iloc[:, 1:]
    assert [tuple(pair) for pair in marked.to_numpy().tolist()] == signals(given_kinds)
    if giving and not taken:
        assert (out.iloc[:, 1] == ROW).sum() == 2 * len(runs_of(given_kinds))


def shield(function: Callable[..., Any], eval_type: int) -> Callable[..., Any]:
    return wrap_function(dumps((function, LongType())), eval_type)


PANDAS, ARROW = PythonEvalType.SQL_SCALAR_PANDAS_UDF, PythonEvalType.SQL_SCALAR_ARROW_UDF
PANDAS_ITER, ARROW_ITER = (
    PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF,
    PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF,
)


def column(values: list[int], eval_type: int, kind: bool = False) -> Any:
    if eval_type in (PANDAS, PANDAS_ITER):
        return pd.Series(values, dtype="int8" if kind else "int64")
    return pa.array(values, pa.int8() if kind else pa.int64())


def listed(values: Any) -> list[Any]:
    return list(values.to_list() if isinstance(values, pd.Series) else values.to_pylist())


@pytest.mark.parametrize("eval_type", [PANDAS, ARROW])
@given(kinds)
def test_a_function_of_columns_sees_only_rows_and_its_values_are_assigned_to_them(
    eval_type: int, given_kinds: list[int]
) -> None:
    places = list(range(len(given_kinds)))
    rows = [place for place in places if given_kinds[place] == ROW]

    def negative(values: Any, *, again: Any) -> Any:
        assert listed(values) == listed(again) == rows
        return column([-value for value in listed(values)], eval_type)

    values = column(places, eval_type)
    out = listed(shield(negative, eval_type)(column(given_kinds, eval_type, kind=True), values, again=values))
    assert len(out) == len(places)
    assert [out[place] for place in rows] == [-place for place in rows]
    if rows:
        assert all(isinstance(value, int) for value in out)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("eval_type", [PANDAS_ITER, ARROW_ITER])
@given(kinds, cuts)
def test_a_function_of_an_iterator_yields_one_batch_per_batch_and_never_waits_for_rows(
    eval_type: int, ahead: bool, given_kinds: list[int], at: list[int]
) -> None:
    rows = [place for place, kind in enumerate(given_kinds) if kind == ROW]

    def negative(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = None
        for values in batches:
            assert set(listed(values)) <= set(rows)
            made = column([-value for value in listed(values)], eval_type)
            if ahead:
                # One batch behind, as a function may be.
                if held is not None:
                    yield held
                held = made
            else:
                yield made
        if held is not None:
            yield held

    places = list(range(len(given_kinds)))
    batches = [(given_kinds[start:end], places[start:end]) for start, end in cut(len(places), at)]
    columns = ((column(kind, eval_type, kind=True), column(values, eval_type)) for kind, values in batches)
    out = [listed(batch) for batch in shield(negative, eval_type)(columns)]
    assert [len(batch) for batch in out] == [len(kind) for kind, _ in batches]
    flat = [value for batch in out for value in batch]
    assert [flat[place] for place in rows] == [-place for place in rows]


@pytest.mark.parametrize("eval_type", [PANDAS, ARROW, PANDAS_ITER, ARROW_ITER])
def test_a_function_that_returns_a_wrong_number_of_values_is_refused_with_both_numbers(
    eval_type: int,
) -> None:
    each = eval_type in (PANDAS, ARROW)

    def shorter(given_values: Any) -> Any:
        return given_values[:1] if each else (values[:1] for values in given_values)

    made = shield(shorter, eval_type)
    arguments = (column([0, 0, 1], eval_type, kind=True), column([5, 6, 7], eval_type))
    with pytest.raises(SchemaMismatchError, match=r"FUNCTION_RESULT\].*1 values for 2 rows"):
        made(*arguments) if each else list(made(iter([arguments])))
