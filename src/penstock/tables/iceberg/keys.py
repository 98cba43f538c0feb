"""Keys of a micro-batch: search for repeated keys, and pruning of a table's data files by key ranges."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    LessThanOrEqual,
    Or,
)
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.schema import Schema, sanitize_column_names
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import BooleanType, NestedField, PrimitiveType
from pyspark.sql import SparkSession
from pyspark.sql import types as spark_types

from penstock.errors import TableRefusedError
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.location import IcebergLocation, translate_error
from penstock.tables.iceberg.numbered_tasks import task_count
from penstock.tables.iceberg.schema import TableLayout
from penstock.tables.row_checks import first_repeated_key

_KEY_RANGES = 16
"""The number of key ranges that the bounds of a table's files are compared with."""
_DRIVER_ROWS = 65_536
"""The number of rows up to which the driver reads the keys itself."""
_BATCH_ROWS = 131_072
# Type checkers treat these classes as plain pydantic models.
_AT_LEAST: Any = GreaterThanOrEqual
_AT_MOST: Any = LessThanOrEqual
_MATCH_NOTHING: BooleanExpression = AlwaysFalse()


def read_keys(io: FileIO, path: str, keys: Schema) -> Iterator[pa.RecordBatch]:
    """Yield the key columns of a data file written by this attempt, with the table's names."""
    schema = schema_to_pyarrow(keys, include_field_ids=False)
    names = [column.name for column in sanitize_column_names(keys).fields]
    with io.new_input(path).open() as stream:
        for batch in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS, columns=names):
            columns = [batch.column(name).cast(field.type) for name, field in zip(names, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def read_all_keys(io: FileIO, paths: Sequence[str], keys: Schema) -> pa.Table:
    """Read the keys of several data files written by this attempt."""
    batches = (batch for path in paths for batch in read_keys(io, path, keys))
    return pa.Table.from_batches(batches, schema_to_pyarrow(keys, include_field_ids=False))


def find_repeated_key(
    spark: SparkSession,
    location: IcebergLocation,
    target: FileTarget,
    layout: TableLayout,
    types: Sequence[spark_types.DataType],
    files: Sequence[DataFile],
) -> dict[str, object] | None:
    """Return a key that several rows of a micro-batch have; None if all keys are distinct.

    ``types`` are the keys' Spark types. If there are many rows, Spark counts the keys.
    """
    paths = [file.file_path for file in files]
    if sum(file.record_count for file in files) <= _DRIVER_ROWS:
        with location.translating_errors("the keys of a micro-batch cannot be read"):
            return first_repeated_key(read_all_keys(target.io, paths, layout.key_schema))
    names = [f"k{number}" for number in range(len(types))]
    columns = spark_types.StructType(
        [spark_types.StructField(name, kind) for name, kind in zip(names, types, strict=True)]
    )
    read_task = _KeysTask(target, layout.key_schema, paths)
    keys = spark.range(0, len(paths), 1, task_count(spark, len(paths))).mapInArrow(read_task, columns)
    partitions = max(1, min(len(paths), spark.sparkContext.defaultParallelism))
    counts = keys.repartition(partitions, *names).groupBy(*names).count()
    repeated = counts.where("count > 1").limit(1).collect()
    return dict(zip(layout.key_names, repeated[0][:-1], strict=True)) if repeated else None


@dataclass
class _KeysTask:
    """Function for ``mapInArrow``, which returns the keys in numbered files."""

    target: FileTarget = field(repr=False)
    keys: Schema = field(repr=False)
    paths: Sequence[str] = field(repr=False)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(batches))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            for number in (number for batch in batches for number in batch.column(0).to_pylist()):
                for keys in read_keys(self.target.io, self.paths[number], self.keys):
                    yield _to_spark_columns(keys)
        except Exception as error:
            what = "the keys of a micro-batch cannot be read"
            raise translate_error(error, self.target.table, what, self.target.io.properties) from None


def _to_spark_columns(keys: pa.RecordBatch) -> pa.RecordBatch:
    """Rename the columns to k0, k1 and so on, and cast them to types that Spark has."""
    types = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), pa.time64("us"): pa.time64("ns")}
    columns = [column.cast(types.get(column.type, column.type)) for column in keys.columns]
    return pa.RecordBatch.from_arrays(columns, names=[f"k{number}" for number in range(len(columns))])


def files_with_keys(
    location: IcebergLocation, table: Table, row_filter: BooleanExpression
) -> list[FileScanTask]:
    """Return the data files of a table that may have rows matching a filter, with their delete files."""
    with location.translating_errors("its manifests cannot be read"):
        snapshot = table.current_snapshot()
        if snapshot is None:
            return []
        tasks = _plan_files(table, row_filter)
        if any(manifest.content == ManifestContent.DELETES for manifest in snapshot.manifests(table.io)):
            # The filter may also prune delete files, by the bounds of the rows that they delete. If one were
            # missing, rewriting its data file would restore deleted rows.
            paths = {task.file.file_path for task in tasks}
            tasks = [task for task in all_files(table) if task.file.file_path in paths]
    return [FileScanTask(task.file, task.delete_files) for task in tasks]


def _plan_files(table: Table, row_filter: BooleanExpression) -> list[FileScanTask]:
    try:
        with _refusing_equality_deletes(table):
            return list(table.scan(row_filter=row_filter).plan_files())
    except (struct.error, OverflowError):
        # pyiceberg 0.11 cannot compare bounds written before a column was widened. No version can compare
        # Python's minimum and maximum datetime with partitions by year or month.
        return list(all_files(table))


def all_files(table: Table, snapshot: int | None = None) -> Iterator[FileScanTask]:
    """Yield the data files of a snapshot, by default the current one, with their position deletes."""
    with _refusing_equality_deletes(table):
        yield from table.scan(snapshot_id=snapshot).plan_files()


@contextmanager
def _refusing_equality_deletes(table: Table) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "equality deletes" not in str(error):
            raise
        raise TableRefusedError(
            f"the Iceberg table {'.'.join(table.name())} has equality deletes, as Flink writes them, which "
            "pyiceberg cannot read, so its files cannot be rewritten: compact the table with another engine "
            "first, or configure the other writer for position deletes or copy-on-write",
            condition="TABLE_REFUSED.EQUALITY_DELETES",
        ) from None


def filter_for_files(schema: Schema, keys: Schema, files: Sequence[DataFile]) -> BooleanExpression:
    """Return a filter for rows whose keys may be in the files of a micro-batch."""
    first = keys.fields[0]
    ordered = sorted(files, key=lambda file: (file.lower_bounds or {}).get(first.field_id, b""))
    return _any_of(_file_key_filter(schema, keys, ordered[part]) for part in _slices(len(ordered)))


def filter_for_keys(schema: Schema, keys: Schema, lookup_keys: pa.Table) -> BooleanExpression:
    """Return a filter for rows that may have one of the ``lookup_keys``, whose columns are in key order."""
    names = [f"k{number}" for number in range(len(keys.fields))]
    ordered = lookup_keys.rename_columns(names).sort_by(names[0])
    parts = (ordered.slice(part.start, part.stop - part.start) for part in _slices(ordered.num_rows))
    return _any_of(_key_filter(schema, keys, part) for part in parts)


def column_bounds(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Return the minimum and maximum in pyiceberg's form, in which dates and times are integers."""
    if pat.is_temporal(column.type):
        number = pa.int32() if column.type.bit_width == 32 else pa.int64()
        column = column.cast(number)
    bounds = pc.min_max(column).as_py()
    return bounds["min"], bounds["max"]


def _slices(count: int) -> list[slice]:
    size = max(1, -(-count // _KEY_RANGES))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _any_of(filters: Iterator[BooleanExpression]) -> BooleanExpression:
    return reduce(Or, filters, _MATCH_NOTHING)


def _file_key_filter(schema: Schema, keys: Schema, files: Sequence[DataFile]) -> BooleanExpression:
    key_filter: BooleanExpression = AlwaysTrue()
    for key in keys.fields:
        kind = key.field_type
        lows = [(file.lower_bounds or {}).get(key.field_id) for file in files]
        highs = [(file.upper_bounds or {}).get(key.field_id) for file in files]
        # A bound may be missing, depending on the table's metrics settings.
        if None in (*lows, *highs) or not isinstance(kind, PrimitiveType):
            continue
        low = min(from_bytes(kind, bound) for bound in lows if bound is not None)
        high = max(from_bytes(kind, bound) for bound in highs if bound is not None)
        key_filter = And(key_filter, _between(schema, key, low, high))
    return key_filter


def _key_filter(schema: Schema, keys: Schema, lookup_keys: pa.Table) -> BooleanExpression:
    pairs = zip(keys.fields, lookup_keys.columns, strict=True)
    return reduce(And, (_between(schema, key, *column_bounds(column)) for key, column in pairs))


def _between(schema: Schema, key: NestedField, low: Any, high: Any) -> BooleanExpression:
    if isinstance(key.field_type, BooleanType):
        return AlwaysTrue()
    name = schema.find_field(key.field_id).name
    return And(_AT_LEAST(name, low), _AT_MOST(name, high))
