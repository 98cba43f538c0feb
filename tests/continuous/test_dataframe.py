"""Operations on a continuous frame return the rows of a plain DataFrame, and every marker once, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.continuous.channel import EPOCH, KIND
from penstock.continuous.dataframe import ContinuousFrame, apply_transform, begin_frame
from penstock.continuous.plan_check import check_plan
from penstock.errors import ContinuousRefusedError
from tests.continuous.finite_reader import Output, collect_output, create_frame, run_transform

STEPS = [
    ("rows", 1), ("marker", 1), ("filler", 3), ("rows", 1), ("marker", 2), ("rows", 2), ("filler", 2),
    ("marker", 3),
]  # fmt: skip
Transform = Callable[[Any], Any]


@pytest.fixture(scope="module")
def plain(spark: SparkSession) -> DataFrame:
    """Four rows with corner cases for arrays and for division."""
    rows = [(1, "a", [1, 2], 2), (2, None, [], 0), (3, "c", None, 1), (4, "d", [5], 0)]
    return spark.createDataFrame(rows, "id bigint, s string, a array<int>, z int").coalesce(1).cache()


@pytest.fixture
def frame(spark: SparkSession, plain: DataFrame) -> ContinuousFrame:
    return create_frame(spark, plain, STEPS)


def assert_same(spark: SparkSession, plain: DataFrame, transform: Transform) -> Output:
    """Check that rows and schema equal the plain DataFrame's, and that markers and fillers stay in place."""
    expected = transform(plain)
    transformed = apply_transform(create_frame(spark, plain, STEPS), transform)
    assert transformed.schema == expected.schema
    out = collect_output(transformed)
    assert out.rows == expected.toArrow().to_pylist()
    assert out.markers == [1, 2, 3]
    assert out.fillers == 5
    epochs = [epoch for _, epoch in out.order]
    assert epochs == sorted(epochs)
    assert out.order[-1] == (1, 3)
    return out


SUPPORTED: dict[str, Transform] = {
    "select": lambda df: df.select("id", df.s, df["z"] + 1, F.lit(7).alias("seven")),
    "selectExpr": lambda df: df.selectExpr("id * 2 AS twice", "upper(s) s"),
    "where with text": lambda df: df.where("z > 0"),
    "filter with a column": lambda df: df.filter(F.col("s").isNotNull()).where(df.id > 1),
    "withColumn and drop": lambda df: (
        df.withColumn("id", F.col("id") + 1).withColumns({"x": F.lit("y")}).drop("a", "s")
    ),
    "renaming": lambda df: (
        df.withColumnRenamed("s", "t").withColumnsRenamed({"z": "zz"}).toDF("p", "q", "r", "t")
    ),
    "alias": lambda df: df.alias("t").select("t.*", F.col("t.id").alias("same")),
    "indexing": lambda df: df[["id", "s"]][df.id > 1],
    "transform": lambda df: df.transform(lambda inner, by: inner.select(F.col("id") * by), 3),
    "na": lambda df: df.na.fill("?").fillna(9).dropna().replace("?", "!"),
    "colRegex": lambda df: df.select(df.colRegex("`[is]`")),
    "a star without the hidden columns": lambda df: df.selectExpr("*", "hash(*) AS h", "struct(*) AS whole"),
    "the star of a frame": lambda df: df.select(df["*"], F.struct("*").alias("whole")),
    "a filter on a column that a select left out": lambda df: df.select("id").where(df.z == 0),
    "duplicate names": lambda df: df.select("id", "id"),
    "various types": lambda df: (
        df.selectExpr(
            "parse_json(string(id)) v", "map(id, s) m", "date_add('2026-01-01', z) d", "decimal(id) / 3 n"
        ).selectExpr("*", "to_json(v) j").drop("v")
    ),
    "nondeterministic values": lambda df: (
        df.selectExpr("id", "monotonically_increasing_id() m").where("rand() < 2 AND m < 9")
    ),
    "names that need quotes": lambda df: (
        df.toDF("a.b`c", "ä ö", "a", "z").withColumn("n", F.col("`a.b``c`") + 1)
    ),
    "expressions do not see copies of filtered rows": lambda df: (
        df.where("z != 0").selectExpr("10 / z AS share")
    ),
    "explode": lambda df: df.select("id", F.explode("a").alias("x")),
    "explode, then a filter": lambda df: df.withColumn("x", F.explode("a")).where("x > 1"),
    "explode_outer": lambda df: df.withColumn("x", F.explode_outer("a")),
    "posexplode": lambda df: df.select("*", F.posexplode("a").alias("place", "x")),
    "posexplode_outer": lambda df: df.selectExpr("posexplode_outer(a)", "id"),
    "explode of strings": lambda df: df.select(F.explode(F.split("s", "")).alias("letter")),
    "explode of a map": lambda df: df.select(F.explode(F.create_map("id", "s")).alias("k", "v")),
    "inline": lambda df: df.selectExpr("id", "inline(transform(a, x -> struct(x, x + 1 AS y)))"),
    "inline_outer": lambda df: df.selectExpr("inline_outer(transform(a, x -> struct(x, string(x) AS y)))"),
    "json_tuple": lambda df: df.selectExpr("id", """json_tuple('{"a":1,"b":2}', 'a', 'b')"""),
}  # fmt: skip


@pytest.mark.few(12)
@pytest.mark.parametrize("transform", SUPPORTED.values(), ids=list(SUPPORTED))
def test_rows_equal_those_of_the_plain_dataframe_and_all_markers_are_kept(
    spark: SparkSession, plain: DataFrame, transform: Transform
) -> None:
    assert_same(spark, plain, transform)


def test_markers_and_fillers_keep_their_positions_among_the_rows(
    spark: SparkSession, plain: DataFrame
) -> None:
    out = run_transform(spark, plain, STEPS, lambda df: df.where("id != 3").select("id"))
    assert out.order == [(0, 1), (1, 1), *[(2, 2)] * 3, (0, 2), (1, 2), (0, 3), *[(2, 3)] * 2, (1, 3)]


OPERATIONS: list[Transform] = [
    lambda df: df.where("id % 2 = 0"),
    lambda df: df.withColumn("id", F.col("id") + F.lit(1)),
    lambda df: df.select("*", (F.col("id") / 2).alias("half")).drop("half"),
    lambda df: df.withColumn("id", F.explode(F.sequence(F.lit(0), F.col("id")))),
    lambda df: df.where(F.col("id") > 0).selectExpr("id", "string(100 div id) AS s"),
    lambda df: df.select("id", F.explode(F.expr("filter(array(s, '7'), x -> x IS NOT NULL)")).alias("s")),
    lambda df: df.alias("t").select("t.id", F.concat("s", F.lit("!")).alias("s")),
]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=6))
def test_any_chain_of_operations_returns_the_plain_dataframes_rows_and_keeps_markers(
    spark: SparkSession, plain: DataFrame, operations: list[Transform]
) -> None:
    def apply_all(df: DataFrame) -> DataFrame:
        df = df.select("id", "s")
        for operation in operations:
            df = operation(df)
        return df

    assert_same(spark, plain, apply_all)


def test_the_hidden_columns_are_not_visible(frame: ContinuousFrame, plain: DataFrame) -> None:
    assert frame.columns == plain.columns
    assert frame.dtypes == plain.dtypes
    assert frame.schema == plain.schema
    assert frame.isStreaming
    assert KIND not in repr(frame)
    assert "id" in dir(frame)
    with pytest.raises(AnalysisException, match="UNRESOLVED_COLUMN"):
        frame.select(KIND)
    with pytest.raises(AnalysisException, match="UNRESOLVED_COLUMN") as refused:
        frame.where("nothing = 1")
    assert EPOCH not in str(refused.value)


def test_dropping_a_hidden_column_by_name_drops_nothing(frame: ContinuousFrame) -> None:
    assert frame.drop(KIND, EPOCH).full_frame.columns[-2:] == [KIND, EPOCH]


def test_a_column_with_the_name_of_a_hidden_one_is_refused(
    frame: ContinuousFrame, spark: SparkSession
) -> None:
    for transform in (
        lambda df: df.withColumnRenamed("id", KIND.upper()),
        lambda df: df.select(F.lit(1).alias(EPOCH)),
        lambda df: df.mapInArrow(lambda batches: batches, f"{KIND} int"),
    ):
        with pytest.raises(ContinuousRefusedError, match="COLUMN_NAME"):
            transform(frame)
    with pytest.raises(ContinuousRefusedError, match="COLUMN_NAME"):
        begin_frame(spark.range(1).selectExpr(f"id AS {KIND}", "1 AS k", "2 AS e"))


REFUSED: dict[str, tuple[str, Transform]] = {
    "groupBy": ("Aggregate", lambda df: df.groupBy("id").count()),
    "agg": ("Aggregate", lambda df: df.agg(F.sum("id"))),
    "an aggregate in a select": ("Aggregate", lambda df: df.select(F.sum("id"))),
    "distinct": ("Deduplicate", lambda df: df.distinct()),
    "dropDuplicates": ("Deduplicate", lambda df: df.dropDuplicates(["id"])),
    "join": ("Join", lambda df: df.join(df, "id")),
    "crossJoin": ("Join", lambda df: df.crossJoin(df)),
    "union": ("Union", lambda df: df.union(df)),
    "sort": ("Sort", lambda df: df.orderBy("id")),
    "limit": ("GlobalLimit", lambda df: df.limit(1)),
    "repartition": ("Repartition", lambda df: df.repartition(2)),
    "coalesce": ("Repartition", lambda df: df.coalesce(1)),
    "sample": ("Sample", lambda df: df.sample(0.5)),
    "withWatermark": ("EventTimeWatermark", lambda df: df.withWatermark("t", "1 second")),
    "window": ("Window", lambda df: df.withColumn("n", F.expr("row_number() OVER (ORDER BY id)"))),
    "a scalar subquery": ("ScalarSubquery", lambda df: df.selectExpr("(SELECT max(id) FROM range(3)) AS m")),
    "an EXISTS subquery": ("Exists", lambda df: df.where("EXISTS (SELECT 1)")),
    "a subquery below another operator": (
        "ScalarSubquery",
        lambda df: (
            df.dropna()
            .fillna("x")
            .transform(lambda inner: inner.selectExpr("(SELECT 1 WHERE 1 < 2) AS m", "id").where("id > 1"))
        ),
    ),
    "an IN subquery": ("InSubquery", lambda df: df.where("id + 1 IN (SELECT id FROM range(3))")),
    "stack": ("Stack", lambda df: df.selectExpr("stack(2, id, id + 1)")),
}


@pytest.mark.parametrize(("operation", "transform"), REFUSED.values(), ids=list(REFUSED))
def test_other_operations_are_refused_immediately_with_sparks_name_for_them(
    frame: ContinuousFrame, operation: str, transform: Transform
) -> None:
    with pytest.raises(ContinuousRefusedError) as refused:
        transform(frame)
    assert refused.value.condition == "CONTINUOUS_REFUSED.UNSUPPORTED_OPERATION"
    assert refused.value.parameters["operation"] == operation
    assert f"continuous processing does not support {operation} operations" in str(refused.value)
    assert "processing_time" in str(refused.value)


@pytest.mark.parametrize(
    "expression",
    ["current_timestamp()", "current_date", "now()", "localtimestamp()", "curdate()", "unix_timestamp()",
     "current_time()", "cast('now' as timestamp)", "date('Today')", "cast(' yesterday' as timestamp_ntz)"],
)  # fmt: skip
def test_the_current_time_is_refused_anywhere_in_an_expression(
    frame: ContinuousFrame, expression: str
) -> None:
    for transform in (
        lambda df: df.selectExpr(f"concat(s, string({expression}))"),
        lambda df: df.where(f"s < string({expression})"),
        lambda df: df.select(F.explode(F.array(F.expr(expression)))),
    ):
        with pytest.raises(ContinuousRefusedError, match="does not support current time operations"):
            transform(frame)


def test_columns_and_strings_named_like_time_functions_are_accepted(frame: ContinuousFrame) -> None:
    selected = frame.selectExpr("s as now").selectExpr(
        "cast(now as timestamp) as t", "'cast(now as date)' as text"
    )
    assert selected.columns == ["t", "text"]


@pytest.mark.parametrize(
    "name", ["collect", "show", "count", "toPandas", "cache", "createTempView", "foreach", "take"]
)
def test_an_action_is_refused_with_its_name(frame: ContinuousFrame, name: str) -> None:
    with pytest.raises(ContinuousRefusedError, match=f"does not support DataFrame.{name}"):
        getattr(frame, name)()


@pytest.mark.parametrize("name", ["write", "writeStream", "rdd"])
def test_properties_that_run_a_query_are_refused_on_access(frame: ContinuousFrame, name: str) -> None:
    with pytest.raises(ContinuousRefusedError, match=f"does not support DataFrame.{name}"):
        getattr(frame, name)


def test_an_unknown_name_raises_the_usual_error_of_a_dataframe(frame: ContinuousFrame) -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = frame.nothing_of_the_kind
    assert not hasattr(frame, "nothing_of_the_kind")


def test_a_transform_must_return_a_frame_derived_from_its_input(
    frame: ContinuousFrame, plain: DataFrame, spark: SparkSession
) -> None:
    for other in (None, plain, create_frame(spark, plain, STEPS)):
        with pytest.raises(ContinuousRefusedError, match="OTHER_FRAME"):
            apply_transform(frame, lambda _, other=other: other)  # type: ignore[misc]


def test_the_plan_of_sql_operations_has_no_python_stage(frame: ContinuousFrame) -> None:
    plan = check_plan(frame.where("id > 1").select("*", F.explode("a")).full_frame)
    assert plan.python_stages == ()
    assert plan.filler_rows == 66
    assert plan.latency_notes == ()
    plan.require_pipelined(False, "4.3.0")


def test_a_shuffle_in_the_plan_is_refused(frame: ContinuousFrame, spark: SparkSession) -> None:
    repartitioned = begin_frame(frame.full_frame.repartition(2))
    with pytest.raises(ContinuousRefusedError, match="Repartition"):
        check_plan(repartitioned.full_frame)
    with pytest.raises(ContinuousRefusedError, match="Join"):
        check_plan(
            begin_frame(frame.full_frame.crossJoin(spark.range(1)).select(frame.full_frame["*"])).full_frame
        )
