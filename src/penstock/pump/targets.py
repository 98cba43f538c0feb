"""Queues of a pump: creating them, adding columns, and dividing rows into their commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.arguments import in_quotes
from penstock.errors import AlreadyExistsError, FeedUnavailableError, QueueNotFoundError
from penstock.feeds.contract import COMMIT_TIMESTAMP, COMMIT_VERSION, ChangeContract
from penstock.feeds.feed_writer import FeedRows
from penstock.feeds.postgres.catalog import SEQUENCE, UNCHANGED_COLUMNS, Tables
from penstock.feeds.protocol import INSTANT, METADATA_NAMES
from penstock.feeds.queue_feed import QueueFeed
from penstock.queue.maintenance import Retention
from penstock.queue.queue import Queue
from penstock.queue.store import Store
from penstock.store.database import Transaction
from penstock.store.records import feed_commits


@dataclass(frozen=True)
class QueueSettings:
    """Settings for created queues."""

    partitions: int = 1
    retention: Retention | None = None


@dataclass(frozen=True)
class PartialCommit:
    """A commit that is partly appended."""

    version: int
    timestamp: int


class Targets:
    """The open queues of tables."""

    def __init__(self, queues: Mapping[str, Queue]) -> None:
        self._queues = queues

    @classmethod
    def opened(cls, store: Store, names: Mapping[str, str], tables: Iterable[str]) -> Targets:
        """Open the queues of tables.

        Raises
        ------
        QueueNotFoundError
            When a queue was dropped. It is not recreated, because its earlier rows are gone.
        """
        return cls({table: store.queue(names[table]) for table in tables})

    def last_commit(self, tx: Transaction) -> int:
        """Return the version of the newest commit in any of the queues; 0 if there is none."""
        commits = (feed_commits.newest_commit(tx, queue.record) for queue in self._queues.values())
        return max((commit.version for commit in commits if commit is not None), default=0)

    def rows(
        self,
        batches: Mapping[str, Sequence[pa.RecordBatch]],
        upto: int,
        commit_times: CommitTimes,
        partial: PartialCommit | None,
    ) -> list[FeedRows]:
        """Divide rows into the commits of each queue.

        Parameters
        ----------
        batches
            The rows by table.
        upto
            The last complete commit; later commits continue in the next step.
        commit_times
            The times of the commits.
        partial
            The commit that is now complete, and of which some rows were appended before, to any queue.
        """
        tables = batches if partial is None else self._queues
        return [
            self._rows(self._queues[table], batches.get(table, ()), upto, commit_times, partial)
            for table in tables
        ]

    def _rows(
        self,
        queue: Queue,
        batches: Sequence[pa.RecordBatch],
        upto: int,
        commit_times: CommitTimes,
        partial: PartialCommit | None,
    ) -> FeedRows:
        rows = _with_new_columns(queue, batches) if batches else queue.schema.empty_table()
        versions = rows[COMMIT_VERSION].to_numpy()
        index = rows.schema.get_field_index(COMMIT_TIMESTAMP)
        times = pa.array(commit_times.of(versions)).view(INSTANT)
        rows = rows.set_column(index, rows.schema.field(index), times)
        last_rows = (
            np.flatnonzero(np.append(versions[1:] != versions[:-1], True)) if len(versions) else versions
        )
        last_rows = last_rows[versions[last_rows] <= upto]
        complete, complete_times = versions[last_rows].tolist(), commit_times.of(versions[last_rows]).tolist()
        ends = (last_rows + 1).tolist()
        if partial is not None and partial.version not in complete[:1]:
            complete, complete_times = [partial.version, *complete], [partial.timestamp, *complete_times]
            ends = [0, *ends]
        partial_version = None if partial is None else partial.version
        return FeedRows(queue, queue.rows_to_append(rows), complete, complete_times, ends, partial_version)


def create_queues(
    store: Store, names: Mapping[str, str], plans: Mapping[str, Tables], url: str, settings: QueueSettings
) -> None:
    """Create the queues of a new pump; existing queues must be empty.

    Raises
    ------
    AlreadyExistsError
        When a queue has had rows, for example of an earlier pump, or has different columns.
    """
    for table, plan in plans.items():
        name = names[table]
        schema = pa.schema([field for field in plan.schema() if field.name not in METADATA_NAMES])
        try:
            _require_empty(store.queue(name), plan.schema())
        except QueueNotFoundError:
            QueueFeed.create(
                name,
                schema,
                _contract(plan),
                store=url,
                partitions=settings.partitions,
                retention=settings.retention,
            )


def _require_empty(queue: Queue, schema: pa.Schema) -> None:
    existing = {field.name: field.type for field in queue.schema}
    mismatch = next((field for field in schema if existing.get(field.name) != field.type), None)
    if mismatch is not None:
        problem = f"has no column {in_quotes(mismatch.name)} of type {mismatch.type}"
    elif queue.record.contract is None:
        problem = "holds rows, not a change feed"
    elif any(partition.next_index for partition in queue.info().partitions):
        problem = "has had rows, which a new pump would repeat"
    else:
        return
    raise AlreadyExistsError(
        f"the queue {in_quotes(queue.name)} already exists and {problem}: drop it, or start the pump with "
        "another queue or prefix",
        queue=queue.name,
        column=None if mismatch is None else mismatch.name,
    )


def _with_new_columns(queue: Queue, batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return rows as one table; add the table's new columns and wider types to the queue.

    Raises
    ------
    SchemaMismatchError
        When the queue has such a column with an incompatible type.
    """
    for schema in dict.fromkeys(batch.schema for batch in batches):
        types = {field.name: field.type for field in queue.schema}
        wider = [field for field in schema if types.get(field.name, field.type) != field.type]
        if wider:
            queue.widen_columns(pa.schema(wider))
        added = [field for field in schema if field.name not in types]
        if added:
            queue.add_columns(pa.schema(added))
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


class CommitTimes:
    """Times of commits, made non-decreasing.

    The server's commit times may decrease from one commit to the next, because a transaction gets its time
    before its place in the log.
    """

    def __init__(self, batches: Mapping[str, Sequence[pa.RecordBatch]], floor: int) -> None:
        all_batches = [batch for table_batches in batches.values() for batch in table_batches]
        versions = _joined([batch[COMMIT_VERSION] for batch in all_batches])
        times = _joined([batch[COMMIT_TIMESTAMP].view(pa.int64()) for batch in all_batches])
        self._versions, first_rows = np.unique(versions, return_index=True)
        self._times = (
            np.maximum(np.maximum.accumulate(times[first_rows]), floor) if len(first_rows) else times
        )
        self.last = int(self._times[-1]) if len(first_rows) else floor
        """The time of the last commit."""

    def of(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the times of the commits with these versions."""
        matching: NDArray[np.int64] = self._times[np.searchsorted(self._versions, versions)]
        return matching


def _joined(arrays: Sequence[pa.Array]) -> NDArray[np.int64]:
    numpy_arrays = [array.to_numpy(zero_copy_only=False) for array in arrays]
    return np.concatenate(numpy_arrays) if numpy_arrays else np.zeros(0, np.int64)


def _contract(plan: Tables) -> ChangeContract:
    contract = plan.contract()
    if contract is not None:
        return contract
    if plan.several:
        without_key = next(table for table in plan.tables if not table.key)
        raise FeedUnavailableError(
            f"nothing identifies the rows of {without_key.name}, so they cannot share a queue with rows of "
            "other tables: add a primary key, or give each table its own queue",
            condition="FEED_UNAVAILABLE.NO_REPLICA_IDENTITY",
            table=without_key.name,
        )
    # The publication has only inserts, so rows are identified by all of their columns.
    return ChangeContract(
        row_id=plan.tables[0].relation.names,
        nullable_row_id=True,
        intermediate_changes=True,
        whole_commits=True,
        sequence=SEQUENCE,
        unchanged=UNCHANGED_COLUMNS,
    )


def queue_names(tables: Iterable[str], prefix: str) -> dict[str, str]:
    """Return the name of each table's queue: the prefix and the table's name.

    The name of the table includes its schema, except for the schema ``public``.
    """
    return {table: prefix + table.removeprefix("public.") for table in tables}
