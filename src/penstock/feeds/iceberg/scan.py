"""Reading of parts of Iceberg data files as change rows, with row lineage, on executors.

Row lineage, a feature of format 3, is an id for each row and the version that last updated the row. A file
has columns for both if it was rewritten, for example by a copy-on-write update. Otherwise, and where these
columns are null, the id of a row is the first row id of the file plus the position of the row, and its
version is the one that added the file (https://iceberg.apache.org/spec, "Row Lineage").
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import NameMapping
from pyiceberg.typedef import TableVersion
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType
from pyroaring import BitMap64

from penstock.errors import DataLostError, FeedUnavailableError, PenstockError
from penstock.feeds.file_commits import Column, Planned
from penstock.feeds.protocol import METADATA_NAMES, change_rows
from penstock.lake.iceberg_columns import current_column
from penstock.lake.parquet import BATCH_ROWS, FileSplit
from penstock.lake.storage import access_denied, is_denied, without_secrets

Positions = NDArray[np.int64]

NONE: Positions = np.empty(0, np.int64)
_MAGIC = bytes.fromhex("d1d33964")
_FRAME = 4
ROW_ID, UPDATED = "_row_id", "_last_updated_sequence_number"
FIELDS = (pa.field(ROW_ID, pa.int64(), nullable=False), pa.field(UPDATED, pa.int64(), nullable=False))
NAMES = (ROW_ID, UPDATED)
FIELD_IDS = {ROW_ID: 2147483540, UPDATED: 2147483539}
"""The field ids that the table format reserves."""
FORMAT_VERSION = 3


@dataclass(frozen=True)
class DeleteFile:
    """A position delete file, or a deletion vector in a Puffin file."""

    path: str
    offset: int | None = None
    """The offset of the deletion vector in the file; None for a position delete file."""
    size: int = 0


def positions(io: FileIO, deletes: DeleteFile, data_file: str) -> Positions:
    """Read the deleted positions of a data file."""
    with io.new_input(deletes.path).open() as stream:
        if deletes.offset is not None:
            stream.seek(deletes.offset)
            return _vector(stream.read(deletes.size), deletes.path)
        fragment = ds.ParquetFileFormat().make_fragment(stream)
        rows = ds.Scanner.from_fragment(fragment, columns=["pos"], filter=pc.field("file_path") == data_file)
        listed: Positions = rows.to_table()["pos"].to_numpy().astype(np.int64)
    return listed


def _vector(blob: bytes, path: str) -> Positions:
    """Decode a deletion vector."""
    length = int.from_bytes(blob[:_FRAME], "big")
    content, checksum = blob[_FRAME : _FRAME + length], blob[_FRAME + length : 2 * _FRAME + length]
    is_valid = content[: len(_MAGIC)] == _MAGIC and zlib.crc32(content) == int.from_bytes(checksum, "big")
    if not is_valid:
        raise OSError(f"the deletion vector in {path} is damaged: its magic number or its checksum is wrong")
    deleted = BitMap64.deserialize(content[len(_MAGIC) :]).to_array()
    return np.frombuffer(deleted, np.uint64).astype(np.int64)


@dataclass(frozen=True)
class TableView:
    """The properties of a table that an executor needs, with the credentials for its files."""

    name: str
    io: FileIO
    schema: Schema
    name_mapping: NameMapping | None
    format_version: TableVersion
    lineage: bool
    """Whether rows are identified by row lineage."""


@dataclass(frozen=True)
class FileRows:
    """The rows of a data file, or of a part of it, that a snapshot inserted or deleted."""

    version: int
    timestamp: int
    change_type: str
    path: str
    records: int
    split: FileSplit
    constants: tuple[tuple[int, object], ...]
    """Values of columns that the file may not store, by field id."""
    exclude: tuple[DeleteFile, ...]
    """Delete files whose positions are not read."""
    only: tuple[DeleteFile, ...] | None = None
    """Delete files whose positions are the only ones to read; None to read all."""
    first_row_id: int | None = None
    """The row id of the file's first row."""
    updated: int | None = None
    """The version that last updated rows for which the file does not store it."""
    columns: tuple[Column, ...] = ()
    """The table's columns in that version."""


@dataclass(frozen=True)
class ReadTask:
    """The files, or parts of files, that one Spark task reads."""

    table: TableView
    files: tuple[FileRows, ...]


def rows(task: ReadTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read the change rows of a task in the schema of a read."""
    scan = _Scan(task.table, schema)
    for part in task.files:
        try:
            yield from scan.rows(part)
        except PenstockError:
            raise
        except FileNotFoundError:
            raise DataLostError(
                f"the file {part.path} of {task.table.name}, with rows of version {part.version}, is "
                "missing: its snapshot was expired, or it was deleted as an orphan file. Start from a later "
                "version with a new checkpoint",
                condition="DATA_LOST.FILE_MISSING",
                version=part.version,
                file=part.path,
            ) from None
        except Exception as error:  # File systems raise errors of many libraries.
            reason = without_secrets(error, task.table.io.properties)
            if is_denied(error):
                raise access_denied(task.table.name, reason, "the catalog's properties") from None
            raise FeedUnavailableError(
                f"the file {part.path} of {task.table.name}, with rows of version {part.version}, cannot be "
                f"read: {reason}",
                condition="FEED_UNAVAILABLE.UNREADABLE_FILE",
                version=part.version,
                file=part.path,
            ) from None


def columns_of(fields: Iterable[NestedField]) -> tuple[Column, ...]:
    """Return the columns of a schema with their ids."""
    return tuple(Column(field.name, _type_text(field.field_type), field.field_id) for field in fields)


def _type_text(kind: IcebergType) -> str:
    """Describe a type with the ids of its fields, without comments and nullability, for comparison."""
    if isinstance(kind, StructType):
        fields = (f"{field.field_id}: {field.name}: {_type_text(field.field_type)}" for field in kind.fields)
        return f"struct<{', '.join(fields)}>"
    if isinstance(kind, ListType):
        return f"list<{kind.element_id}: {_type_text(kind.element_type)}>"
    if isinstance(kind, MapType):
        key, value = _type_text(kind.key_type), _type_text(kind.value_type)
        return f"map<{kind.key_id}: {key}, {kind.value_id}: {value}>"
    return str(kind)


class _Scan:
    """Reader of parts of files in the schema of a read."""

    def __init__(self, table: TableView, schema: pa.Schema) -> None:
        self._table, self._schema = table, schema
        self._lineage = [name for name in schema.names if table.lineage and name in FIELD_IDS]
        computed = METADATA_NAMES.union(self._lineage)
        wanted = [name for name in schema.names if name not in computed]
        columns = {field.name: field for field in table.schema.fields}
        missing = next((name for name in wanted if name not in columns), None)
        if missing is not None:
            raise FeedUnavailableError(
                f"{table.name} no longer has the column {missing!r}: it was dropped or renamed after the "
                "query was planned. Start the query again",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                column=missing,
            )
        self._projected = Schema(*(columns[name] for name in wanted))
        self._planned, self._read = Planned.of(schema), columns_of(self._projected.fields)
        self._positions: dict[tuple[DeleteFile, str], Positions] = {}

    def rows(self, part: FileRows) -> Iterator[pa.RecordBatch]:
        self._planned.check(self._table.name, part.version, self._read, part.columns)
        exclude = self._deleted(part.exclude, part.path)
        only = None if part.only is None else np.setdiff1d(self._deleted(part.only, part.path), exclude)
        if only is not None and not len(only):
            return
        with self._table.io.new_input(part.path).open() as stream:
            file = pq.ParquetFile(stream, pre_buffer=True)
            if file.metadata.num_rows != part.records:
                raise OSError(
                    f"it has {file.metadata.num_rows} rows, but {part.records} according to the table's "
                    "metadata"
                )
            for batch in self._batches(file, part, exclude, only):
                yield change_rows(
                    batch,
                    self._schema,
                    change_type=part.change_type,
                    version=part.version,
                    timestamp=part.timestamp,
                )

    def _batches(
        self, file: pq.ParquetFile, part: FileRows, exclude: Positions, only: Positions | None
    ) -> Iterator[pa.RecordBatch]:
        physical = file.schema_arrow
        downcast = self._table.format_version <= 2
        file_schema = pyarrow_to_schema(
            physical,
            self._table.name_mapping,
            downcast_ns_timestamp_to_us=downcast,
            format_version=self._table.format_version,
        )
        stored = {field.field_id: field for field in file_schema.fields}
        names = {field_id: field.name for field_id, field in stored.items()}
        columns = [names[field.field_id] for field in self._projected.fields if field.field_id in names]
        lineage = {name: names.get(FIELD_IDS[name]) for name in self._lineage}
        constants = dict(part.constants)
        for start, batch in _part_batches(file, part, [*columns, *filter(None, lineage.values())]):
            selected = _selected(batch.select(columns), start, exclude, only)
            if not selected.num_rows:
                continue
            if self._projected.fields:
                selected = pa.RecordBatch.from_arrays(
                    [
                        current_column(selected, stored.get(field.field_id), field, constants)
                        for field in self._projected.fields
                    ],
                    names=[field.name for field in self._projected.fields],
                )
            numbers = _selected(self._row_lineage(batch, start, part, lineage), start, exclude, only)
            for field, column in zip(numbers.schema, numbers.columns, strict=True):
                selected = selected.append_column(field, column)
            yield selected

    def _row_lineage(
        self, batch: pa.RecordBatch, start: int, part: FileRows, stored: Mapping[str, str | None]
    ) -> pa.RecordBatch:
        """Return the requested columns of row lineage."""
        first = (part.first_row_id or 0) + start
        inherited = {
            ROW_ID: pa.array(np.arange(first, first + batch.num_rows)),
            UPDATED: pa.repeat(pa.scalar(part.updated or 0, pa.int64()), batch.num_rows),
        }
        columns = {
            name: inherited[name] if column is None else pc.coalesce(batch.column(column), inherited[name])
            for name, column in stored.items()
        }
        return pa.RecordBatch.from_pydict(columns)

    def _deleted(self, files: tuple[DeleteFile, ...], path: str) -> Positions:
        """Return the sorted positions in a data file that delete files list."""
        for file in files:
            if (file, path) not in self._positions:
                self._positions[file, path] = positions(self._table.io, file, path)
        return np.unique(np.concatenate([NONE, *(self._positions[file, path] for file in files)]))


def _part_batches(
    file: pq.ParquetFile, part: FileRows, columns: list[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches of a part's row groups, each with the position of its first row in the file."""
    groups = part.split.row_groups(file.metadata)
    if not groups:
        return
    start = sum(file.metadata.row_group(group).num_rows for group in range(groups[0]))
    for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns):
        yield start, batch
        start += batch.num_rows


def _selected(
    batch: pa.RecordBatch, start: int, exclude: Positions, only: Positions | None
) -> pa.RecordBatch:
    if only is not None:
        return batch.take(pa.array(_within(only, start, batch.num_rows)))
    excluded = _within(exclude, start, batch.num_rows)
    if not len(excluded):
        return batch
    selected = np.ones(batch.num_rows, np.bool_)
    selected[excluded] = False
    return batch.filter(pa.array(selected))


def _within(positions: Positions, start: int, rows: int) -> Positions:
    low, high = np.searchsorted(positions, [start, start + rows])
    within: Positions = positions[low:high] - start
    return within
