"""The last change of each key in a queue."""

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

_ROWS = 50_000
_BYTES = 32 << 20
_CACHE_KIB = 64 << 10


class LastChanges:
    """The last change of each key in a queue, in a temporary database on disk.

    The queue is read from its first row on, including rows of incomplete commits. Memory use does not grow
    with the number of keys. Not thread-safe, but may be passed from one thread to another.
    """

    def __init__(self, queue: Queue, key: Sequence[str]) -> None:
        self._queue, self._key = queue, list(key)
        self._next: dict[int, int] = {}
        self._returned: tuple[object, ...] | None = None
        """The last key that was returned as live, that is, not deleted."""
        self.is_whole = True
        """Whether the queue had all rows that were ever appended: none was trimmed."""
        # Without a name, SQLite creates a private temporary file.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._names = [f"k{place}" for place in range(len(self._key))]
        columns = ", ".join(self._names)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(
            f"CREATE TABLE last_change ({columns}, version, sequence, gone, PRIMARY KEY ({columns})) "
            "WITHOUT ROWID"
        )

    def close(self) -> None:
        self._database.close()

    def read_on(self, ends: Callable[[], bool] = lambda: False) -> None:
        """Read newly appended rows until only a few are left, or ``ends`` returns true."""
        while not ends():
            partitions = self._queue.info().partitions
            # After that: then all values of their rows fit into the queue's types.
            self._queue.refresh()
            if sum(self._read(partition, ends) for partition in partitions) < _ROWS:
                return

    def _read(self, bounds: PartitionInfo, ends: Callable[[], bool]) -> int:
        """Read the next rows of a partition; return their number."""
        first = start = self._next.get(bounds.partition, 0)
        if start < bounds.first_index:
            self.is_whole, first, start = False, bounds.first_index, bounds.first_index
        while start < bounds.next_index and not ends():
            try:
                rows = self._queue.read(
                    bounds.partition,
                    start,
                    bounds.next_index,
                    max_rows=_ROWS,
                    max_bytes=_BYTES,
                    columns=[*self._key, COMMIT_VERSION, SEQUENCE, CHANGE_TYPE],
                )
            except DataLostError:
                # Trimmed since its bounds were read: they are read again.
                return _ROWS
            self._note(rows)
            start += rows.num_rows
            self._next[bounds.partition] = start
        return start - first

    def _note(self, rows: pa.Table) -> None:
        columns = [_stored(rows[name]) for name in self._key]
        columns += [rows[COMMIT_VERSION].to_pylist(), rows[SEQUENCE].to_pylist()]
        columns.append(pc.equal(rows[CHANGE_TYPE], DELETE).cast(pa.int8()).to_pylist())
        names, marks = ", ".join(self._names), ", ".join("?" * len(columns))
        # Partitions were added to the queue, so changes of a key may be in two of them, in any order.
        with self._transaction():
            self._database.executemany(
                f"INSERT INTO last_change VALUES ({marks}) ON CONFLICT ({names}) DO UPDATE SET "
                "version = excluded.version, sequence = excluded.sequence, gone = excluded.gone "
                "WHERE (excluded.version, excluded.sequence) > (version, sequence)",
                zip(*columns, strict=True),
            )

    def live(self, upto: int, most: int) -> list[pa.Array]:
        """Return the next keys whose last change is no delete, and in a commit up to a version.

        Return an array for each column, in the types of the queue, with at most ``most`` keys. Each key is
        returned once.
        """
        names, marks = ", ".join(self._names), ", ".join("?" * len(self._names))
        later = "" if self._returned is None else f"AND ({names}) > ({marks})"
        with self._translating():
            rows = self._database.execute(
                f"SELECT {names} FROM last_change WHERE version <= ? AND NOT gone {later} "
                f"ORDER BY {names} LIMIT ?",
                [upto, *(self._returned or ()), most],
            ).fetchall()
        self._returned = rows[-1] if rows else self._returned
        types = [self._queue.schema.field(name).type for name in self._key]
        return [_restored([row[place] for row in rows], kind) for place, kind in enumerate(types)]

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
                f"the keys of queue {self._queue.name!r} cannot be kept in a temporary file ({error}): make "
                "room in the directory for temporary files, or name another one with SQLITE_TMPDIR, and "
                "start the pump again",
                condition="FEED_UNAVAILABLE.TEMPORARY_FILE",
                queue=self._queue.name,
            ) from None


def _stored(values: pa.ChunkedArray) -> list[object]:
    """Convert key values to SQLite's types without loss; a wider column type gives the same values."""
    kind = values.type
    if pat.is_decimal(kind):
        values = values.cast(pa.string())
    elif pat.is_boolean(kind):
        values = values.cast(pa.int8())
    elif pat.is_floating(kind):
        values = _viewed(values.cast(pa.float64()), pa.int64())
    elif pat.is_temporal(kind):
        values = _viewed(values, _same_bits(kind))
    stored: list[object] = values.to_pylist()
    return stored


def _restored(values: list[object], kind: pa.DataType) -> pa.Array:
    if pat.is_decimal(kind):
        return pa.array(values, pa.string()).cast(kind)
    if pat.is_boolean(kind):
        return pa.array(values, pa.int8()).cast(kind)
    if pat.is_floating(kind):
        return pa.array(values, pa.int64()).view(pa.float64()).cast(kind)
    if pat.is_temporal(kind):
        return pa.array(values, _same_bits(kind)).view(kind)
    return pa.array(values, kind)


def _viewed(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([chunk.view(kind) for chunk in values.chunks], kind)


def _same_bits(kind: pa.DataType) -> pa.DataType:
    """Return the whole number with the bits of a time."""
    return pa.from_numpy_dtype(np.dtype(f"int{kind.bit_width}"))
