"""Users' Python functions in a continuous frame: they get real rows only, and cannot delay a marker."""

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
from tests.continuous.reading import output_of, run, source_of

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
    """Two rows of three have no amount; the last of each epoch is one of them."""
    rows = [(number, None if number % 3 else BIG + number, f"row {number}") for number in range(1, 7)]
    return spark.createDataFrame(rows, "id bigint, amount bigint, s string").coalesce(1).cache()


KINDS = (
    "pickled", "row by row over Arrow", "a named argument", "pandas", "pandas over an iterator",
    "pandas with a struct", "Arrow", "Arrow over an iterator", "one in another", "in an expression",
)  # fmt: skip


def functions() -> Json:
    """Functions of every kind, which fail on a null and on a float."""

    def by_rows(amount: int) -> int:
        return amount + 1

    def by_series(amount: pd.Series) -> pd.Series:
        assert amount.dtype == "int64", amount.dtype
        return amount + 1

    def by_series_in_turn(batches: Iterator[tuple[pd.Series, pd.Series]]) -> Iterator[pd.Series]:
        for amount, one in batches:
            assert amount.dtype == "int64", amount.dtype
            yield amount + one

    def by_arrays(amount: pa.Array) -> pa.Array:
        assert not amount.null_count
        return pc.add(amount, 1)

    def by_arrays_in_turn(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for amount in batches:
            assert not amount.null_count
            yield pc.add(amount, 1)

    def to_frames(amount: pd.Series) -> pd.DataFrame:
        assert amount.dtype == "int64", amount.dtype
        return pd.DataFrame({"more": amount + 1, "name": "x"})

    amount, one = F.col("amount"), F.lit(1).cast("bigint")
    return {
        "pickled": F.udf(by_rows, "bigint", useArrow=False)(amount),
        "row by row over Arrow": F.udf(by_rows, "bigint", useArrow=True)(amount),
        "a named argument": F.udf(by_rows, "bigint")(amount=amount),
        "pandas": F.pandas_udf(by_series, "bigint")(amount),
        "pandas over an iterator": F.pandas_udf(by_series_in_turn, "bigint")(amount, one),
        "pandas with a struct": F.pandas_udf(to_frames, "more bigint, name string")(amount),
        "Arrow": F.arrow_udf(by_arrays, "bigint")(amount),
        "Arrow over an iterator": F.arrow_udf(by_arrays_in_turn, "bigint")(amount),
        "one in another": F.pandas_udf(by_series, "bigint")(F.udf(by_rows, "bigint")(amount)),
        "in an expression": F.concat(F.arrow_udf(by_arrays, "bigint")(amount % 7).cast("string"), F.lit("!")),
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_function_after_a_filter_does_not_see_rows_that_were_filtered_out(
    spark: SparkSession, plain: DataFrame, kind: str
) -> None:
    def transform(df: DataFrame) -> DataFrame:
        return df.where("amount IS NOT NULL").select("id", functions()[kind].alias("made"))

    expected = transform(plain)
    out = run(spark, plain, STEPS, transform)
    assert out.rows == expected.toArrow().to_pylist()
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


def test_a_function_used_as_a_condition_filters_rows_only(spark: SparkSession, plain: DataFrame) -> None:
    even = F.udf(lambda number: number % 2 == 0, "boolean")
    out = run(spark, plain, STEPS, lambda df: df.where(even("id")).select("id").where(F.expr("id > 2")))
    assert [row["id"] for row in out.rows] == [4, 6]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


def test_a_function_registered_for_sql_and_larger_than_a_megabyte_is_shielded_too(
    spark: SparkSession, plain: DataFrame
) -> None:
    ballast = bytes(2 << 20)
    spark.udf.register("weighed", lambda amount: amount - amount + len(ballast), "bigint")
    out = run(spark, plain, STEPS, lambda df: df.where("amount IS NOT NULL").selectExpr("weighed(amount) w"))
    assert out.rows == [{"w": 2 << 20}] * 2
    assert out.markers == [1, 2, 3]


def test_an_array_returned_by_a_function_can_be_exploded(spark: SparkSession, plain: DataFrame) -> None:
    twice = F.udf(lambda number: [number] * (number % 3), "array<bigint>")
    out = run(spark, plain, STEPS, lambda df: df.select(F.explode(twice("id")).alias("x")))
    assert [row["x"] for row in out.rows] == [1, 2, 2, 4, 5, 5]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


def arrow(df: Any, function: Callable[..., Any], schema: str) -> Any:
    return df.mapInArrow(function, schema)


def pandas(df: Any, function: Callable[..., Any], schema: str) -> Any:
    """`mapInPandas` with a function over record batches."""

    def call(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        def batches() -> Iterator[pa.RecordBatch]:
            for frame in frames:
                assert frame["id"].dtype == "int64"
                yield pa.RecordBatch.from_pandas(frame, preserve_index=False)

        for batch in function(batches()):
            yield batch.to_pandas()

    return df.mapInPandas(call, schema)


both = pytest.mark.parametrize("mapped", [arrow, pandas])
Mapped = Callable[[Any, Callable[..., Any], str], Any]


@both
def test_a_map_gets_one_iterator_per_run_of_rows(
    spark: SparkSession, plain: DataFrame, mapped: Mapped
) -> None:
    def runs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        given = pa.Table.from_batches(batches)
        ids = [str(number) for number in given.column("id").to_pylist()]
        yield pa.RecordBatch.from_pydict({"ids": [" ".join(ids)], "columns": [" ".join(given.column_names)]})

    out = run(spark, plain, STEPS, lambda df: mapped(df, runs, "ids string, columns string"))
    assert [row["ids"] for row in out.rows] == [" ".join(map(str, ids)) for ids in RUNS]
    assert {row["columns"] for row in out.rows} == {"id amount s"}
    assert out.order == [(0, 1), (1, 1), *[(2, 2)] * 3, (0, 2), (1, 2), (0, 3), *[(2, 3)] * 2, (1, 3)]


@both
def test_a_map_after_a_filter_gives_the_rows_of_the_plain_dataframe(
    spark: SparkSession, plain: DataFrame, mapped: Mapped
) -> None:
    def more(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            amount = batch.column("amount")
            assert amount.type == pa.int64()
            assert not amount.null_count
            yield pa.RecordBatch.from_pydict({"id": batch.column("id"), "more": pc.add(amount, 1)})

    def transform(df: DataFrame) -> DataFrame:
        kept = df.where("amount IS NOT NULL")
        return mapped(kept, more, "id bigint, more bigint").withColumn("id", F.col("id") + F.col("more"))

    out = run(spark, plain, STEPS, transform)
    assert out.rows == transform(plain).toArrow().to_pylist()
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


@both
def test_a_map_that_stops_early_drops_the_rest_of_its_run_but_no_marker(
    spark: SparkSession, plain: DataFrame, mapped: Mapped
) -> None:
    def first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches).slice(0, 1).select(["id"])

    out = run(spark, plain, STEPS, lambda df: mapped(df, first, "id bigint NOT NULL"))
    assert [row["id"] for row in out.rows] == [ids[0] for ids in RUNS]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)


@both
def test_a_map_that_yields_nothing_at_first_or_at_all_drops_no_marker(
    spark: SparkSession, plain: DataFrame, mapped: Mapped
) -> None:
    def late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.column("id")[0].as_py() > 4:
                yield pa.RecordBatch.from_pydict({"id": batch.column("id"), "l": [["x"]] * batch.num_rows})

    def transform(df: DataFrame) -> DataFrame:
        made = mapped(df, late, "id bigint NOT NULL, l array<string>")
        return made.selectExpr("id + 1 AS next", "l[0] AS x").where("next / (next - 1) > 0")

    out = run(spark, plain, STEPS, transform)
    assert [row["next"] for row in out.rows] == [6, 7]
    assert (out.markers, out.fillers) == ([1, 2, 3], 5)
    out = run(spark, plain, STEPS, lambda df: mapped(df, lambda batches: iter(()), "id bigint"))
    assert (out.rows, out.markers, out.fillers) == ([], [1, 2, 3], 5)


def test_maps_and_functions_can_be_chained(spark: SparkSession, plain: DataFrame) -> None:
    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    def transform(df: DataFrame) -> DataFrame:
        first = df.mapInPandas(same, "id bigint, amount bigint, s string").where("amount IS NOT NULL")
        second = first.mapInArrow(same, "id bigint, amount bigint, s string")
        return second.select(functions()["Arrow"].alias("a"), second.id).mapInPandas(
            same, "a bigint, id bigint"
        )

    made = apply_transform(source_of(spark, plain, STEPS), transform)
    assert output_of(made).rows == transform(plain).toArrow().to_pylist()
    assert check_plan(made.full_frame).python_stages == (
        "mapInPandas",
        "mapInArrow",
        "Arrow UDF",
        "mapInPandas",
    )


def test_batches_may_come_in_any_arrow_form_of_the_declared_types(
    spark: SparkSession, plain: DataFrame
) -> None:
    def large(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            place = batch.column("id")[0].as_py()
            kind = pa.large_string() if place > 1 else pa.string()
            yield pa.RecordBatch.from_arrays([batch.column("s").cast(kind)], ["another name"])

    out = run(spark, plain, STEPS, lambda df: df.mapInArrow(large, "s string"))
    assert [row["s"] for row in out.rows] == [f"row {number}" for number in range(1, 7)]


def renamed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return (batch.rename_columns(["a", "b", "c"]) for batch in batches)


@pytest.mark.parametrize(
    ("mapped", "given", "message"),
    [
        (arrow, lambda batches: iter([1]), "iterator of pyarrow.RecordBatch"),
        (arrow, lambda batches: batches, r"SCHEMA_MISMATCH.FUNCTION_RESULT\].*returned the columns"),
        (pandas, renamed, r"SCHEMA_MISMATCH.FUNCTION_RESULT\].*returned the columns"),
    ],
)  # fmt: skip
def test_errors_about_the_output_of_a_map_do_not_mention_hidden_columns(
    spark: SparkSession, plain: DataFrame, mapped: Mapped, given: Callable[..., Any], message: str
) -> None:
    with pytest.raises(Exception, match=message) as failed:
        run(spark, plain, STEPS, lambda df: mapped(df, given, "id bigint, x string"))
    assert KIND not in str(failed.value)


def test_an_error_in_a_users_function_fails_the_query(spark: SparkSession, plain: DataFrame) -> None:
    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches)
        raise ValueError("no more of this")

    with pytest.raises(Exception, match="no more of this"):
        run(spark, plain, STEPS, lambda df: df.mapInArrow(failing, df.schema))


def test_a_resource_profile_is_refused(spark: SparkSession, plain: DataFrame) -> None:
    with pytest.raises(ContinuousRefusedError, match="resource profile"):
        source_of(spark, plain, STEPS).mapInArrow(lambda batches: batches, plain.schema, profile=object())


@pytest.fixture(scope="module")
def frame(spark: SparkSession, plain: DataFrame) -> ContinuousFrame:
    return source_of(spark, plain, STEPS)


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
    plan = check_plan(frame.select(functions()[kind]).full_frame)
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
