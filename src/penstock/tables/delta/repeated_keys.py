"""Search for repeated keys in a micro-batch, without collecting all keys in one process.

Tasks hash the keys and shuffle the hashes by their leading bits, with many hashes in one Spark row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from penstock.arrow.key_hash import row_hashes
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.row_checks import first_repeated_key

_DRIVER_ROWS, _DRIVER_BYTES = 1 << 19, 1 << 26
"""The number of rows and of file bytes up to which the driver checks a micro-batch itself."""
_ROWS_PER_PART = 1 << 20
_MAX_REPEATED_HASHES = 100
"""The maximum number of repeated hashes that a task returns."""
_HASH_BYTES = 8
_PARTS_DDL, _REPEATED_DDL = "part int, hashes binary", "hash bigint"


def find_repeated_key(
    spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]
) -> dict[str, object] | None:
    """Return a key that several rows have; None if all keys are distinct."""
    names = list(stage.layout.keys)
    rows = sum(file.rows for file in files)
    if rows <= _DRIVER_ROWS and sum(file.size for file in files) <= _DRIVER_BYTES:
        return first_repeated_key(stage.columns(files, names))
    parts = max(-(-rows // _ROWS_PER_PART), spark.sparkContext.defaultParallelism, 2)
    bits = (parts - 1).bit_length()
    hashes = HashTask(stage, tuple(files), bits).job(spark, len(files), _PARTS_DDL)
    repeated = (
        hashes.repartitionById(1 << bits, "part")
        .mapInArrow(_find_repeated_in_worker, _REPEATED_DDL)
        .collect()
    )
    if not repeated:
        return None
    # Hash collisions of different keys are rare: there are always far fewer of them than a task returns.
    repeated_hashes = pa.array([row.hash for row in repeated], pa.int64())
    with stage.location.translating_errors():
        return first_repeated_key(pa.concat_tables(_keys_with_hashes(stage, files, repeated_hashes)))


@dataclass
class HashTask(FileTask):
    """Task that returns the key hashes of numbered files, by the leading bits of each hash."""

    stage: DeltaStage = field(repr=False)
    files: tuple[DataFile, ...]
    bits: int

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        for keys in _read_keys(self.stage, self.files[number : number + 1]):
            yield partition_hashes(_hash_keys(keys), self.bits)


def partition_hashes(hashes: pa.Array, bits: int) -> pa.RecordBatch:
    """Return a row for each partition, with its hashes concatenated."""
    sorted_hashes = np.sort(hashes.to_numpy())
    parts = (sorted_hashes >> np.uint64(64 - bits)).astype(np.int32)
    starts = np.flatnonzero(np.diff(parts, prepend=-1))
    ends = (_HASH_BYTES * np.append(starts, len(sorted_hashes))).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(sorted_hashes)]
    concatenated = pa.Array.from_buffers(pa.binary(), len(starts), buffers)
    return pa.RecordBatch.from_arrays([pa.array(parts[starts]), concatenated], names=["part", "hashes"])


def find_repeated_hashes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the hashes that occur more than once in a task's partitions."""
    hashes = [_split_hashes(batch.column("hashes")) for batch in batches if batch.num_rows]
    if hashes:
        sorted_hashes = np.sort(np.concatenate(hashes))
        repeated = np.unique(sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]])[
            :_MAX_REPEATED_HASHES
        ]
        yield pa.RecordBatch.from_arrays([pa.array(repeated.view(np.int64))], names=["hash"])


def _find_repeated_in_worker(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return iterate_in_worker(find_repeated_hashes(batches))


def _split_hashes(concatenated: pa.Array) -> NDArray[np.uint64]:
    concatenated = concatenated.cast(pa.binary())
    _, offsets, values = concatenated.buffers()
    ends = np.frombuffer(offsets, np.int32)[concatenated.offset :][: len(concatenated) + 1]
    return np.frombuffer(values, np.uint64, (ends[-1] - ends[0]) // _HASH_BYTES, ends[0])


def _read_keys(stage: DeltaStage, files: Sequence[DataFile]) -> Iterator[pa.RecordBatch]:
    columns = pa.schema([stage.layout.schema.field(key) for key in stage.layout.keys])
    return stage.chunks(files, columns)


def _hash_keys(keys: pa.RecordBatch) -> pa.Array:
    return row_hashes(pa.Table.from_batches([keys]))


def _keys_with_hashes(
    stage: DeltaStage, files: Sequence[DataFile], repeated_hashes: pa.Array
) -> Iterator[pa.Table]:
    for keys in _read_keys(stage, files):
        hashes = _hash_keys(keys).view(pa.int64())
        yield pa.Table.from_batches([keys]).filter(pc.is_in(hashes, value_set=repeated_hashes))
