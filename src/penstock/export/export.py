"""``QueueExport``: copies a queue to a Delta or Iceberg table, without Spark."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.arguments import require
from penstock.errors import (
    CommitOutcomeUnknownError,
    ConsumerInUseError,
    InvalidInputError,
    StoreUnavailableError,
)
from penstock.export.run import ExportRun, Totals
from penstock.export.source import ExportSource, starts_of
from penstock.export.table import ExportTable, QueueId, TableChangedError, known_positions
from penstock.export.targets import exported_frame, location_of, location_text, table_at
from penstock.export.waiting import ExportPauses
from penstock.queue.checks import check_name
from penstock.queue.store import Store, connect
from penstock.spark.schemas import source_schema, to_output_batch
from penstock.store.database import Transaction
from penstock.store.log import reading
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord, QueueRecord
from penstock.tables.names import digest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_BYTES = 128 << 20
_RUNNING_EXPORT = "CONSUMER_IN_USE.RUNNING_EXPORT"
_POLL_SECONDS = 0.5
_SNAPSHOT_ATTEMPTS = 5


@dataclass(frozen=True)
class ExportStatus:
    """Totals of an export in this process."""

    commits: int
    rows: int


@dataclass(frozen=True)
class TableSnapshot:
    """A version of the table, and the ranges of the queue that this version lacks."""

    record: QueueRecord
    schema: pa.Schema
    table: ExportTable
    starts: dict[int, int]
    ranges: list[reading.Range]


class QueueExport:
    """Copies a queue to a Delta or Iceberg table, so that any engine can query its rows.

    Each commit to the table also records the queue's positions, so no row is lost or repeated if the process
    is killed, or if two processes export the same queue at the same time. The export has a consumer at the
    table's positions, so rows that the table does not have are not trimmed.

    Columns that are added to the queue later are added to the table, and columns of an Iceberg table are
    widened with those of the queue. Other programs may also append to the table, and several queues may be
    exported to one table.

    Parameters
    ----------
    queue
        The queue's name.
    store
        The URL of its store.
    target
        The location of the table, as for :class:`TableSink`: ``delta:///folder``,
        ``delta:s3://bucket/folder?storage.KEY=VALUE`` or ``iceberg:CATALOG?property.KEY=VALUE``.
    table
        The table's name, for Iceberg with its namespace; by default the queue's name.
    consumer
        The name of the consumer, which is created if necessary; by default ``export-``, the table's name, and
        a digest of the table's location.
    metadata_columns
        Whether the table also has the columns ``_queue``, ``_generation``, ``_partition``, ``_row_index`` and
        ``_timestamp``.
    file_bytes
        The target size of data files, in bytes.

    Raises
    ------
    InvalidUrlError, InvalidNameError, InvalidInputError
    """

    def __init__(
        self,
        queue: str,
        store: str,
        target: str,
        *,
        table: str | None = None,
        consumer: str | None = None,
        metadata_columns: bool = False,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.queue = check_name("queue", queue)
        require("store", store, str, "the URL of a store, such as 'sqlite:///shop.db'")
        require("target", target, str, "the folder of the table, such as 'delta:///lake'")
        require("metadata_columns", metadata_columns, bool, "True or False")
        if type(file_bytes) is not int or file_bytes < 1 << 10:
            raise InvalidInputError(
                f"file_bytes is 1,024 or more, not {file_bytes!r}", parameter="file_bytes"
            )
        self.table = queue if table is None else check_name("table", table)
        self._location = location_of(target, self.table)
        # Tables with the same name in different locations have different consumers.
        default_consumer = f"export-{self.table}-{digest(location_text(self._location))[:8]}"
        self.consumer = check_name("consumer", default_consumer if consumer is None else consumer)
        self._url, self._metadata_columns, self._file_bytes = store, metadata_columns, file_bytes
        self._stopping = threading.Event()
        self._totals = Totals()

    def status(self) -> ExportStatus:
        """Return the totals so far."""
        return ExportStatus(self._totals.commits, self._totals.rows)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return all rows, each once: rows of the table, and rows of the queue that the table lacks.

        Tasks read the table file by file, without pushing filters into the files. If rows are trimmed from
        the queue before the DataFrame is read, reading it fails with ``DATA_LOST``: create another one.

        Parameters
        ----------
        spark
            A classic session.

        Raises
        ------
        TableRefusedError
            When the table has features that exports do not create: partitions, deletion vectors or column
            mapping in a Delta table, equality deletes or columns of other types in an Iceberg table.
        """
        with closing(connect(self._url, create=False)) as store:
            snapshot = self._read_snapshot(store)
        newer = self._newer_frame(spark, snapshot.starts)
        if snapshot.table.version is None:
            return newer
        exported = exported_frame(spark, self._location, snapshot.table.version, snapshot.schema)
        return exported.unionByName(newer, allowMissingColumns=True)

    def _newer_frame(self, spark: SparkSession, starts: Mapping[int, int]) -> DataFrame:
        positions = json.dumps({str(part): start for part, start in starts.items()})
        return (
            spark.read.format("penstock")
            .option("url", self._url)
            .option("startingOffsets", positions)
            .option("includeMetadataColumns", str(self._metadata_columns).lower())
            .load(self.queue)
        )

    def newer_rows(self) -> tuple[int | None, pa.RecordBatchReader]:
        """Return a version of the table, and the rows of the queue that this version lacks.

        To read all rows in another engine, read this version (for an Iceberg table, the snapshot with this
        id) and add the returned rows: together they have each row once. The version is None if there is no
        table, or no snapshot. Read the rows before they are trimmed.
        """
        with closing(connect(self._url, create=False)) as store:
            snapshot = self._read_snapshot(store)
        return snapshot.table.version, pa.RecordBatchReader.from_batches(
            snapshot.schema, self._newer_batches(snapshot)
        )

    def _newer_batches(self, snapshot: TableSnapshot) -> Iterator[pa.RecordBatch]:
        with closing(connect(self._url, create=False)) as store:
            for chunk in reading.read(
                store.database, snapshot.record, snapshot.ranges, with_runs=self._metadata_columns
            ):
                yield to_output_batch(chunk, snapshot.record, snapshot.schema)

    def _read_snapshot(self, store: Store) -> TableSnapshot:
        for _ in range(_SNAPSHOT_ATTEMPTS):
            with suppress(TableChangedError):
                return self._try_read_snapshot(store)
        raise StoreUnavailableError(
            f"the table {self.table} was dropped, or its log was cleaned up, during all {_SNAPSHOT_ATTEMPTS} "
            "reads: try again",
            condition="STORE_UNAVAILABLE.TABLE_STORAGE",
            table=self.table,
        )

    def _try_read_snapshot(self, store: Store) -> TableSnapshot:
        """Read the positions of the table, and then the partitions of the queue."""
        record = store.queue(self.queue).record
        queue = QueueId(store.uuid, self.queue, record.generation)
        table = table_at(self._location, queue, self._file_bytes)
        exists = table.load()

        def read(tx: Transaction) -> tuple[list[PartitionRecord], QueueRecord]:
            # In this order, so that the record has all columns of the rows in these partitions.
            return catalog.partitions(tx, record), catalog.reload_queue(tx, record)

        partitions, record = store.database.run(read, write=False)
        starts = starts_of(
            self.queue, partitions, known_positions(table, queue, len(partitions)) if exists else {}
        )
        ranges = [
            reading.Range(partition.partition, starts[partition.partition], partition.next_index)
            for partition in partitions
        ]
        schema = source_schema(record.schema, self._metadata_columns)
        return TableSnapshot(record, schema, table, starts, ranges)

    def stop(self) -> None:
        """End :meth:`follow` after the commit in progress; for another thread or a signal handler."""
        self._stopping.set()

    def run(self) -> ExportStatus:
        """Export the rows that are in the queue when the run starts, and return.

        Raises
        ------
        QueueNotFoundError, StoreNotFoundError
        ConsumerInUseError
            When another process exports the queue to this table.
        TableRefusedError, SchemaMismatchError
            When the table does not accept the rows, or has rows of another queue with this name.
        DataLostError
            When rows that the table lacks have been trimmed.
        CheckpointMismatchError
            When the table has more rows than the queue has had, for example after the store was restored from
            a backup.
        """
        with closing(connect(self._url, create=False)) as store, closing(self._acquire_run(store)) as run:
            # Rows that arrive during the run are exported by the next run; otherwise a run might never end.
            until = run.ends()
            while run.commit(until):
                pass
        return self.status()

    def follow(self, *, every: timedelta = timedelta(minutes=1)) -> ExportStatus:
        """Export rows as they arrive, until :meth:`stop` is called.

        If the store or the table's storage does not answer, the export waits and tries again. If another
        process exports the queue to this table, this process waits, and takes over when the other one ends.

        Parameters
        ----------
        every
            The maximum time between the arrival of a row and its commit. Rows are committed earlier if there
            are enough of them for a file.

        Raises
        ------
        QueueNotFoundError, StoreNotFoundError, TableRefusedError, SchemaMismatchError, DataLostError
        CheckpointMismatchError
            As from :meth:`run`.
        """
        require("every", every, timedelta, "a timedelta")
        pauses = ExportPauses(self.queue, self._stopping)
        while not self._stopping.is_set():
            try:
                with closing(connect(self._url, create=False)) as store:
                    self._follow(store, every.total_seconds(), pauses)
            except ConsumerInUseError as error:
                if error.condition != _RUNNING_EXPORT:
                    raise
                pauses.wait_for_other_export(error)
            # The next attempt begins with the positions of the table, whatever was committed.
            except (StoreUnavailableError, CommitOutcomeUnknownError) as error:
                pauses.wait_for_storage(error)
        return self.status()

    def _follow(self, store: Store, every: float, pauses: ExportPauses) -> None:
        with closing(self._acquire_run(store)) as run, store.queue(self.queue).watch() as watch:
            while not self._stopping.is_set():
                # Rows that arrive during a commit are exported by the next commits.
                until = run.ends()
                while not self._stopping.is_set() and run.commit(until):
                    pauses.reset()
                pauses.reset()
                waiting_since = time.monotonic()
                while not self._stopping.is_set():
                    # Partitions may have been added.
                    positions = {**dict.fromkeys(range(watch.partitions), 0), **run.positions}
                    if not watch.wait(positions, _POLL_SECONDS):
                        waiting_since = time.monotonic()
                    elif time.monotonic() - waiting_since >= every or run.has_full_file():
                        break
                    else:
                        self._stopping.wait(min(_POLL_SECONDS, every))

    @property
    def _lock_name(self) -> str:
        return f"export:{digest(json.dumps([location_text(self._location), self.queue]))}"

    def _acquire_run(self, store: Store) -> ExportRun:
        """Acquire the export's lock and prepare a run; refuse if another process has the lock."""
        lock = store.database.owner_lock(self._lock_name)
        if not lock.acquire():
            raise ConsumerInUseError(
                f"another process exports queue {self.queue!r} to the table {self.table!r}: wait until it "
                "ends, or stop it",
                condition=_RUNNING_EXPORT,
                consumer=self.consumer,
                queue=self.queue,
            )
        try:
            queue = QueueId(store.uuid, self.queue, store.queue(self.queue).record.generation)
            table = table_at(self._location, queue, self._file_bytes)
            with suppress(TableChangedError):
                if table.load():
                    # Check this before the consumer is registered: a consumer that remained after a refusal
                    # would prevent trimming forever.
                    known_positions(table, queue, 0)
            source = ExportSource(store, self.queue, self.consumer, self._metadata_columns)
            return ExportRun(source, table, queue, self._file_bytes, lock, self._totals)
        except BaseException:
            lock.release()
            raise
