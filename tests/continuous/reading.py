"""A finite reader in place of the engine's, so that a batch job returns the rows that pass through a
continuous frame.
"""

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
"""("rows", how many), ("marker", the epoch that ends), ("filler", how many)."""


@dataclass(frozen=True)
class Output:
    """The output of a frame."""

    rows: list[Json]
    markers: list[int]
    fillers: int
    order: list[tuple[int, int]]
    """The kind and epoch of each row, in order."""


def read_steps(table: pa.Table, steps: list[Step]) -> Callable[[Iterator[Any]], Iterator[pa.RecordBatch]]:
    """Return a reader of rows, markers and fillers: each step is a batch, with copies of the last row."""

    def read(_: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        at, epoch = 0, 1
        for step, number in steps:
            if step == "rows":
                rows, kind = table.slice(at, number), ROW
                at += rows.num_rows
            else:
                kind = MARKER if step == "marker" else FILLER
                rows = table.take([at - 1] * (1 if step == "marker" else number))
            for field, value in zip(METADATA_COLUMNS, (kind, epoch), strict=True):
                rows = rows.append_column(field, pa.array([value] * rows.num_rows, field.type))
            yield from rows.combine_chunks().to_batches()
            epoch += step == "marker"

    return read


def source_of(spark: SparkSession, plain: DataFrame, steps: list[Step]) -> ContinuousFrame:
    """Return the continuous frame over a DataFrame's rows."""
    hidden = [StructField(KIND, ByteType(), False), StructField(EPOCH, LongType(), False)]
    reader = read_steps(plain.toArrow(), steps)
    return begin_frame(
        spark.range(0, 1, 1, 1).mapInArrow(reader, StructType([*plain.schema, *hidden]), barrier=True)
    )


def run(spark: SparkSession, plain: DataFrame, steps: list[Step], transform: Callable[[Any], Any]) -> Output:
    """Return what passes a transform."""
    return output_of(apply_transform(source_of(spark, plain, steps), transform))


def output_of(frame: ContinuousFrame) -> Output:
    """Return the output of a frame."""
    table = frame.full_frame.toArrow()
    assert table.column_names == [*frame.columns, KIND, EPOCH]
    count = table.num_columns
    kind, epoch = table.column(count - 2), table.column(count - 1)
    rows = table.filter(pc.equal(kind, ROW)).select(list(range(count - 2)))
    order = list(zip(kind.to_pylist(), epoch.to_pylist(), strict=True))
    markers = [number for what, number in order if what == MARKER]
    return Output(rows.to_pylist(), markers, sum(what == FILLER for what, _ in order), order)
