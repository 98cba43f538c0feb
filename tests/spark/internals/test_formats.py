"""What a session knows about formats, its own check of output modes, and Spark's names and types."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType, TimestampType

from penstock.spark.internals import sessions
from penstock.spark.internals.python_workers import arrow_schema, arrow_type, parse_type, round_trip_type
from penstock.spark.internals.query_start import Format, check_output_mode, look_up_format, preset_environment


@pytest.fixture(scope="module")
def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


def test_formats_are_looked_up_as_in_a_query(rate: DataFrame) -> None:
    assert look_up_format(rate, "console") == Format(truncates=True, updates=True)
    assert look_up_format(rate, "penstock").python
    assert not look_up_format(rate, "binaryFile").streams
    missing = look_up_format(rate, "no_such_format").not_found
    assert missing is not None
    assert missing.condition == "DATA_SOURCE_NOT_FOUND"


def test_sparks_check_names_the_condition_and_the_reason(rate: DataFrame) -> None:
    counted = rate.groupBy("value").count()
    assert check_output_mode(counted, "update") is None
    refused = check_output_mode(counted, "append")
    assert refused is not None
    assert refused.condition == "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"
    assert "\n" not in refused.message
    assert check_output_mode(counted, "update", "continuous") is not None
    assert check_output_mode(rate, "append", "real time") is not None


def test_the_environment_variables_that_spark_adds_are_preset(spark: SparkSession) -> None:
    preset_environment(spark, "penstock")
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    environment = manager.lookupDataSource("penstock").dataSourceCls().envVars()
    assert environment.containsKey("SPARK_PYTHON_RUNTIME")


@pytest.mark.parametrize("name", [sessions.CHECKPOINT_FILE_MANAGER, sessions.ROCKSDB_PROVIDER])
def test_classes_named_in_settings_exist(spark: SparkSession, name: str) -> None:
    assert spark._jvm is not None
    assert spark._jvm.java.lang.Class.forName(name).getName() == name


def test_arrow_types_are_those_that_spark_sends() -> None:
    schema = StructType([StructField("at", TimestampType()), StructField("many", ArrayType(LongType()))])
    assert arrow_schema(schema).field("at").type == pa.timestamp("us", "UTC")
    assert arrow_schema(schema, "Europe/Berlin").field("at").type == pa.timestamp("us", "Europe/Berlin")
    assert arrow_type(LongType()) == pa.int64()
    assert round_trip_type(pa.large_string()) == arrow_type(StringType())
    assert round_trip_type(pa.time64("ns")) in (None, pa.time64("ns"))
    assert parse_type(schema.json()) == schema
