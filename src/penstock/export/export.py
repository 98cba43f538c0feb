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
    ConsumerInUseError,
    InvalidInputError,
    StoreUnavailableError,
)
from penstock.export.run import ExportRun, Totals
from penstock.export.source import ExportSource, starts_of
from penstock.export.table import ExportTable, QueueId, TableChangedError, known_positions
from penstock.export.targets import exported_frame, location, place_of, table_at
from penstock.export.waiting import Waits
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
_LOOK_SECONDS = 0.5
_LOOKS = 5


@dataclass(frozen=True)
class ExportStatus:
    """How much an export has committed in this process."""

    commits: int
    rows: int


@dataclass(frozen=True)
class Look:
    """A version of the table, and the ranges of the queue that it lacks."""

    record: QueueRecord
    schema: pa.Schema
    table: ExportTable
    starts: dict[int, int]
    ranges: list[reading.Range]


class QueueExport:
    """Copies a queue to a Delta or Iceberg table, so that any engine can query its rows.

    Each commit to the table also records the queue's positions, so no row is lost or repeated if the process
    is killed, or if two processes export the same queue at once. The export's consumer follows the table, and
    keeps rows that the table does not have from being trimmed.

    Columns that are added to the queue later are added to the table, and an Iceberg table gets the wider
    types of its columns. Other programs may append to the table too, and several queues may be exported to
    one.

    Parameters
    ----------
    queue
        The queue's name.
    store
        The URL of its store.
    target
        Where the table is, as for :class:`TableSink`: ``delta:///folder``,
        ``delta:s3://bucket/folder?storage.KEY=VALUE`` or ``iceberg:CATALOG?property.KEY=VALUE``.
    table
        The table's name, for Iceberg with its namespace; by default the queue's name.
    consumer
        The name of the consumer, which is created; by default ``export-``, the table's name, and some digits
        that depend on where the table is.
    metadata_columns
        Whether the table has the columns ``_queue``, ``_generation``, ``_partition``, ``_row_index`` and
        ``_timestamp`` too.
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
        self._place = place_of(target, self.table)
        # Tables of one name in two places have a consumer each.
        own = f"export-{self.table}-{digest(location(self._place))[:8]}"
        self.consumer = check_name("consumer", own if consumer is None else consumer)
        self._url, self._metadata_columns, self._file_bytes = store, metadata_columns, file_bytes
        self._stopping = threading.Event()
        self._totals = Totals()

    def status(self) -> ExportStatus:
        """Return what was exported so far."""
        return ExportStatus(self._totals.commits, self._totals.rows)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return all rows, each once: those of the table, and from the queue those that the table lacks.

        The table is read by tasks, file by file, without filters pushed into the files. If rows are trimmed
        from the queue before the DataFrame is read, reading it fails with ``DATA_LOST``: make another one.

        Parameters
        ----------
        spark
            A classic session.

        Raises
        ------
        TableRefusedError
            When the table has what no export makes: a Delta table partitions, deletion vectors or column
            mapping, an Iceberg table equality deletes or columns of other types.
        """
        with closing(connect(self._url, create=False)) as store:
            look = self._look(store)
        newer = self._newer_frame(spark, look.starts)
        if look.table.version is None:
            return newer
        exported = exported_frame(spark, self._place, look.table.version, look.schema)
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

        With an engine for such tables, read this version (of an Iceberg table, this snapshot), and add the
        rows: together they have each row once. The version is None if there is no table, or no snapshot. Read
        the rows before they are trimmed.
        """
        with closing(connect(self._url, create=False)) as store:
            look = self._look(store)
        return look.table.version, pa.RecordBatchReader.from_batches(look.schema, self._newer(look))

    def _newer(self, look: Look) -> Iterator[pa.RecordBatch]:
        with closing(connect(self._url, create=False)) as store:
            for chunk in reading.read(
                store.database, look.record, look.ranges, with_runs=self._metadata_columns
            ):
                yield to_output_batch(chunk, look.record, look.schema)

    def _look(self, store: Store) -> Look:
        for _ in range(_LOOKS):
            with suppress(TableChangedError):
                return self._look_once(store)
        raise StoreUnavailableError(
            f"the table {self.table} was dropped, or its log was cleaned up, during each of {_LOOKS} reads: "
            "try again",
            condition="STORE_UNAVAILABLE.TABLE_STORAGE",
            table=self.table,
        )

    def _look_once(self, store: Store) -> Look:
        """Read the table's positions, then the queue's partitions."""
        record = store.queue(self.queue).record
        queue = QueueId(store.uuid, self.queue, record.generation)
        table = table_at(self._place, queue, self._file_bytes)
        is_there = table.load()

        def read(tx: Transaction) -> tuple[list[PartitionRecord], QueueRecord]:
            # In this order, so that the record has all columns of those rows.
            return catalog.partitions(tx, record), catalog.reload_queue(tx, record)

        parts, record = store.database.run(read, write=False)
        starts = starts_of(self.queue, parts, known_positions(table, queue, len(parts)) if is_there else {})
        ranges = [reading.Range(part.partition, starts[part.partition], part.next_index) for part in parts]
        schema = source_schema(record.schema, self._metadata_columns)
        return Look(record, schema, table, starts, ranges)

    def stop(self) -> None:
        """End :meth:`follow` after the commit that it is making; for another thread, or a signal handler."""
        self._stopping.set()

    def run(self) -> ExportStatus:
        """Export the rows that are in the queue now, and return.

        Raises
        ------
        QueueNotFoundError, StoreNotFoundError
        ConsumerInUseError
            When another process exports the queue to this table.
        TableRefusedError, SchemaMismatchError
            When the table does not take the rows, or has those of another queue with this name.
        DataLostError
            When rows that the table lacks have been trimmed.
        CheckpointMismatchError
            When the queue has fewer rows than the table has from it, as after a backup was restored.
        """
        with closing(connect(self._url, create=False)) as store, closing(self._own(store)) as run:
            # Rows that arrive during the run are left to the next one, or the run might never end.
            until = run.ends()
            while run.commit(until):
                pass
        return self.status()

    def follow(self, *, every: timedelta = timedelta(minutes=1)) -> ExportStatus:
        """Export rows as they arrive, until :meth:`stop` is called.

        If the store or the table's storage does not answer, the export waits and tries again. If another
        process exports the queue to this table, this one waits, and takes over when that one ends.

        Parameters
        ----------
        every
            The longest time between the arrival of a row and its commit; earlier if there are enough rows
            for a file.

        Raises
        ------
        QueueNotFoundError, StoreNotFoundError, TableRefusedError, SchemaMismatchError, DataLostError
        CheckpointMismatchError
            As from :meth:`run`.
        """
        require("every", every, timedelta, "a timedelta")
        waits = Waits(self.queue, self._stopping)
        while not self._stopping.is_set():
            try:
                with closing(connect(self._url, create=False)) as store:
                    self._follow(store, every.total_seconds(), waits)
            except ConsumerInUseError as error:
                if error.condition != _RUNNING_EXPORT:
                    raise
                waits.for_another(error)
            except StoreUnavailableError as error:
                waits.for_answer(error)
        return self.status()

    def _follow(self, store: Store, every: float, waits: Waits) -> None:
        with closing(self._own(store)) as run, store.queue(self.queue).watch() as watch:
            while not self._stopping.is_set():
                # Rows that arrive during a commit wait for the next round.
                until = run.ends()
                while not self._stopping.is_set() and run.commit(until):
                    waits.over()
                waits.over()
                since = time.monotonic()
                while not self._stopping.is_set():
                    # Partitions may have been added.
                    positions = {**dict.fromkeys(range(watch.partitions), 0), **run.positions}
                    if not watch.wait(positions, _LOOK_SECONDS):
                        since = time.monotonic()
                    elif time.monotonic() - since >= every or run.has_enough():
                        break
                    else:
                        self._stopping.wait(min(_LOOK_SECONDS, every))

    @property
    def _lock_name(self) -> str:
        return f"export:{digest(json.dumps([location(self._place), self.queue]))}"

    def _own(self, store: Store) -> ExportRun:
        """Prepare a run, unless another process exports the queue to this table."""
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
            table = table_at(self._place, queue, self._file_bytes)
            with suppress(TableChangedError):
                if table.load():
                    # Before the consumer is registered: after a refusal, it would prevent trimming for ever.
                    known_positions(table, queue, 0)
            source = ExportSource(store, self.queue, self.consumer, self._metadata_columns)
            return ExportRun(source, table, queue, self._file_bytes, lock, self._totals)
        except BaseException:
            lock.release()
            raise
