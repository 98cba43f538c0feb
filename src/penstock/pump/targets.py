"""The queues that a pump appends to, and rows as their commits."""

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
    """How queues are created."""

    partitions: int = 1
    retention: Retention | None = None


@dataclass(frozen=True)
class Continued:
    """A commit some of whose rows were appended before."""

    version: int
    timestamp: int


class Targets:
    """The open queues of tables."""

    def __init__(self, queues: Mapping[str, Queue]) -> None:
        self._queues = queues

    @classmethod
    def opened(cls, store: Store, names: Mapping[str, str], tables: Iterable[str]) -> Targets:
        """Open the queues of some tables.

        Raises
        ------
        QueueNotFoundError
            When a queue was dropped: its earlier rows are gone, so it is not created again.
        """
        return cls({table: store.queue(names[table]) for table in tables})

    def last_commit(self, tx: Transaction) -> int:
        """Return the newest commit in any of the queues; 0 if there is none."""
        commits = (feed_commits.newest_commit(tx, queue.record) for queue in self._queues.values())
        return max((each.version for each in commits if each is not None), default=0)

    def rows(
        self,
        batches: Mapping[str, Sequence[pa.RecordBatch]],
        upto: int,
        stamps: Stamps,
        continued: Continued | None,
    ) -> list[FeedRows]:
        """Return rows as the commits of their queues.

        Parameters
        ----------
        batches
            The rows by table.
        upto
            The last commit that is complete; later ones go on.
        stamps
            The times of the commits.
        continued
            The complete commit of which rows were appended before, to any of the queues.
        """
        tables = batches if continued is None else self._queues
        return [
            self._rows(self._queues[table], batches.get(table, ()), upto, stamps, continued)
            for table in tables
        ]

    def _rows(
        self,
        queue: Queue,
        batches: Sequence[pa.RecordBatch],
        upto: int,
        stamps: Stamps,
        continued: Continued | None,
    ) -> FeedRows:
        rows = _with_new_columns(queue, batches) if batches else queue.schema.empty_table()
        versions = rows[COMMIT_VERSION].to_numpy()
        place = rows.schema.get_field_index(COMMIT_TIMESTAMP)
        times = pa.array(stamps.of(versions)).view(INSTANT)
        rows = rows.set_column(place, rows.schema.field(place), times)
        last = np.flatnonzero(np.append(versions[1:] != versions[:-1], True)) if len(versions) else versions
        last = last[versions[last] <= upto]
        ended, moments = versions[last].tolist(), stamps.of(versions[last]).tolist()
        ends = (last + 1).tolist()
        if continued is not None and continued.version not in ended[:1]:
            ended, moments = [continued.version, *ended], [continued.timestamp, *moments]
            ends = [0, *ends]
        number = None if continued is None else continued.version
        return FeedRows(queue, queue.rows_to_append(rows), ended, moments, ends, number)


def create_queues(
    store: Store, names: Mapping[str, str], plans: Mapping[str, Tables], url: str, settings: QueueSettings
) -> None:
    """Create the queues of a new pump, unless they are there, and empty.

    Raises
    ------
    AlreadyExistsError
        When a queue has had rows, which are of something else or of an earlier pump, or has other columns.
    """
    for table, plan in plans.items():
        name = names[table]
        schema = pa.schema([each for each in plan.schema() if each.name not in METADATA_NAMES])
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
    there = {field.name: field.type for field in queue.schema}
    other = next((field for field in schema if there.get(field.name) != field.type), None)
    if other is not None:
        why = f"has no column {in_quotes(other.name)} of type {other.type}"
    elif queue.record.contract is None:
        why = "holds rows, not a change feed"
    elif any(partition.next_index for partition in queue.info().partitions):
        why = "has had rows, which a new pump would repeat"
    else:
        return
    raise AlreadyExistsError(
        f"the queue {in_quotes(queue.name)} is there already, and {why}: drop it, or start the pump with "
        "another queue or prefix",
        queue=queue.name,
        column=None if other is None else other.name,
    )


def _with_new_columns(queue: Queue, batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return rows as one table; the queue gets the columns, and the wider types, that a table has got.

    Raises
    ------
    SchemaMismatchError
        When the queue has such a column with another type.
    """
    for schema in dict.fromkeys(batch.schema for batch in batches):
        types = {field.name: field.type for field in queue.schema}
        other = [field for field in schema if types.get(field.name, field.type) != field.type]
        if other:
            queue.widen_columns(pa.schema(other))
        added = [field for field in schema if field.name not in types]
        if added:
            queue.add_columns(pa.schema(added))
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


class Stamps:
    """The times of commits, which do not fall from one commit to the next: a server's own may, since it takes
    them before it orders the commits.
    """

    def __init__(self, batches: Mapping[str, Sequence[pa.RecordBatch]], floor: int) -> None:
        parts = [batch for of_table in batches.values() for batch in of_table]
        versions = _joined([batch[COMMIT_VERSION] for batch in parts])
        times = _joined([batch[COMMIT_TIMESTAMP].view(pa.int64()) for batch in parts])
        self._versions, first = np.unique(versions, return_index=True)
        self._times = np.maximum(np.maximum.accumulate(times[first]), floor) if len(first) else times
        self.last = int(self._times[-1]) if len(first) else floor
        """That of the last commit."""

    def of(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the times of some of the commits."""
        found: NDArray[np.int64] = self._times[np.searchsorted(self._versions, versions)]
        return found


def _joined(arrays: Sequence[pa.Array]) -> NDArray[np.int64]:
    parts = [each.to_numpy(zero_copy_only=False) for each in arrays]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _contract(plan: Tables) -> ChangeContract:
    contract = plan.contract()
    if contract is not None:
        return contract
    if plan.several:
        missing = next(table for table in plan.tables if not table.key)
        raise FeedUnavailableError(
            f"nothing identifies the rows of {missing.name}, so they cannot be in one queue with those of "
            "other tables: give it a primary key, or each table a queue of its own",
            condition="FEED_UNAVAILABLE.NO_REPLICA_IDENTITY",
            table=missing.name,
        )
    # Only inserts are published: each row stands for itself.
    return ChangeContract(
        row_id=plan.tables[0].relation.names,
        nullable_row_id=True,
        intermediate_changes=True,
        whole_commits=True,
        sequence=SEQUENCE,
        unchanged=UNCHANGED_COLUMNS,
    )


def queue_names(tables: Iterable[str], prefix: str) -> dict[str, str]:
    """Return the name of each table's queue: the prefix and the table's name, with its schema unless that is
    ``public``.
    """
    return {table: prefix + table.removeprefix("public.") for table in tables}
