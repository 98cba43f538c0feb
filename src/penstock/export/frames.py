"""The rows of a queue as a Spark DataFrame, from the table that it is exported to and from the queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.export.targets import Place
from penstock.extras import load
from penstock.lake.storage import DeltaPlace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def exported_frame(spark: SparkSession, place: Place, version: int, rows: pa.Schema) -> DataFrame:
    """Return the rows that a version of the table has, in the types of a queue's rows."""
    is_delta = isinstance(place, DeltaPlace)
    kind, module = ("a Delta table", "delta_frame") if is_delta else ("an Iceberg table", "iceberg_frame")
    frame: Callable[..., DataFrame] = load(f"penstock.export.{module}", "exported_frame", kind)
    return frame(spark, place, version, rows)


def newer_frame(
    spark: SparkSession, url: str, queue: str, starts: Mapping[int, int], *, metadata_columns: bool
) -> DataFrame:
    """Return the rows of a queue from some positions on."""
    positions = json.dumps({str(part): start for part, start in starts.items()})
    return (
        spark.read.format("penstock")
        .option("url", url)
        .option("startingOffsets", positions)
        .option("includeMetadataColumns", str(metadata_columns).lower())
        .load(queue)
    )
