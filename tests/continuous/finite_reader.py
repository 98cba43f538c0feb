"""Finite reader that replaces the engine's, so that a batch job returns the output of a continuous frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ByteType, LongType, StructField, StructType

from penstock.continuous.channel import EPOCH, FILLER, KIND, MARKER, METADATA_COLUMNS
from penstock.continuous.dataframe import ContinuousFrame, apply_transform, begin_frame
from penstock.json_text import Json
from penstock.spark.internals.udf_wrapper import ROW

Step = tuple[str, int]
"""("rows", their number), ("marker", the epoch that ends) or ("filler", their number)."""


@dataclass(frozen=True)
class Output:
    """Output of a continuous frame."""

    rows: list[Json]
    markers: list[int]
    fillers: int
    order: list[tuple[int, int]]
    """The kind and the epoch of each row, marker and filler, in order."""


def read_steps(table: pa.Table, steps: list[Step]) -> Callable[[Iterator[Any]], Iterator[pa.RecordBatch]]:
    """Return a reader that yields each step as a batch. Markers and fillers are copies of the last row."""

    def read(_: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        position, epoch = 0, 1
        for step, number in steps:
            if step == "rows":
                rows, kind = table.slice(position, number), ROW
                position += rows.num_rows
            else:
                kind = MARKER if step == "marker" else FILLER
                rows = table.take([position - 1] * (1 if step == "marker" else number))
            for field, value in zip(METADATA_COLUMNS, (kind, epoch), strict=True):
                rows = rows.append_column(field, pa.array([value] * rows.num_rows, field.type))
            yield from rows.combine_chunks().to_batches()
            epoch += step == "marker"

    return read


def create_frame(spark: SparkSession, df: DataFrame, steps: list[Step]) -> ContinuousFrame:
    """Return a continuous frame over the rows of a DataFrame."""
    hidden_fields = [StructField(KIND, ByteType(), False), StructField(EPOCH, LongType(), False)]
    reader = read_steps(df.toArrow(), steps)
    return begin_frame(
        spark.range(0, 1, 1, 1).mapInArrow(reader, StructType([*df.schema, *hidden_fields]), barrier=True)
    )


def run_transform(
    spark: SparkSession, df: DataFrame, steps: list[Step], transform: Callable[[Any], Any]
) -> Output:
    """Return the output of a transformation of a DataFrame's rows."""
    return collect_output(apply_transform(create_frame(spark, df, steps), transform))


def collect_output(frame: ContinuousFrame) -> Output:
    """Return the output of a frame."""
    table = frame.full_frame.toArrow()
    assert table.column_names == [*frame.columns, KIND, EPOCH]
    count = table.num_columns
    kind, epoch = table.column(count - 2), table.column(count - 1)
    rows = table.filter(pc.equal(kind, ROW)).select(list(range(count - 2)))
    order = list(zip(kind.to_pylist(), epoch.to_pylist(), strict=True))
    markers = [number for row_kind, number in order if row_kind == MARKER]
    return Output(rows.to_pylist(), markers, sum(row_kind == FILLER for row_kind, _ in order), order)
