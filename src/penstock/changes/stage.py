"""Stages of the passes in Spark's tasks, with Arrow batches in and out.

A task reports the commits that it has seen to its driver, which may answer with an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext

from penstock.arrow.arrays import grouped
from penstock.arrow.key_hash import check_key, key_hash
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout, Path, column_at
from penstock.changes.passes.violations import check_rows
from penstock.errors import PenstockError, UnsupportedTypeError, error_class
from penstock.json_text import parse_json
from penstock.spark.driver_endpoint import Address
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.shuffle_batches import pack, unpack

CHUNK_ROWS = 1_000_000
CHUNK_BYTES = 128 << 20
"""The most that a task holds at a time before the shuffle; pairs further apart are found after it."""
_KEY = b"penstock"
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
class Scope:
    """Where commits were seen."""

    feed: str
    """The feed's name, the same in all runs of a query."""
    execution: str
    """Spark's execution id, for batch queries."""
    query: str | None = None
    run: str | None = None
    batch: int = 0
    delay_ms: int | None = None
    """How late a commit may be, in the watermark strategy."""
    repeats: bool = False
    """Whether changes may come again, and a version is a position whose changes may have several times."""


@dataclass(frozen=True)
class SeenCommits:
    """Commits seen in a scope: distinct pairs of a version and a timestamp in microseconds."""

    scope: Scope
    commits: pa.Table

    def to_bytes(self) -> bytes:
        header = {_KEY: json.dumps(asdict(self.scope)).encode()}
        return bytes(ipc_stream(self.commits.replace_schema_metadata(header)))

    @classmethod
    def from_bytes(cls, data: bytes) -> SeenCommits:
        commits = pa.ipc.open_stream(data).read_all()
        return cls(Scope(**parse_json(commits.schema.metadata[_KEY])), commits.replace_schema_metadata(None))


def ipc_stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@dataclass(frozen=True)
class CommitReporter:
    """Reports the commits that a task has seen to the commit tracker in the driver."""

    address: Address
    feed: str
    delay_ms: int | None = None
    streaming: bool = True
    """False for a batch inside a stream's foreachBatch, which has the properties of the stream."""
    repeats: bool = False

    def report(self, commits: pa.Table) -> None:
        """Report commits; raises the error with which the driver refuses them."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") if self.streaming else None
        scope = Scope(
            feed=self.feed,
            execution=context.getLocalProperty("spark.sql.execution.id") or "",
            query=query,
            run=context.getLocalProperty("spark.jobGroup.id") if query else None,
            batch=int(context.getLocalProperty("streaming.sql.batchId") or 0) if query else 0,
            delay_ms=self.delay_ms,
            repeats=self.repeats,
        )
        answer = self.address.ask(SeenCommits(scope, commits).to_bytes())
        if answer:
            error = parse_json(answer)
            kind = error_class(error["kind"]) or PenstockError
            raise kind(error["message"], condition=error["condition"], **error["parameters"])


def commits_in(version: pa.ChunkedArray, timestamp: pa.ChunkedArray) -> pa.Table:
    """Return the distinct pairs of version and timestamp (microseconds) of some rows."""
    times = timestamp.cast(pa.int64())
    pairs = pa.table({"version": version, "timestamp": times})
    return pairs.group_by(["version", "timestamp"], use_threads=False).aggregate([])


def refusal(error: PenstockError) -> bytes:
    """Return an error as the driver's answer."""
    answer = {
        "kind": type(error).__name__,
        "message": error.message,
        "condition": error.condition,
        "parameters": error.parameters,
    }
    return json.dumps(answer, default=str).encode()


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
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        commits: list[pa.Table] = []
        most_rows, most_bytes = (sys.maxsize, sys.maxsize) if self.whole else (CHUNK_ROWS, CHUNK_BYTES)
        for chunk in grouped(batches, most_rows, most_bytes):
            table = pa.Table.from_batches(chunk)
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


@dataclass(frozen=True)
class AllPasses:
    """Runs all passes, where all rows of the same row id are in one task."""

    layout: Layout
    passes: Passes
    packed: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = list(unpack(batches) if self.packed else batches)
        if sum(batch.num_rows for batch in held):
            yield from _batches(self.passes.whole(ChangeRows(pa.Table.from_batches(held), self.layout)))


def _batches(rows: ChangeRows) -> Iterator[pa.RecordBatch]:
    table = rows.table
    if table.num_columns and table.column(0).num_chunks * _SMALL_CHUNK_ROWS > table.num_rows:
        table = table.combine_chunks()
    yield from table.to_batches(max_chunksize=_BATCH_ROWS)
