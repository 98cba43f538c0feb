"""Search for rows of a micro-batch with the same key, without collecting all keys in one process.

Tasks hash the keys and shuffle the hashes by their first bits, with many hashes in one Spark row.
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

_FEW_ROWS, _FEW_BYTES = 1 << 19, 1 << 26
"""The number of rows, and of bytes in files, up to which a micro-batch is checked in the driver."""
_ROWS_PER_PART = 1 << 20
_MOST_HASHES = 100
"""The largest number of repeated hashes that a task returns."""
_HASH_BYTES = 8
_PARTS, _REPEATED = "part int, hashes binary", "hash bigint"


def repeated_key(
    spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]
) -> dict[str, object] | None:
    """Return a key that several rows have; None if all keys are distinct."""
    names = list(stage.layout.keys)
    rows = sum(file.rows for file in files)
    if rows <= _FEW_ROWS and sum(file.size for file in files) <= _FEW_BYTES:
        return first_repeated_key(stage.columns(files, names))
    parts = max(-(-rows // _ROWS_PER_PART), spark.sparkContext.defaultParallelism, 2)
    bits = (parts - 1).bit_length()
    hashes = HashTask(stage, tuple(files), bits).job(spark, len(files), _PARTS)
    repeated = hashes.repartitionById(1 << bits, "part").mapInArrow(_repeated, _REPEATED).collect()
    if not repeated:
        return None
    # Different keys rarely have the same hash, and never as many as a task returns.
    wanted = pa.array([row.hash for row in repeated], pa.int64())
    with stage.place.translating_errors():
        return first_repeated_key(pa.concat_tables(_with_hashes(stage, files, wanted)))


@dataclass
class HashTask(FileTask):
    """Task that takes file numbers, and returns hashes of the rows' keys, by the first bits of each hash."""

    stage: DeltaStage = field(repr=False)
    files: tuple[DataFile, ...]
    bits: int

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        for keys in _keys(self.stage, self.files[number : number + 1]):
            yield parts_of_hashes(_hashes(keys), self.bits)


def parts_of_hashes(hashes: pa.Array, bits: int) -> pa.RecordBatch:
    """Return a row for each part, with its hashes concatenated."""
    ordered = np.sort(hashes.to_numpy())
    parts = (ordered >> np.uint64(64 - bits)).astype(np.int32)
    begins = np.flatnonzero(np.diff(parts, prepend=-1))
    ends = (_HASH_BYTES * np.append(begins, len(ordered))).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(ordered)]
    joined = pa.Array.from_buffers(pa.binary(), len(begins), buffers)
    return pa.RecordBatch.from_arrays([pa.array(parts[begins]), joined], names=["part", "hashes"])


def repeated_in_parts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the hashes that occur more than once in a task's parts."""
    hashes = [_split(batch.column("hashes")) for batch in batches if batch.num_rows]
    if hashes:
        ordered = np.sort(np.concatenate(hashes))
        repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])[:_MOST_HASHES]
        yield pa.RecordBatch.from_arrays([pa.array(repeated.view(np.int64))], names=["hash"])


def _repeated(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return iterate_in_worker(repeated_in_parts(batches))


def _split(joined: pa.Array) -> NDArray[np.uint64]:
    joined = joined.cast(pa.binary())
    _, offsets, values = joined.buffers()
    ends = np.frombuffer(offsets, np.int32)[joined.offset :][: len(joined) + 1]
    return np.frombuffer(values, np.uint64, (ends[-1] - ends[0]) // _HASH_BYTES, ends[0])


def _keys(stage: DeltaStage, files: Sequence[DataFile]) -> Iterator[pa.RecordBatch]:
    columns = pa.schema([stage.layout.schema.field(key) for key in stage.layout.keys])
    return stage.chunks(files, columns)


def _hashes(keys: pa.RecordBatch) -> pa.Array:
    return row_hashes(pa.Table.from_batches([keys]))


def _with_hashes(stage: DeltaStage, files: Sequence[DataFile], wanted: pa.Array) -> Iterator[pa.Table]:
    for keys in _keys(stage, files):
        hashes = _hashes(keys).view(pa.int64())
        yield pa.Table.from_batches([keys]).filter(pc.is_in(hashes, value_set=wanted))
