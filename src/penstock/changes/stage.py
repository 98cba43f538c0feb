"""Stages of the passes that run in Spark's tasks, on Arrow batches.

A task reports the commits that it has seen to the driver, which may respond with an error.
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
"""Limits of what a task holds in memory before the shuffle; it finds pairs only within such a chunk."""
_KEY = b"penstock"
_BATCH_ROWS = 65_536
_SMALL_CHUNK_ROWS = 8_192
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SAMPLE_BITS = 4
_MAX_REMAINING_SHARE = 0.9
"""Share of remaining rows from which on dropping the others before the shuffle costs more than it saves."""


@dataclass(frozen=True)
class Packing:
    """Packer of rows into shuffle batches by row id."""

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
    """The query, run and micro-batch in which commits were seen."""

    feed: str
    """The feed's fingerprint, which is the same in all runs of a query."""
    execution: str
    """Spark's execution id, for batch queries."""
    query: str | None = None
    run: str | None = None
    batch: int = 0
    delay_ms: int | None = None
    """For the watermark strategy: how far a commit may lag behind the newest commit."""
    repeats: bool = False
    """Whether the feed may repeat changes; a version may then have several commit times."""


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
    """Reporter of the commits that a task has seen to the commit tracker on the driver."""

    address: Address
    feed: str
    delay_ms: int | None = None
    streaming: bool = True
    """False for a batch query inside foreachBatch, although it has the local properties of the stream."""
    repeats: bool = False

    def report(self, commits: pa.Table) -> None:
        """Report commits, and raise the driver's error if it refuses them."""
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
    """Serialize an error as the driver's response."""
    answer = {
        "kind": type(error).__name__,
        "message": error.message,
        "condition": error.condition,
        "parameters": error.parameters,
    }
    return json.dumps(answer, default=str).encode()


@dataclass(frozen=True)
class FirstPass:
    """Stage before the shuffle: checks all rows, reports commits, and drops pairs that cancel."""

    layout: Layout
    passes: Passes
    reporter: CommitReporter | None = None
    whole: bool = False
    """Whether all rows of a row id are already in one task, so that this stage runs all passes."""
    packing: Packing | None = None
    """Packer of the rows for the shuffle; None to leave them unpacked."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        commits: list[pa.Table] = []
        max_rows, max_bytes = (sys.maxsize, sys.maxsize) if self.whole else (CHUNK_ROWS, CHUNK_BYTES)
        for chunk in grouped(batches, max_rows, max_bytes):
            table = pa.Table.from_batches(chunk)
            rows = ChangeRows(table, self.layout)
            check_rows(rows, needs_content=self.passes.needs_content)
            commits.append(commits_in(table.column(self.layout.version), table.column(self.layout.timestamp)))
            result = self._run_passes(rows)
            yield from _batches(result) if self.packing is None else self.packing.pack(result.table)
        if commits and self.reporter is not None:
            seen = pa.concat_tables(commits)
            self.reporter.report(seen.group_by(seen.column_names).aggregate([]))

    def _run_passes(self, rows: ChangeRows) -> ChangeRows:
        if self.whole:
            return self.passes.run(rows)
        return self.passes.run_on_part(rows) if self.passes.carryovers and self._drops_enough(rows) else rows

    def _drops_enough(self, rows: ChangeRows) -> bool:
        """Whether dropping rows here pays, judged by a sample of 1 in 16 row ids; it is optional."""
        # Mix the bits, because the codes of composite ids are not evenly distributed.
        mixed = (rows.row.values.astype(np.uint64) * _HASH_MULTIPLIER) >> np.uint64(64 - _SAMPLE_BITS)
        sample = rows.filter(mixed == 0)
        return len(self.passes.run_on_part(sample)) < _MAX_REMAINING_SHARE * len(sample)


@dataclass(frozen=True)
class AllPasses:
    """Stage after the shuffle: runs all passes; all rows with the same row id are in one task."""

    layout: Layout
    passes: Passes
    packed: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        received = list(unpack(batches) if self.packed else batches)
        if sum(batch.num_rows for batch in received):
            yield from _batches(self.passes.run(ChangeRows(pa.Table.from_batches(received), self.layout)))


def _batches(rows: ChangeRows) -> Iterator[pa.RecordBatch]:
    table = rows.table
    if table.num_columns and table.column(0).num_chunks * _SMALL_CHUNK_ROWS > table.num_rows:
        table = table.combine_chunks()
    yield from table.to_batches(max_chunksize=_BATCH_ROWS)
