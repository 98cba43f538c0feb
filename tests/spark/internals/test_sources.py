"""What a session knows of formats, its own check of output modes, and names and types of Spark's."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType, TimestampType

from penstock.spark.internals import sources
from penstock.spark.internals.arrow_types import arrow_schema, arrow_type, as_sent, parse_type
from penstock.spark.internals.output_mode_checker import refusal
from penstock.spark.internals.sources import Format, look_up, set_variables


@pytest.fixture(scope="module")
def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


def test_formats_are_looked_up_as_a_query_would(rate: DataFrame) -> None:
    assert look_up(rate, "console") == Format(truncates=True, updates=True)
    assert look_up(rate, "penstock").python
    assert not look_up(rate, "binaryFile").streams
    missing = look_up(rate, "no_such_format").missing
    assert missing is not None
    assert missing.condition == "DATA_SOURCE_NOT_FOUND"


def test_sparks_check_names_the_condition_and_the_reason(rate: DataFrame) -> None:
    counted = rate.groupBy("value").count()
    assert refusal(counted, "update") is None
    refused = refusal(counted, "append")
    assert refused is not None
    assert refused.condition == "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"
    assert "\n" not in refused.message
    assert refusal(counted, "update", "continuous") is not None
    assert refusal(rate, "append", "real time") is not None


def test_the_variables_that_spark_adds_are_there_before(spark: SparkSession) -> None:
    set_variables(spark, "penstock")
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    environment = manager.lookupDataSource("penstock").dataSourceCls().envVars()
    assert environment.containsKey("SPARK_PYTHON_RUNTIME")


@pytest.mark.parametrize("name", [sources.FILE_MANAGER, sources.ROCKSDB])
def test_classes_that_stand_in_settings_are_there(spark: SparkSession, name: str) -> None:
    assert spark._jvm is not None
    assert spark._jvm.java.lang.Class.forName(name).getName() == name


def test_types_are_those_that_spark_sends() -> None:
    schema = StructType([StructField("at", TimestampType()), StructField("many", ArrayType(LongType()))])
    assert arrow_schema(schema).field("at").type == pa.timestamp("us", "UTC")
    assert arrow_schema(schema, "Europe/Berlin").field("at").type == pa.timestamp("us", "Europe/Berlin")
    assert arrow_type(LongType()) == pa.int64()
    assert as_sent(pa.large_string()) == arrow_type(StringType())
    assert as_sent(pa.time64("ns")) in (None, pa.time64("ns"))
    assert parse_type(schema.json()) == schema
