"""Finding the last change of each key in a queue."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_VERSION, DELETE
from penstock.feeds.postgres.catalog import SEQUENCE
from penstock.queue.info import PartitionInfo
from penstock.queue.queue import Queue

_PAGE_ROWS = 50_000
_PAGE_BYTES = 32 << 20
_CACHE_KIB = 64 << 10


class LastChanges:
    """Index of the last change of each key in a queue, in a temporary database on disk.

    It covers all rows of the queue, including rows of incomplete commits. Memory use does not grow with the
    number of keys. The index is not thread-safe, but can be passed from one thread to another.
    """

    def __init__(self, queue: Queue, key: Sequence[str]) -> None:
        self._queue, self._key = queue, list(key)
        self._next_indexes: dict[int, int] = {}
        self._last_returned: tuple[object, ...] | None = None
        """The last key that :meth:`live_keys` returned."""
        self.is_complete = True
        """Whether all rows that were ever appended were read, so none had been trimmed."""
        # Without a name, SQLite creates a private temporary file.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._key_columns = [f"k{index}" for index in range(len(self._key))]
        columns = ", ".join(self._key_columns)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(
            f"CREATE TABLE last_change ({columns}, version, sequence, gone, PRIMARY KEY ({columns})) "
            "WITHOUT ROWID"
        )

    def close(self) -> None:
        self._database.close()

    def read_new_rows(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Read new rows until few are left, or ``is_stopped`` returns true."""
        while not is_stopped():
            partitions = self._queue.info().partitions
            # Refresh afterwards, so that the schema fits all values in these ranges.
            self._queue.refresh()
            if sum(self._read_partition(partition, is_stopped) for partition in partitions) < _PAGE_ROWS:
                return

    def _read_partition(self, bounds: PartitionInfo, is_stopped: Callable[[], bool]) -> int:
        """Read the new rows of a partition; return the number of rows."""
        begin = position = self._next_indexes.get(bounds.partition, 0)
        if position < bounds.first_index:
            self.is_complete, begin, position = False, bounds.first_index, bounds.first_index
        while position < bounds.next_index and not is_stopped():
            try:
                rows = self._queue.read(
                    bounds.partition,
                    position,
                    bounds.next_index,
                    max_rows=_PAGE_ROWS,
                    max_bytes=_PAGE_BYTES,
                    columns=[*self._key, COMMIT_VERSION, SEQUENCE, CHANGE_TYPE],
                )
            except DataLostError:
                # Rows were trimmed after the bounds were read, so the bounds must be read again.
                return _PAGE_ROWS
            self._store_changes(rows)
            position += rows.num_rows
            self._next_indexes[bounds.partition] = position
        return position - begin

    def _store_changes(self, rows: pa.Table) -> None:
        columns = [_to_sqlite(rows[name]) for name in self._key]
        columns += [rows[COMMIT_VERSION].to_pylist(), rows[SEQUENCE].to_pylist()]
        columns.append(pc.equal(rows[CHANGE_TYPE], DELETE).cast(pa.int8()).to_pylist())
        names, placeholders = ", ".join(self._key_columns), ", ".join("?" * len(columns))
        # If partitions were added, changes of a key may be in two partitions, and are read in any order.
        with self._transaction():
            self._database.executemany(
                f"INSERT INTO last_change VALUES ({placeholders}) ON CONFLICT ({names}) DO UPDATE SET "
                "version = excluded.version, sequence = excluded.sequence, gone = excluded.gone "
                "WHERE (excluded.version, excluded.sequence) > (version, sequence)",
                zip(*columns, strict=True),
            )

    def live_keys(self, upto: int, max_keys: int) -> list[pa.Array]:
        """Return the next keys whose last change is not a delete, and has at most the version ``upto``.

        The result has an array for each key column, in the types of the queue, with at most ``max_keys``
        keys. Each key is returned once.
        """
        names, placeholders = ", ".join(self._key_columns), ", ".join("?" * len(self._key_columns))
        after_last = "" if self._last_returned is None else f"AND ({names}) > ({placeholders})"
        with self._translating():
            rows = self._database.execute(
                f"SELECT {names} FROM last_change WHERE version <= ? AND NOT gone {after_last} "
                f"ORDER BY {names} LIMIT ?",
                [upto, *(self._last_returned or ()), max_keys],
            ).fetchall()
        self._last_returned = rows[-1] if rows else self._last_returned
        types = [self._queue.schema.field(name).type for name in self._key]
        return [_from_sqlite([row[index] for row in rows], kind) for index, kind in enumerate(types)]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translating():
            self._database.execute("BEGIN")
            yield
            self._database.execute("COMMIT")

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise FeedUnavailableError(
                f"the keys of queue {self._queue.name!r} cannot be written to a temporary file ({error}): "
                "free space in the directory for temporary files, or set SQLITE_TMPDIR to another directory, "
                "and start the pump again",
                condition="FEED_UNAVAILABLE.TEMPORARY_FILE",
                queue=self._queue.name,
            ) from None


def _to_sqlite(values: pa.ChunkedArray) -> list[object]:
    """Convert key values to SQLite's types without loss; the result is the same for a wider column type."""
    kind = values.type
    if pat.is_decimal(kind):
        values = values.cast(pa.string())
    elif pat.is_boolean(kind):
        values = values.cast(pa.int8())
    elif pat.is_floating(kind):
        values = _reinterpreted(values.cast(pa.float64()), pa.int64())
    elif pat.is_temporal(kind):
        values = _reinterpreted(values, _integer_type(kind))
    sqlite_values: list[object] = values.to_pylist()
    return sqlite_values


def _from_sqlite(values: list[object], kind: pa.DataType) -> pa.Array:
    if pat.is_decimal(kind):
        return pa.array(values, pa.string()).cast(kind)
    if pat.is_boolean(kind):
        return pa.array(values, pa.int8()).cast(kind)
    if pat.is_floating(kind):
        return pa.array(values, pa.int64()).view(pa.float64()).cast(kind)
    if pat.is_temporal(kind):
        return pa.array(values, _integer_type(kind)).view(kind)
    return pa.array(values, kind)


def _reinterpreted(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([chunk.view(kind) for chunk in values.chunks], kind)


def _integer_type(kind: pa.DataType) -> pa.DataType:
    """Return the integer type with the width of a date or time type."""
    return pa.from_numpy_dtype(np.dtype(f"int{kind.bit_width}"))
