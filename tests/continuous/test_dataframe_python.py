"""Users' Python functions in a continuous frame receive only rows, and cannot delay a marker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.continuous.channel import KIND
from penstock.continuous.dataframe import ContinuousFrame, apply_transform
from penstock.continuous.plan_check import check_plan
from penstock.errors import ContinuousRefusedError
from penstock.json_text import Json
from tests.continuous.finite_reader import collect_output, create_frame, run_transform

STEPS = [
    ("rows", 1), ("marker", 1), ("filler", 3), ("rows", 2), ("rows", 1), ("marker", 2), ("rows", 2),
    ("filler", 2), ("marker", 3),
]  # fmt: skip
RUNS = [[1], [2, 3, 4], [5, 6]]
"""The rows between two markers or fillers."""
BIG = 2**60 + 1
"""A number that a float cannot hold."""


@pytest.fixture(scope="module")
def plain(spark: SparkSession) -> DataFrame:
    """Six rows, of which every third has an amount."""
    rows = [(number, None if number % 3 else BIG + number, f"row {number}") for number in range(1, 7)]
    return spark.createDataFrame(rows, "id bigint, amount bigint, s string").coalesce(1).cache()


UDF_KINDS = (
    "pickled", "row by row over Arrow", "a named argument", "pandas", "pandas over an iterator",
    "pandas with a struct", "Arrow", "Arrow over an iterator", "nested", "in an expression",
)  # fmt: skip


def create_udfs() -> Json:
    """Return a UDF of each kind. They fail on nulls and floats."""

    def add_to_value(amount: int) -> int:
        return amount + 1

    def add_to_series(amount: pd.Series) -> pd.Series:
        assert amount.dtype == "int64", amount.dtype
        return amount + 1

    def add_to_series_iterator(batches: Iterator[tuple[pd.Series, pd.Series]]) -> Iterator[pd.Series]:
        for amount, one in batches:
            assert amount.dtype == "int64", amount.dtype
            yield amount + one

    def add_to_array(amount: pa.Array) -> pa.Array:
        assert not amount.null_count
        return pc.add(amount, 1)

    def add_to_array_iterator(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for amount in batches:
            assert not amount.null_count
            yield pc.add(amount, 1)

    def to_frame(amount: pd.Series) -> pd.DataFrame:
        assert amount.dtype == "int64", amount.dtype
        return pd.DataFrame({"more": amount + 1, "name": "x"})

    amount, one = F.col("amount"), F.lit(1).cast("bigint")
    return {
        "pickled": F.udf(add_to_value, "bigint", useArrow=False)(amount),
        "row by row over Arrow": F.udf(add_to_value, "bigint", useArrow=True)(amount),
        "a named argument": F.udf(add_to_value, "bigint")(amount=amount),
        "pandas": F.pandas_udf(add_to_series, "bigint")(amount),
        "pandas over an iterator": F.pandas_udf(add_to_series_iterator, "bigint")(amount, one),
        "pandas with a struct": F.pandas_udf(to_frame, "more bigint, name string")(amount),
        "Arrow": F.arrow_udf(add_to_array, "bigint")(amount),
        "Arrow over an iterator": F.arrow_udf(add_to_array_iterator, "bigint")(amount),
        "nested": F.pandas_udf(add_to_series, "bigint")(F.udf(add_to_value, "bigint")(amount)),
        "in an expression": F.concat(
            F.arrow_udf(add_to_array, "bigint")(amount % 7).cast("string"), F.lit("!")
        ),
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", UDF_KINDS)
def test_a_function_after_a_filter_does_not_see_rows_that_were_filtered_out(
    spark: SparkSession, plain: DataFrame, kind: str
) -> None:
    def transform(df: DataFrame) -> DataFrame:
        return df.where("amount IS NOT NULL").select("id", create_udfs()[kind].alias("result"))

    expected = transform(plain)
    out = run_transform(spark, plain, STEPS, transform)
    assert out.rows == expected.toArrow().to_pylist()
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


def test_a_function_used_as_a_condition_filters_rows_only(spark: SparkSession, plain: DataFrame) -> None:
    even = F.udf(lambda number: number % 2 == 0, "boolean")
    out = run_transform(
        spark, plain, STEPS, lambda df: df.where(even("id")).select("id").where(F.expr("id > 2"))
    )
    assert [row["id"] for row in out.rows] == [4, 6]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


def test_a_function_larger_than_a_megabyte_and_registered_for_sql_receives_only_rows(
    spark: SparkSession, plain: DataFrame
) -> None:
    ballast = bytes(2 << 20)
    spark.udf.register("add_ballast", lambda amount: amount - amount + len(ballast), "bigint")
    out = run_transform(
        spark, plain, STEPS, lambda df: df.where("amount IS NOT NULL").selectExpr("add_ballast(amount) w")
    )
    assert out.rows == [{"w": 2 << 20}] * 2
    assert out.markers == [1, 2, 3]


def test_an_array_returned_by_a_function_can_be_exploded(spark: SparkSession, plain: DataFrame) -> None:
    repeat = F.udf(lambda number: [number] * (number % 3), "array<bigint>")
    out = run_transform(spark, plain, STEPS, lambda df: df.select(F.explode(repeat("id")).alias("x")))
    assert [row["x"] for row in out.rows] == [1, 2, 2, 4, 5, 5]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


def map_in_arrow(df: Any, function: Callable[..., Any], schema: str) -> Any:
    return df.mapInArrow(function, schema)


def map_in_pandas(df: Any, function: Callable[..., Any], schema: str) -> Any:
    """Call `mapInPandas` with a function over record batches."""

    def function_over_frames(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        def batches() -> Iterator[pa.RecordBatch]:
            for frame in frames:
                assert frame["id"].dtype == "int64"
                yield pa.RecordBatch.from_pandas(frame, preserve_index=False)

        for batch in function(batches()):
            yield batch.to_pandas()

    return df.mapInPandas(function_over_frames, schema)


parametrize_map = pytest.mark.parametrize("apply_map", [map_in_arrow, map_in_pandas])
MapMethod = Callable[[Any, Callable[..., Any], str], Any]


@parametrize_map
def test_a_map_gets_one_iterator_per_run_of_rows(
    spark: SparkSession, plain: DataFrame, apply_map: MapMethod
) -> None:
    def collect_run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = pa.Table.from_batches(batches)
        ids = [str(number) for number in table.column("id").to_pylist()]
        yield pa.RecordBatch.from_pydict({"ids": [" ".join(ids)], "columns": [" ".join(table.column_names)]})

    out = run_transform(
        spark, plain, STEPS, lambda df: apply_map(df, collect_run, "ids string, columns string")
    )
    assert [row["ids"] for row in out.rows] == [" ".join(map(str, ids)) for ids in RUNS]
    assert {row["columns"] for row in out.rows} == {"id amount s"}
    assert out.order == [(0, 1), (1, 1), *[(2, 2)] * 3, (0, 2), (1, 2), (0, 3), *[(2, 3)] * 2, (1, 3)]


@parametrize_map
def test_a_map_after_a_filter_returns_the_rows_of_the_plain_dataframe(
    spark: SparkSession, plain: DataFrame, apply_map: MapMethod
) -> None:
    def add_amounts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            amount = batch.column("amount")
            assert amount.type == pa.int64()
            assert not amount.null_count
            yield pa.RecordBatch.from_pydict({"id": batch.column("id"), "more": pc.add(amount, 1)})

    def transform(df: DataFrame) -> DataFrame:
        filtered = df.where("amount IS NOT NULL")
        return apply_map(filtered, add_amounts, "id bigint, more bigint").withColumn(
            "id", F.col("id") + F.col("more")
        )

    out = run_transform(spark, plain, STEPS, transform)
    assert out.rows == transform(plain).toArrow().to_pylist()
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


@parametrize_map
def test_a_map_that_stops_early_drops_the_rest_of_its_run_but_no_marker(
    spark: SparkSession, plain: DataFrame, apply_map: MapMethod
) -> None:
    def take_first_row(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches).slice(0, 1).select(["id"])

    out = run_transform(spark, plain, STEPS, lambda df: apply_map(df, take_first_row, "id bigint NOT NULL"))
    assert [row["id"] for row in out.rows] == [ids[0] for ids in RUNS]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


@parametrize_map
def test_a_map_that_yields_nothing_at_first_or_at_all_drops_no_marker(
    spark: SparkSession, plain: DataFrame, apply_map: MapMethod
) -> None:
    def yield_last_run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.column("id")[0].as_py() > 4:
                yield pa.RecordBatch.from_pydict({"id": batch.column("id"), "l": [["x"]] * batch.num_rows})

    def transform(df: DataFrame) -> DataFrame:
        mapped = apply_map(df, yield_last_run, "id bigint NOT NULL, l array<string>")
        return mapped.selectExpr("id + 1 AS next", "l[0] AS x").where("next / (next - 1) > 0")

    out = run_transform(spark, plain, STEPS, transform)
    assert [row["next"] for row in out.rows] == [6, 7]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)
    out = run_transform(spark, plain, STEPS, lambda df: apply_map(df, lambda batches: iter(()), "id bigint"))
    assert (out.rows, out.markers, out.fillers) == ([], [1, 2, 3], 5)


def test_maps_and_functions_can_be_chained(spark: SparkSession, plain: DataFrame) -> None:
    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    def transform(df: DataFrame) -> DataFrame:
        first = df.mapInPandas(pass_through, "id bigint, amount bigint, s string").where("amount IS NOT NULL")
        second = first.mapInArrow(pass_through, "id bigint, amount bigint, s string")
        return second.select(create_udfs()["Arrow"].alias("a"), second.id).mapInPandas(
            pass_through, "a bigint, id bigint"
        )

    transformed = apply_transform(create_frame(spark, plain, STEPS), transform)
    assert collect_output(transformed).rows == transform(plain).toArrow().to_pylist()
    assert check_plan(transformed.full_frame).python_stages == (
        "mapInPandas",
        "mapInArrow",
        "Arrow UDF",
        "mapInPandas",
    )


def test_batches_may_use_any_arrow_type_that_matches_the_declared_type(
    spark: SparkSession, plain: DataFrame
) -> None:
    def yield_both_string_types(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            row_id = batch.column("id")[0].as_py()
            string_type = pa.large_string() if row_id > 1 else pa.string()
            yield pa.RecordBatch.from_arrays([batch.column("s").cast(string_type)], ["another name"])

    out = run_transform(spark, plain, STEPS, lambda df: df.mapInArrow(yield_both_string_types, "s string"))
    assert [row["s"] for row in out.rows] == [f"row {number}" for number in range(1, 7)]


def rename_columns(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return (batch.rename_columns(["a", "b", "c"]) for batch in batches)


@pytest.mark.parametrize(
    ("apply_map", "function", "message"),
    [
        (map_in_arrow, lambda batches: iter([1]), "iterator of pyarrow.RecordBatch"),
        (map_in_arrow, lambda batches: batches, r"SCHEMA_MISMATCH.FUNCTION_RESULT\].*returned the columns"),
        (map_in_pandas, rename_columns, r"SCHEMA_MISMATCH.FUNCTION_RESULT\].*returned the columns"),
    ],
)  # fmt: skip
def test_errors_about_the_output_of_a_map_do_not_mention_hidden_columns(
    spark: SparkSession, plain: DataFrame, apply_map: MapMethod, function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        run_transform(spark, plain, STEPS, lambda df: apply_map(df, function, "id bigint, x string"))
    assert KIND not in str(caught.value)


def test_an_error_in_a_users_function_fails_the_query(spark: SparkSession, plain: DataFrame) -> None:
    def fail_after_first_batch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches)
        raise ValueError("function failed")

    with pytest.raises(Exception, match="function failed"):
        run_transform(spark, plain, STEPS, lambda df: df.mapInArrow(fail_after_first_batch, df.schema))


def test_a_resource_profile_is_refused(spark: SparkSession, plain: DataFrame) -> None:
    with pytest.raises(ContinuousRefusedError, match="resource profile"):
        create_frame(spark, plain, STEPS).mapInArrow(lambda batches: batches, plain.schema, profile=object())


@pytest.fixture(scope="module")
def frame(spark: SparkSession, plain: DataFrame) -> ContinuousFrame:
    return create_frame(spark, plain, STEPS)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("pickled", "pickled UDF"),
        ("row by row over Arrow", "Python UDF"),
        ("pandas", "pandas UDF"),
        ("pandas over an iterator", "pandas UDF"),
        ("Arrow", "Arrow UDF"),
    ],
)
def test_a_plan_names_its_python_stages_and_their_cost(frame: ContinuousFrame, kind: str, stage: str) -> None:
    plan = check_plan(frame.select(create_udfs()[kind]).full_frame)
    assert plan.python_stages == (stage,)
    assert plan.filler_rows == 130
    assert len(plan.latency_notes) == (stage in ("pickled UDF", "pandas UDF"))
    plan.require_pipelined(True, "4.3.0")
    with pytest.raises(
        ContinuousRefusedError, match=rf"\({stage}\).*spark\.python\.udf\.pipelined\.enabled=true"
    ):
        plan.require_pipelined(False, "4.3.0")
    with pytest.raises(ContinuousRefusedError, match=r"4\.2\.1 always does: use Spark 4\.3"):
        plan.require_pipelined(True, "4.2.1")
