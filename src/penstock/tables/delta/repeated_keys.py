"""Rows of a micro-batch with the same key: found without all of its keys in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.arrow.key_hash import row_hashes
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.row_checks import first_repeated_key

_FEW_ROWS, _FEW_BYTES = 1 << 19, 1 << 26
"""A micro-batch of at most so many rows, and bytes in its files, is checked in the driver."""
_ROWS_PER_PART = 1 << 20
_MOST_HASHES = 1000
_HASH = pa.schema([("hash", pa.int64())])


def repeated_key(
    spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]
) -> dict[str, object] | None:
    """Return a key that several rows have; None if there is none."""
    names = list(stage.layout.keys)
    rows = sum(file.rows for file in files)
    if rows <= _FEW_ROWS and sum(file.size for file in files) <= _FEW_BYTES:
        return first_repeated_key(stage.columns(files, names))
    hashes = HashTask(stage, tuple(files)).job(spark, len(files), "hash bigint")
    parts = max(-(-rows // _ROWS_PER_PART), spark.sparkContext.defaultParallelism)
    counted = hashes.repartition(parts, "hash").groupBy("hash").count().where(F.col("count") > 1)
    repeated = counted.select("hash").limit(_MOST_HASHES).collect()
    if not repeated:
        return None
    # Different keys rarely have the same hash; so many of them never do.
    wanted = pa.array([row.hash for row in repeated], pa.int64())
    with stage.place.translating_errors():
        return first_repeated_key(pa.concat_tables(_with_hashes(stage, files, wanted)))


@dataclass
class HashTask(FileTask):
    """Takes numbers of files, and returns a hash of the key of each row."""

    stage: DeltaStage = field(repr=False)
    files: tuple[DataFile, ...]

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        for keys in _keys(self.stage, self.files[number : number + 1]):
            yield pa.RecordBatch.from_arrays([_hashes(keys)], schema=_HASH)


def _keys(stage: DeltaStage, files: Sequence[DataFile]) -> Iterator[pa.RecordBatch]:
    columns = pa.schema([stage.layout.schema.field(key) for key in stage.layout.keys])
    return stage.chunks(files, columns)


def _hashes(keys: pa.RecordBatch) -> pa.Array:
    return row_hashes(pa.Table.from_batches([keys])).view(pa.int64())


def _with_hashes(stage: DeltaStage, files: Sequence[DataFile], wanted: pa.Array) -> Iterator[pa.Table]:
    for keys in _keys(stage, files):
        yield pa.Table.from_batches([keys]).filter(pc.is_in(_hashes(keys), value_set=wanted))
