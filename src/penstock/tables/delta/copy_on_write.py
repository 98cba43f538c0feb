"""Copy on write: tasks rewrite the data files of a Delta table that have a key of a micro-batch, without the
rows of those keys.

Stored files never change, so what a task found in one holds for each later try to commit.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import SparkSession

from penstock.lake.parquet import Piece, completed, fitted, read_piece
from penstock.lake.storage import library
from penstock.tables.changes.merge_plan import numbered
from penstock.tables.delta.data_files import DataFile, UnreadableFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.stage import DeltaStage

if TYPE_CHECKING:
    from deltalake import DeltaTable

_NUMBER = "_penstock_number"
_OUTCOME = "number bigint, outcome string, file string, rows bigint, size bigint, statistics string"
_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("outcome", pa.string()),
        ("file", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("statistics", pa.string()),
    ]
)
_UNTOUCHED, _REWRITTEN, _UNREADABLE = "untouched", "rewritten", "unreadable"
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.=-]+")


@dataclass(frozen=True)
class Stored:
    """A data file of the table."""

    path: str
    size: int

    def remove_action(self) -> Any:
        """Return deltalake's ``RemoveAction``."""
        return library("deltalake.transaction").RemoveAction(
            path=self.path,
            data_change=True,
            deletion_timestamp=time.time_ns() // 1_000_000,
            size=self.size,
            partition_values={},
        )


@dataclass(frozen=True)
class Replacement:
    """Stored files that a commit removes, and the files with the rows of them that stay."""

    removed: Sequence[Stored] = ()
    added: Sequence[DataFile] = ()


@dataclass
class CopyOnWrite:
    """The stored files that change with a micro-batch, over all tries to commit it."""

    spark: SparkSession
    stage: DeltaStage
    files: Sequence[DataFile]
    """The files with the micro-batch's rows."""
    known: dict[str, tuple[str, DataFile | None]] = field(default_factory=dict)

    def replacement(self, table: DeltaTable) -> Replacement:
        """Return the stored files with a key of the micro-batch, and what takes their place."""
        with self.stage.place.translating_errors():
            stored = may_share_keys(table, self.files, self.stage)
        new = [file.path for file in stored if file.path not in self.known]
        if not all(map(_PLAIN_PATH.fullmatch, new)):
            # Of others it is not certain that the log has them in the same form.
            raise UnreadableFile
        self._rewrite(new)
        changed = [file for file in stored if self.known[file.path][0] == _REWRITTEN]
        added = [self.known[file.path][1] for file in changed]
        return Replacement(changed, [file for file in added if file is not None])

    def _rewrite(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        task = RewriteTask(self.stage, tuple(paths), tuple(self.files))
        for report in task.job(self.spark, len(paths), _OUTCOME).collect():
            if report.outcome == _UNREADABLE:
                raise UnreadableFile
            file = report.file and DataFile(report.file, report.rows, report.size, report.statistics)
            self.known[paths[report.number]] = (report.outcome, file)


def may_share_keys(table: DeltaTable, files: Sequence[DataFile], stage: DeltaStage) -> list[Stored]:
    """Return the data files of a table whose statistics do not exclude the keys in some files."""
    actions = pa.table(table.get_add_actions(flatten=True))
    near = pa.repeat(False, actions.num_rows)
    for file in files:
        apart = pa.repeat(False, actions.num_rows)
        bounds = json.loads(file.statistics, parse_int=str)
        for key in stage.layout.keys:
            kind = stage.layout.schema.field(key).type
            low, high = (bounds.get(part, {}).get(key) for part in ("minValues", "maxValues"))
            least, most = (_column(actions, f"{part}.{key}", kind) for part in ("min", "max"))
            if _is_ordered(kind) and low is not None and high is not None:
                # Upper bounds that writers cut off, after milliseconds or 32 characters, are compared with
                # lower ones that are cut off there too.
                below = pc.less(most, pa.scalar(low).cast(kind))
                above = pc.greater(least, pa.scalar(high).cast(kind))
                apart = pc.or_(apart, pc.fill_null(pc.or_kleene(below, above), False))
        near = pc.or_(near, pc.invert(apart))
    chosen = actions.filter(near)
    sizes = zip(chosen["path"].to_pylist(), chosen["size_bytes"].to_pylist(), strict=True)
    return [Stored(path, size) for path, size in sizes]


def _is_ordered(kind: pa.DataType) -> bool:
    """Whether all writers give bounds of a type of key that can be compared."""
    return any(test(kind) for test in (pat.is_integer, pat.is_date, pat.is_string, pat.is_timestamp))


def _column(actions: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return bounds of stored files, null where they have none."""
    if name not in actions.column_names:
        return pa.chunked_array([pa.nulls(actions.num_rows, kind)])
    return actions[name].cast(kind)


@dataclass
class RewriteTask(FileTask):
    """Takes numbers of stored files, and reports what became of each."""

    stage: DeltaStage = field(repr=False)
    paths: tuple[str, ...]
    files: tuple[DataFile, ...]
    """The files with the micro-batch's rows."""
    _keys: pa.Table | None = field(default=None, init=False, repr=False)

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        if self._keys is None:
            self._keys = self.stage.columns(self.files, self.stage.layout.keys)
        file = None
        try:
            outcome, file = self._rewritten(self.paths[number], self._keys)
        except UnreadableFile:
            outcome = _UNREADABLE
        row: dict[str, object] = {"number": number, "outcome": outcome}
        if file is not None:
            row |= {"file": file.path, "rows": file.rows, "size": file.size, "statistics": file.statistics}
        yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)

    def _rewritten(self, path: str, keys: pa.Table) -> tuple[str, DataFile | None]:
        stored = pa.Table.from_batches(self._stored(path, keys.schema), keys.schema)
        kept = pc.invert(_have_key(stored, keys)).combine_chunks()
        if pc.all(kept).as_py():
            return _UNTOUCHED, None
        del stored
        return _REWRITTEN, self.stage.write(_filtered(self._stored(path, self.stage.layout.schema), kept))

    def _stored(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield some columns of a stored file, null where it does not have them."""
        with self.stage.place.files().open_input_file(path) as source:
            for batch in read_piece(source, Piece(), schema.names):
                yield completed(fitted(batch, schema, UnreadableFile), schema)


def _filtered(batches: Iterable[pa.RecordBatch], kept: pa.BooleanArray) -> Iterator[pa.RecordBatch]:
    at = 0
    for batch in batches:
        rows = batch.filter(kept.slice(at, batch.num_rows))
        at += batch.num_rows
        if rows.num_rows:
            yield rows


def _have_key(stored: pa.Table, keys: pa.Table) -> pa.ChunkedArray:
    """Return for each stored row whether its key is among the keys; a null is no key."""
    if keys.num_columns > 1:
        rows = numbered(stored, _NUMBER)
        matched = rows.join(keys, keys=keys.column_names, join_type="left semi")[_NUMBER]
        return pc.is_in(rows[_NUMBER], value_set=matched)
    column, values = stored.column(0), keys.column(0)
    if len(values) > len(column):
        # The smaller side makes the hash table.
        values = values.filter(pc.is_in(values, value_set=column))
    return pc.is_in(column, value_set=values)
