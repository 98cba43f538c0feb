"""Spark's types as Arrow's, and back, as PySpark converts them (``pyspark.sql.pandas.types``, 4.2 and 4.3)."""

from __future__ import annotations

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.types import DataType, StructType, _parse_datatype_json_string


def arrow_schema(schema: StructType, time_zone: str | None = "UTC") -> pa.Schema:
    """The Arrow schema of the batches in which Spark sends such rows to Python."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone=time_zone)


def arrow_type(data_type: DataType) -> pa.DataType:
    """The Arrow type in which Spark sends such values to Python."""
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(data_type, timezone="UTC")


def round_trip_type(data_type: pa.DataType) -> pa.DataType | None:
    """The Arrow type in which Spark sends values that it takes in another one; None for a type that Spark has not."""
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        return arrow_type(from_arrow_type(data_type))
    except PySparkException:
        return None


def parse_type(text: str) -> DataType:
    """A type from Spark's JSON."""
    return _parse_datatype_json_string(text)
