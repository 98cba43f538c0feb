from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from pyspark.sql import types as sp
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from penstock.arrow.schema import canonical_schema, schema_from_bytes, schema_to_bytes, spark_json
from penstock.errors import SchemaMismatchError, StoreError, UnsupportedTypeError
from tests.support.arrow_strategies import schemas


def field(name: str, kind: Any, nullable: bool = True, metadata: dict[str, Any] | None = None) -> Any:
    return sp.StructField(name, kind, nullable, metadata)


EVERY_TYPE = sp.StructType(
    [
        field("boolean", sp.BooleanType()),
        field("byte", sp.ByteType()),
        field("short", sp.ShortType(), False),
        field("integer", sp.IntegerType()),
        field("long", sp.LongType(), False, {"comment": "the id"}),
        field("float", sp.FloatType()),
        field("double", sp.DoubleType()),
        field("decimal", sp.DecimalType(38, 18)),
        field("string", sp.StringType()),
        field("binary", sp.BinaryType()),
        field("date", sp.DateType()),
        field("timestamp", sp.TimestampType()),
        field("timestamp_ntz", sp.TimestampNTZType()),
        field("time", sp.TimeType(6)),
        field("interval", sp.DayTimeIntervalType()),
        field("void", sp.NullType()),
        field("variant", sp.VariantType()),
        field("geometry", sp.GeometryType(3857)),
        field("geometries", sp.GeometryType("ANY")),
        field("geography", sp.GeographyType(4326)),
        field("geographies", sp.GeographyType("ANY")),
        field("list", sp.ArrayType(sp.ArrayType(sp.IntegerType(), False), True)),
        field("map", sp.MapType(sp.StringType(), sp.MapType(sp.IntegerType(), sp.StringType(), False))),
        field("struct", sp.StructType([field("in", sp.StringType(), False, {"k": [1]})])),
    ]
)


def test_a_spark_schema_is_converted_as_pyspark_converts_it() -> None:
    theirs = to_arrow_schema(EVERY_TYPE, timezone="UTC")
    assert canonical_schema(EVERY_TYPE).equals(theirs, check_metadata=True)
    assert canonical_schema(json.loads(EVERY_TYPE.json())).equals(theirs, check_metadata=True)
    assert canonical_schema(theirs).equals(theirs, check_metadata=True)


def test_spark_json_gives_the_same_spark_schema() -> None:
    assert sp.StructType.fromJson(json.loads(spark_json(canonical_schema(EVERY_TYPE)))) == EVERY_TYPE


@given(schemas())
def test_canonical_schemas_survive_a_round_trip_through_spark(schema: pa.Schema) -> None:
    spark = sp.StructType.fromJson(json.loads(spark_json(schema)))
    assert spark == from_arrow_schema(schema)
    assert canonical_schema(spark).equals(schema, check_metadata=True)
    assert to_arrow_schema(spark, timezone="UTC").equals(schema, check_metadata=True)


@given(schemas())
def test_canonical_schemas_are_unchanged_by_conversion_and_storage(schema: pa.Schema) -> None:
    assert canonical_schema(schema).equals(schema, check_metadata=True)
    assert schema_from_bytes(schema_to_bytes(schema)).equals(schema, check_metadata=True)


@pytest.mark.parametrize(
    ("given_type", "canonical"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary(4), pa.binary()),
        (pa.binary_view(), pa.binary()),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        (pa.timestamp("s"), pa.timestamp("us")),
        (pa.timestamp("ns", tz="Europe/Paris"), pa.timestamp("us", tz="UTC")),
        (pa.date64(), pa.date32()),
        (pa.decimal256(38, 2), pa.decimal128(38, 2)),
        (pa.duration("ms"), pa.duration("us")),
        (pa.time32("s"), pa.time64("ns")),
        (pa.time64("us"), pa.time64("ns")),
        (pa.large_list(pa.large_string()), pa.list_(pa.field("element", pa.string()))),
        (pa.list_(pa.date64(), 3), pa.list_(pa.field("element", pa.date32()))),
        (pa.list_view(pa.int8()), pa.list_(pa.field("element", pa.int8()))),
        (
            pa.list_(pa.field("item", pa.int8(), nullable=False)),
            pa.list_(pa.field("element", pa.int8(), nullable=False)),
        ),
        (
            pa.map_(
                pa.field("k", pa.large_string(), nullable=False), pa.field("v", pa.date64()), keys_sorted=True
            ),
            pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", pa.date32())),
        ),
        (pa.struct([("a", pa.time32("ms"))]), pa.struct([("a", pa.time64("ns"))])),
    ],
    ids=str,
)
def test_related_arrow_types_are_normalised(given_type: pa.DataType, canonical: pa.DataType) -> None:
    made = canonical_schema(pa.schema([pa.field("c", given_type, nullable=False)]))
    assert made.equals(pa.schema([pa.field("c", canonical, nullable=False)]), check_metadata=True)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        (pa.uint8(), "int16"),
        (pa.uint16(), "int32"),
        (pa.uint32(), "int64"),
        (pa.uint64(), "decimal128(20, 0)"),
        (pa.float16(), "float32"),
        (pa.decimal256(39, 2), "decimal128(38, 2) or string"),
        (pa.decimal128(5, -2), "decimal128(7, 0)"),
        (pa.decimal128(2, 3), "decimal128(3, 3)"),
        (pa.dense_union([pa.field("a", pa.int8())]), "a struct with one nullable field for each alternative"),
        (pa.run_end_encoded(pa.int32(), pa.string()), "its value type, string"),
        (pa.month_day_nano_interval(), "duration('us'), or an int32 number of months"),
        (pa.uuid(), "its storage type, fixed_size_binary[16]"),
    ],
    ids=str,
)
def test_types_without_a_spark_form_are_refused_with_an_alternative(kind: pa.DataType, instead: str) -> None:
    with pytest.raises(UnsupportedTypeError) as refused:
        canonical_schema(pa.schema([("ok", pa.int8()), ("bad", kind)]))
    assert refused.value.parameters["column"] == "bad"
    assert str(kind) in str(refused.value)
    assert str(refused.value).endswith(f": use {instead}")


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        (sp.CharType(3), "string"),
        (sp.VarcharType(3), "string"),
        (sp.YearMonthIntervalType(), "an integer number of months"),
        (sp.CalendarIntervalType(), "a day-time interval"),
        (sp.DecimalType(5, -2), "a decimal of 1 to 38 digits"),
    ],
    ids=str,
)
def test_spark_types_without_an_arrow_form_are_refused_with_an_alternative(kind: Any, instead: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=instead) as refused:
        canonical_schema(sp.StructType([field("bad", kind)]))
    assert refused.value.parameters["column"] == "bad"


def test_a_refused_nested_type_is_reported_with_its_path() -> None:
    nested = pa.struct([("b", pa.map_(pa.string(), pa.list_(pa.uint64())))])
    with pytest.raises(UnsupportedTypeError) as refused:
        canonical_schema(pa.schema([("a", nested)]))
    assert refused.value.parameters["column"] == "a.b.value.element"


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([]),
        pa.schema([("", pa.int8())]),
        pa.schema([("a", pa.int8()), ("a", pa.int8())]),
        pa.schema([("a", pa.int8()), ("A", pa.int8())]),
        pa.schema([("s", pa.struct([("x", pa.int8()), ("X", pa.int8())]))]),
        sp.StructType([]),
        sp.StructType([field("a", sp.LongType()), field("A", sp.LongType())]),
        sp.StructType([field("s", sp.StructType([field("", sp.LongType())]))]),
        sp.LongType(),
        {"type": "struct", "fields": [{"type": "long"}]},
        "a INT",
        None,
        {"type": "struct", "fields": [{"name": "a", "type": {"type": "struct"}}]},
        {"type": "struct", "fields": [{"name": "a", "type": {"type": "array", "elementType": "long"}}]},
        {
            "type": "struct",
            "fields": [{"name": "a", "type": {"type": "map", "keyType": "string", "valueType": "long"}}],
        },
    ],
    ids=str,
)
def test_a_schema_with_invalid_column_names_is_refused(schema: object) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        canonical_schema(schema)
    doubled = "the same name to Spark" in str(refused.value)
    problem = "DUPLICATE_COLUMN" if doubled else "INVALID_SCHEMA"
    assert refused.value.condition == f"SCHEMA_MISMATCH.{problem}"


def test_only_spark_column_metadata_is_kept() -> None:
    kept = {b"SPARK::metadata::json": b'{"b": 1, "a": 2}'}
    schema = pa.schema(
        [
            pa.field("a", pa.int8(), metadata={**kept, b"other": b"x"}),
            pa.field(
                "s",
                pa.struct([pa.field("in", pa.int8(), metadata=kept)]),
                metadata={b"PARQUET:field_id": b"1"},
            ),
        ],
        metadata={b"pandas": b"{}"},
    )
    made = canonical_schema(schema)
    assert made.metadata is None
    assert made.field("s").metadata is None
    for found in (made.field("a"), made.field("s").type.field("in")):
        assert found.metadata == {b"SPARK::metadata::json": b'{"a": 2, "b": 1}'}


def test_spark_column_metadata_that_is_not_a_json_object_is_refused() -> None:
    schema = pa.schema([pa.field("a", pa.int8(), metadata={b"SPARK::metadata::json": b"[1"})])
    with pytest.raises(SchemaMismatchError, match=r"INVALID_SCHEMA\].*JSON object"):
        canonical_schema(schema)


def test_a_user_defined_type_is_stored_as_its_sql_type() -> None:
    udt = {
        "type": "udt",
        "pyClass": "m.Point",
        "sqlType": {"type": "array", "elementType": "double", "containsNull": False},
    }
    spark = {"type": "struct", "fields": [{"name": "p", "type": udt, "nullable": True, "metadata": {}}]}
    assert canonical_schema(spark).field("p").type == pa.list_(
        pa.field("element", pa.float64(), nullable=False)
    )


def test_a_collation_is_dropped_as_in_pyspark() -> None:
    schema = sp.StructType([field("c", sp.ArrayType(sp.StringType("UNICODE_CI")))])
    assert canonical_schema(schema).equals(to_arrow_schema(schema, timezone="UTC"), check_metadata=True)


@pytest.mark.parametrize("damaged", ["", "alpha", "gamma", "delta", "UTC"])
def test_bytes_that_are_not_a_schema_message_are_refused(damaged: str) -> None:
    """Also where only a name or a time zone is not UTF-8, which Arrow decodes when it is used."""
    schema = pa.schema(
        [
            ("alpha", pa.int64()),
            ("b", pa.struct([("gamma", pa.string())])),
            ("m", pa.map_(pa.string(), pa.list_(pa.struct([("delta", pa.int8())])))),
            ("t", pa.timestamp("us", "UTC")),
        ]
    )
    data = b"nonsense"
    if damaged:
        data = schema_to_bytes(schema).replace(damaged.encode(), b"\xe4" * len(damaged))
    with pytest.raises(StoreError, match=r"UNREADABLE_RECORD\].*the schema of a queue is not what Penstock"):
        schema_from_bytes(data)
