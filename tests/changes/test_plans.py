"""How Spark runs the passes: its plans, modes and schemas."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import NonCallableMock

import pyarrow as pa
import pytest
from pyspark.errors import ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

import penstock
from penstock.errors import InvalidChangelogSchemaError, InvalidChangeOptionError
from penstock.spark.schemas import to_struct
from tests.support.change_frames import SCHEMA, Files, Sink, collected, contract, frame


def plan_of(df: DataFrame) -> str:
    """The plan as Spark has understood it."""
    return str(df._jdf.queryExecution().analyzed().toString())


def optimized(df: DataFrame, folder: Path) -> str:
    """The plan of a micro-batch as Spark has optimized it."""
    writer = df.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return str(query._jsq.explainInternal(True)).partition("Optimized Logical Plan")[2]


def process(df: DataFrame, flags: str = "CU", **more: object) -> DataFrame:
    options = {
        name: more.pop(name)
        for name in list(more)
        if name in ("strategy", "compute_updates", "deduplication_mode", "net_window", "watermark_delay")
    }
    return penstock.changes.post_process(df, contract(flags, **more), **options)


def test_the_micro_batch_strategy_has_one_shuffle_and_no_state(spark: SparkSession, tmp_path: Path) -> None:
    plan = plan_of(process(Files(spark, tmp_path).read(), whole_commits=True, compute_updates=True))
    assert plan.count("RepartitionByExpression") == 1
    for node in ("Window", "Sort", "Aggregate", "EventTimeWatermark"):
        assert node not in plan
    assert plan.count("MapInArrow") == 2


def test_rows_are_shuffled_in_parcels_if_their_ids_can_be_hashed(spark: SparkSession, tmp_path: Path) -> None:
    stream = Files(spark, tmp_path).read()
    plan = plan_of(process(stream, "U", whole_commits=True, compute_updates=True))
    assert "RepartitionByExpression [__penstock_place" in plan
    nested = stream.withColumn("id", F.array("id"))
    plan = plan_of(process(nested, "U", whole_commits=True, compute_updates=True))
    assert "RepartitionByExpression [id#" in plan
    assert plan.count("MapInArrow") == plan.count("RepartitionByExpression") == 1


@pytest.mark.parametrize("window", [None, "commit", "1 hour"])
def test_the_watermark_strategy_has_one_watermark_and_one_aggregate(
    spark: SparkSession, tmp_path: Path, window: str | None
) -> None:
    more = {} if window is None else {"deduplication_mode": "netChanges", "net_window": window}
    plan = plan_of(
        process(Files(spark, tmp_path).read(), "CIU", whole_commits=False, compute_updates=True, **more)
    )
    assert plan.count("EventTimeWatermark") == plan.count("Aggregate") == 1
    assert "Sort" not in plan
    assert "Window [" not in plan


@pytest.mark.parametrize("whole", [True, False])
def test_the_guard_survives_the_optimizer_and_there_is_only_one_shuffle(
    spark: SparkSession, tmp_path: Path, whole: bool
) -> None:
    files = Files(spark, tmp_path)
    files.add([(1, "a", 1, "insert", 1, 1_700_000_000_000_000)])
    changes = process(files.read(), whole_commits=whole, compute_updates=True)
    plan = optimized(changes.select(F.lit(1)), tmp_path)
    logical, _, physical = plan.partition("Physical Plan")
    physical, _, _ = physical.partition("Initial Plan")
    assert logical.count("MapInArrow") == 2, plan
    for stage in ("FirstPass", "AllPasses"):
        assert f"MapInArrow {stage}" in physical, plan
    assert len(re.findall(r"\bExchange\b", physical)) == 1, physical
    assert "Window" not in physical, physical
    assert not re.search(r"\bSort(Aggregate|MergeJoin)?\b", physical), physical
    stateful = re.findall(r"StateStore\w+", physical)
    assert stateful == ([] if whole else ["StateStoreSave", "StateStoreRestore"]), physical


def test_a_stream_of_a_spark_connect_session_is_refused() -> None:
    conf = SimpleNamespace(get=lambda name: "false")
    df = NonCallableMock(
        DataFrame, schema=to_struct(SCHEMA), isStreaming=True, sparkSession=SimpleNamespace(conf=conf)
    )
    for whole in (True, False):
        with pytest.raises(InvalidChangeOptionError, match="classic session") as caught:
            process(df, whole_commits=whole)
        assert caught.value.condition == "INVALID_CDC_OPTION.CLASSIC_SESSION_NEEDED"
    assert process(df, "") is df


@pytest.mark.filterwarnings("ignore:.* does nothing under this contract")
def test_the_frame_is_unchanged_if_there_is_nothing_to_do(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark, [])
    assert process(df, "") is df
    assert process(df, "U") is df
    assert process(df, "C", deduplication_mode="none") is df
    assert process(df, "C", deduplication_mode="NETchanges") is not df
    assert process(df, "U", deduplication_mode="netChanges") is df
    stream = Files(spark, tmp_path).read()
    assert process(stream, "I") is stream
    kept = penstock.changes.post_process(stream, contract("I"), keep_watermark=True)
    assert "EventTimeWatermark" in plan_of(kept)


@pytest.mark.parametrize(
    ("flags", "given", "flag"),
    [
        ("CU", {"deduplication_mode": "netChanges"}, "intermediate_changes=True"),
        ("CI", {"compute_updates": True}, "updates_as_delete_and_insert=True"),
        ("CI", {"deduplication_mode": "netChanges", "compute_updates": True}, None),
        ("CU", {"compute_updates": True}, None),
        ("C", {"net_window": "commit"}, "net_window"),
        ("", {}, None),
    ],
)
def test_unnecessary_options_are_warned_about(
    spark: SparkSession, flags: str, given: dict[str, object], flag: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        penstock.changes.post_process(frame(spark, []), contract(flags), **given)
    assert len(caught) == (flag is not None)
    assert all(str(flag) in str(each.message) for each in caught)
    assert {each.filename for each in caught} <= {__file__}


def test_the_schema_does_not_change(spark: SparkSession, tmp_path: Path) -> None:
    schema = StructType(
        [
            StructField("_COMMIT_version", StringType(), False),
            StructField(
                "Key",
                StructType([StructField("a b", LongType(), False), StructField("c.d", LongType())]),
                False,
            ),
            StructField("data", StringType(), True, {"comment": "what it holds", "n": 1}),
            StructField("_commit_timestamp", TimestampType(), False),
            StructField("_change_type", StringType(), False),
        ]
    )
    rows = [
        ("1", (1, 2), None, datetime(2026, 1, 1, tzinfo=UTC), kind) for kind in ("delete", "insert", "insert")
    ]
    df = spark.createDataFrame(rows, schema)
    given = penstock.ChangeContract(["key.`a b`", "key.`c.d`"], carryover_rows=True, whole_commits=True)
    done = penstock.changes.post_process(df, given)
    assert done.schema.json() == schema.json()
    assert done.count() == 1
    for whole in (True, False):
        folder = tmp_path / str(whole)
        df.write.parquet(str(folder))
        stream = spark.readStream.schema(schema).parquet(str(folder))
        rule = penstock.ChangeContract(["key.`a b`", "key.`c.d`"], carryover_rows=True, whole_commits=whole)
        assert penstock.changes.post_process(stream, rule).schema.json() == stream.schema.json()


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_the_watermark_strategy_requires_append_mode(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    done = process(Files(spark, tmp_path).read(), whole_commits=False)
    with pytest.raises(Exception, match=r"STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION.*[Cc]hange") as caught:
        Sink(tmp_path).run(done, mode)
    assert "post-processing" in str(caught.value).lower()


def test_the_micro_batch_strategy_requires_append_or_update_mode(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    files.add([(1, "a", 1, "insert", 1, 1_700_000_000_000_000)])
    assert Sink(tmp_path).run(process(files.read(), whole_commits=True), "update").total() == 1


@pytest.mark.parametrize(
    ("given", "condition"),
    [
        ({"deduplication_mode": "all"}, "INVALID_CDC_OPTION.INVALID_DEDUPLICATION_MODE"),
        ({"compute_updates": "perhaps"}, "INVALID_CDC_OPTION"),
        (
            {"deduplication_mode": "none", "compute_updates": True},
            "INVALID_CDC_OPTION.UPDATE_DETECTION_REQUIRES_CARRY_OVER_REMOVAL",
        ),
        ({"strategy": "state"}, "INVALID_CDC_OPTION.INVALID_STRATEGY"),
        ({}, "INVALID_CDC_OPTION.STRATEGY_UNKNOWN"),
        ({"strategy": "micro_batch"}, "INVALID_CDC_OPTION.STRATEGY_NOT_APPLICABLE"),
        ({"deduplication_mode": "netChanges"}, "INVALID_CDC_OPTION.STREAMING_NET_CHANGES_NOT_SUPPORTED"),
        ({"deduplication_mode": "netChanges", "net_window": "1 month"}, "INVALID_CDC_OPTION"),
        ({"deduplication_mode": "netChanges", "net_window": "0 seconds"}, "INVALID_CDC_OPTION"),
        ({"deduplication_mode": "netChanges", "net_window": "1500 microseconds"}, "INVALID_CDC_OPTION"),
        ({"watermark_delay": "soon", "whole_commits": False}, "INVALID_CDC_OPTION"),
    ],
)
def test_wrong_options_are_refused(
    spark: SparkSession, tmp_path: Path, given: dict[str, object], condition: str
) -> None:
    with pytest.raises(InvalidChangeOptionError) as caught:
        process(Files(spark, tmp_path).read(), "CIU", **given)
    assert caught.value.condition == condition


def drop(name: str) -> pa.Schema:
    return pa.schema([field for field in SCHEMA if field.name != name])


@pytest.mark.parametrize(
    ("schema", "more", "condition"),
    [
        (drop("_change_type"), {}, "MISSING_COLUMN"),
        (drop("_commit_version"), {}, "MISSING_COLUMN"),
        (drop("rv"), {}, "MISSING_COLUMN"),
        (SCHEMA, {"row_id": ["idd"]}, "MISSING_COLUMN"),
        (SCHEMA, {"row_id": "id.x"}, "MISSING_COLUMN"),
        (SCHEMA, {"sequence": "nr"}, "MISSING_COLUMN"),
        (SCHEMA.set(4, pa.field("_commit_version", pa.int32())), {}, "INVALID_COLUMN_TYPE"),
        (SCHEMA.set(5, pa.field("_commit_timestamp", pa.date32())), {}, "INVALID_COLUMN_TYPE"),
        (SCHEMA.set(0, pa.field("id", pa.map_(pa.string(), pa.int64()))), {}, "INVALID_COLUMN_TYPE"),
        (SCHEMA.append(pa.field("__penstock_event_time", pa.int64())), {}, "RESERVED_COLUMN"),
        (SCHEMA.append(pa.field("__SPARK_cdc_events", pa.int64())), {}, "RESERVED_COLUMN"),
    ],
)
def test_wrong_schemas_are_refused(
    spark: SparkSession, schema: pa.Schema, more: dict[str, object], condition: str
) -> None:
    with pytest.raises(InvalidChangelogSchemaError) as caught:
        process(spark.createDataFrame(schema.empty_table()), **more)
    assert caught.value.condition == f"INVALID_CHANGELOG_SCHEMA.{condition}"


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("interval '1-2' year to month as months", "interval year to month"),
        ("array(named_struct('x', make_interval(1, 2, 3))) as months", "array<struct<x:interval>>"),
    ],
)
def test_intervals_with_months_are_refused_by_name_where_a_pass_needs_them(
    spark: SparkSession, column: str, kind: str
) -> None:
    df = spark.createDataFrame(SCHEMA.empty_table()).selectExpr("*", column)
    for row_id in ("id", "months"):
        with pytest.raises(InvalidChangelogSchemaError) as caught:
            process(df, "CU", row_id=row_id)
        assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.INVALID_COLUMN_TYPE"
        assert f"the column 'months' is {kind}" in caught.value.message
    assert process(df, "") is df


@pytest.mark.parametrize("kind", ["variant", "geometry(0)", "array<geography(4326)>"])
def test_a_row_id_that_spark_cannot_shuffle_by_is_refused(spark: SparkSession, kind: str) -> None:
    try:
        spark.sql(f"select cast(null as {kind})")
    except ParseException:
        pytest.skip("this version of Spark does not have the type")
    df = spark.createDataFrame(SCHEMA.empty_table()).selectExpr("*", f"cast(null as {kind}) as place")
    with pytest.raises(InvalidChangelogSchemaError, match="place") as caught:
        process(df, row_id="place")
    assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.INVALID_COLUMN_TYPE"


@pytest.mark.parametrize(
    ("column", "more"),
    [
        ("cast(id as string) collate UTF8_LCASE as text", {"row_id": "text"}),
        ("named_struct('x', array('a' collate UTF8_BINARY_RTRIM)) as text", {"row_id": "text"}),
        ("'a' collate UNICODE as text", {"sequence": "text"}),
        ("cast(_commit_version as string) collate UNICODE_CI as text", {}),
    ],
)
def test_text_with_a_collation_is_refused_where_it_is_compared(
    spark: SparkSession, column: str, more: dict[str, object]
) -> None:
    df = spark.createDataFrame(SCHEMA.empty_table()).selectExpr("*", column)
    if not more:
        df = df.withColumn("_commit_version", df["text"])
    with pytest.raises(InvalidChangelogSchemaError, match="collate") as caught:
        process(df, **more)
    assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.INVALID_COLUMN_TYPE"
    data = df if more else df.withColumn("_commit_version", df["text"].cast("string"))
    process(data)


def test_names_that_differ_only_in_case_in_a_case_sensitive_session(spark: SparkSession) -> None:
    rows = [(1, "a", 1, kind, 1, 1_700_000_000_000_000, 7, "x") for kind in ("delete", "insert")]
    schema = SCHEMA.append(pa.field("ID", pa.int64())).append(pa.field("_CHANGE_TYPE", pa.string()))
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert collected(process(frame(spark, rows, schema))) == Counter()
        with pytest.raises(InvalidChangelogSchemaError, match="MISSING_COLUMN"):
            process(frame(spark, rows, schema), row_id="Id")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_contract_without_a_row_id() -> None:
    for nothing in ([], "", [""]):
        with pytest.raises(InvalidChangelogSchemaError) as caught:
            penstock.ChangeContract(nothing)
        assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID"
    with pytest.raises(InvalidChangelogSchemaError, match="twice"):
        penstock.ChangeContract(["id", "id"])


def test_an_empty_feed(spark: SparkSession) -> None:
    assert collected(process(frame(spark, []), compute_updates=True)).total() == 0
