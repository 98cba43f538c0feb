"""Stages of the passes in Spark's tasks, with Arrow batches in and out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.arrow.key_hash import check_key, key_hash
from penstock.changes.commit_reports import CommitReporter, commits_in
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout, Path, column_at
from penstock.changes.passes.violations import check_rows
from penstock.errors import UnsupportedTypeError
from penstock.spark.error_boundary import iterate_without_tracebacks
from penstock.spark.shuffle_batches import pack, unpack

CHUNK_ROWS = 1_000_000
CHUNK_BYTES = 128 << 20
"""What a task holds at a time before the shuffle: pairs further apart are found after it."""
_BATCH_ROWS = 65_536
_SMALL_CHUNK_ROWS = 8_192
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SAMPLE_BITS = 4
_WORTHWHILE = 0.9
"""The share of remaining rows above which dropping the others before the shuffle costs more than it saves."""


@dataclass(frozen=True)
class Packing:
    """Packs rows into shuffle batches by row id."""

    row_id: tuple[Path, ...]
    places: tuple[int, ...]

    def pack(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        """Pack rows into shuffle batches; rows with equal row ids go to the same partition."""
        if table.num_rows:
            yield from pack(table, self._targets(table), self.places)

    def _targets(self, table: pa.Table) -> NDArray[np.unsignedinteger]:
        names = [str(number) for number in range(len(self.row_id))]
        ids = pa.RecordBatch.from_arrays([column_at(table, path) for path in self.row_id], names)
        hashes = key_hash(ids, names).to_numpy()
        kind = np.uint16 if len(self.places) <= 1 << 16 else np.uint32
        targets: NDArray[np.unsignedinteger] = (hashes % np.uint32(len(self.places))).astype(kind)
        return targets


def is_hashable(types: Iterable[pa.DataType]) -> bool:
    """Whether row ids of these types can be hashed to a partition."""
    fields = [pa.field(str(number), kind) for number, kind in enumerate(types)]
    try:
        check_key(pa.schema(fields), [field.name for field in fields])
    except UnsupportedTypeError:
        return False
    return True


@dataclass(frozen=True)
class FirstPass:
    """Checks every row, reports commits, and drops what it can before the shuffle."""

    layout: Layout
    passes: Passes
    reporter: CommitReporter | None = None
    whole: bool = False
    """Whether all rows of a row id are in one task already, so that all passes run."""
    packing: Packing | None = None
    """Packs the rows for the shuffle; they are not packed when None."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        commits: list[pa.Table] = []
        for table in self._chunks(batches):
            rows = ChangeRows(table, self.layout)
            check_rows(rows, needs_content=self.passes.needs_content)
            commits.append(commits_in(table.column(self.layout.version), table.column(self.layout.timestamp)))
            done = self._done(rows)
            yield from _batches(done) if self.packing is None else self.packing.pack(done.table)
        if commits and self.reporter is not None:
            seen = pa.concat_tables(commits)
            self.reporter.report(seen.group_by(seen.column_names).aggregate([]))

    def _done(self, rows: ChangeRows) -> ChangeRows:
        if self.whole:
            return self.passes.whole(rows)
        return self.passes.first(rows) if self.passes.carryovers and self._drops_enough(rows) else rows

    def _drops_enough(self, rows: ChangeRows) -> bool:
        """Whether enough rows of a sample of one in 16 can be dropped; all passes follow anyway."""
        # Mixed, since the codes of composite ids are not spread over all remainders.
        mixed = (rows.row.values.astype(np.uint64) * _MIX) >> np.uint64(64 - _SAMPLE_BITS)
        sample = rows.filter(mixed == 0)
        return len(self.passes.first(sample)) < _WORTHWHILE * len(sample)

    def _chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            held.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if not self.whole and (rows >= CHUNK_ROWS or size >= CHUNK_BYTES):
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
        if rows:
            yield pa.Table.from_batches(held)


@dataclass(frozen=True)
class AllPasses:
    """Runs all passes, where all rows of the same row id are in one task."""

    layout: Layout
    passes: Passes
    packed: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_without_tracebacks(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = list(unpack(batches) if self.packed else batches)
        if sum(batch.num_rows for batch in held):
            yield from _batches(self.passes.whole(ChangeRows(pa.Table.from_batches(held), self.layout)))


def _batches(rows: ChangeRows) -> Iterator[pa.RecordBatch]:
    table = rows.table
    if table.num_columns and table.column(0).num_chunks * _SMALL_CHUNK_ROWS > table.num_rows:
        table = table.combine_chunks()
    yield from table.to_batches(max_chunksize=_BATCH_ROWS)
