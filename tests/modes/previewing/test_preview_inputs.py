"""The micro-batches that a preview accepts, and how their types are converted."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import penstock
from penstock.errors import InvalidInputError, SchemaMismatchError
from penstock.modes.previewing.inputs import input_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
PLAIN = StructType([StructField("id", LongType()), StructField("name", StringType())])


def tables(
    spark: SparkSession, batches: object, schema: object = None, **more: Any
) -> list[list[dict[str, Any]]]:
    return [table.to_pylist() for table in input_of(spark, "batches", batches, schema, **more).tables]


def test_rows_tables_and_frames_may_be_mixed(spark: SparkSession) -> None:
    found = tables(
        spark,
        [
            [{"id": 1, "name": "a"}, Row(id=2, name="b")],
            pa.table({"id": pa.array([3], pa.int32()), "name": ["c"]}),
            pa.record_batch({"name": ["d"], "id": [4]}),
            pd.DataFrame({"id": [5], "name": ["e"]}),
            spark.createDataFrame([(6, "f")], PLAIN),
            [(7, "g"), {"id": 8}],
            [],
        ],
        PLAIN,
    )
    named = [[(row["id"], row["name"]) for row in rows] for rows in found]
    assert named == [
        [(1, "a"), (2, "b")],
        [(3, "c")],
        [(4, "d")],
        [(5, "e")],
        [(6, "f")],
        [(7, "g"), (8, None)],
        [],
    ]


def test_the_schema_is_inferred_from_the_rows_in_the_order_of_their_keys(spark: SparkSession) -> None:
    found = input_of(spark, "batches", [[{"z": 1, "a": "x"}], [{"b": 1.5}]], None)
    assert found.schema.simpleString() == "struct<z:bigint,a:string,b:double>"
    assert all(field.nullable for field in found.schema)


@pytest.mark.parametrize(
    "schema", ["id bigint, name string", PLAIN, pa.schema([("id", pa.int64()), ("name", pa.large_string())])]
)
def test_a_schema_may_be_ddl_a_struct_type_or_an_arrow_schema(spark: SparkSession, schema: object) -> None:
    assert input_of(spark, "batches", [[]], schema).schema == PLAIN


def test_dates_and_times_may_be_given_as_text(spark: SparkSession) -> None:
    rows = [
        {"ts": "2026-01-01 12:00:00", "day": "2026-01-02"},
        {"ts": NOON, "day": date(2026, 1, 2)},
        {"ts": None},
    ]
    (found,) = tables(spark, [rows], "ts timestamp, day date")
    assert found == [
        {"ts": NOON, "day": date(2026, 1, 2)},
        {"ts": NOON, "day": date(2026, 1, 2)},
        {"ts": None, "day": None},
    ]
    (found,) = tables(spark, [[{"ts": "2026-01-01T12:00:00Z"}]], watermark=("ts", "1 minute"))
    assert found == [{"ts": NOON}]


def test_integers_are_converted_to_floats_and_decimals_by_the_schema(spark: SparkSession) -> None:
    (found,) = tables(spark, [[{"f": 1, "d": 2}]], "f double, d decimal(5,2)")
    assert found == [{"f": 1.0, "d": Decimal("2.00")}]


def test_every_type_passes_through_a_query_unchanged(spark: SparkSession) -> None:
    schema = (
        "b boolean, y tinyint, i int, f float, d decimal(20,3), s string, bin binary, da date, ts timestamp, "
        "tn timestamp_ntz, a array<int>, m map<string,int>, st struct<x:int,y:string>, iv interval day to "
        "second"
    )
    row: dict[str, Any] = {
        "b": True,
        "y": 1,
        "i": 2,
        "f": 0.5,
        "d": Decimal("3.125"),
        "s": "ü\n",
        "bin": b"\x00a",
        "da": date(2026, 1, 1),
        "ts": NOON,
        "tn": datetime(2026, 1, 1, 12),  # noqa: DTZ001 - it has no time zone
        "a": [1, None],
        "m": [("k", 1)],
        "st": {"x": 1, "y": None},
        "iv": timedelta(days=1, microseconds=1),
    }
    given = row | {"m": dict(row["m"])}
    found = penstock.modes.preview(spark, lambda frame: frame, [[given, {}]], schema=schema, modes="append")
    assert found["append"].batches[0].emitted.to_pylist() == [row, dict.fromkeys(row)]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches is empty"),
        ([{"id": 1}], "put each micro-batch's rows into a list"),
        ([Row(id=1)], "put each micro-batch's rows into a list"),
        (pa.table({"id": [1]}), "batches is a list of micro-batches"),
        ([[1, 2]], "a row in micro-batch 0 of batches is a dict"),
        ([[(1, 2)]], "with its columns in schema="),
        (["text"], "micro-batch 0 of batches is a list of rows"),
        ([[], []], "infer the columns from: pass schema="),
    ],
)
def test_an_argument_that_is_not_a_list_of_micro_batches_is_refused(
    spark: SparkSession, batches: object, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        input_of(spark, "batches", batches, None)


def test_rows_that_do_not_match_the_schema_are_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError, match=r"UNKNOWN_COLUMN\].*Did you mean 'name'"):
        input_of(spark, "batches", [[{"id": 1, "nam": "x"}]], PLAIN)
    with pytest.raises(
        InvalidInputError, match=r"\[INVALID_INPUT\].*a row of 3 values, and the schema has 2 columns"
    ):
        input_of(spark, "batches", [[(1, "x", 2)]], PLAIN)
    with pytest.raises(InvalidInputError, match=r"UNKNOWN_COLUMN\].*which its Arrow tables do not have"):
        input_of(spark, "batches", [pa.table({"id": [1]}), [{"key": 1}]], None)
    with pytest.raises(SchemaMismatchError, match=r"COLUMN_TYPE\].*id"):
        input_of(spark, "batches", [pa.table({"id": ["x"]})], PLAIN)
    with pytest.raises(PySparkException, match="id"):
        input_of(spark, "batches", [[{"id": "x"}]], PLAIN)
    with pytest.raises(InvalidInputError, match="schema is DDL"):
        input_of(spark, "batches", [[]], 7)


def test_a_streaming_frame_is_refused_as_a_micro_batch(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError, match=r"INPUT.STREAMING\].*is a streaming DataFrame"):
        input_of(spark, "batches", [spark.readStream.format("rate").load()], None)


@pytest.mark.parametrize("event_time", ["ts", ("ts",), ("ts", 10), {"batches": "ts"}])
def test_an_event_time_without_a_delay_is_refused(spark: SparkSession, event_time: Any) -> None:
    with pytest.raises(InvalidInputError, match="event_time is a column and a delay"):
        penstock.modes.preview(spark, lambda frame: frame, [[{"ts": NOON}]], event_time=event_time)


def test_a_schema_for_an_unknown_input_is_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError, match="an input 'right', and batches has left"):
        penstock.modes.preview(spark, lambda left: left, {"left": [[{"id": 1}]]}, schema={"right": "id int"})
