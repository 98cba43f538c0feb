"""A change feed that is kept in a queue."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import require
from penstock.arrow.schema import canonical_schema
from penstock.errors import ChangelogContractViolation, DataLost, FeedUnavailable
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, TYPES, ChangeContract
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    Commit,
    Description,
    change_rows,
    check_reserved,
    check_there,
)
from penstock.feeds.urls import FeedUrl, pairs
from penstock.queue.checks import check_name
from penstock.queue.feed_commits import append_commit, check_version, micros
from penstock.queue.maintenance import Retention
from penstock.queue.open_stores import open_store
from penstock.queue.queue import AppendResult, Queue, Rows
from penstock.store.database import Transaction
from penstock.store.records import catalog, feed_commits
from penstock.store.records.catalog import QueueRecord

if TYPE_CHECKING:
    from penstock.spark.source.read_task import RangePartition


@dataclass(frozen=True)
class QueueFeed:
    """Change rows in a queue, written in whole commits.

    Parameters
    ----------
    queue
        The queue's name; make it with :meth:`create`.
    store
        The URL of its store.
    """

    queue: str
    store: str = field(repr=False)

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        require("store", self.store, str, "the URL of a store, such as 'sqlite:///shop.db'")

    # For programs that write the feed; none of it needs Spark.

    @classmethod
    def create(
        cls,
        queue: str,
        schema: Any,
        contract: ChangeContract,
        *,
        store: str,
        partitions: int = 1,
        retention: Retention | None = None,
    ) -> QueueFeed:
        """Create a queue for a feed.

        Parameters
        ----------
        schema
            The data columns: a ``pyarrow.Schema`` or a PySpark ``StructType``.
        contract
            What the rows will keep to. Rows of one row id share a partition where the row id is made of plain columns.
        store
            The URL of an existing store.
        partitions, retention
            As for ``Store.create_queue``.

        Raises
        ------
        AlreadyExists, InvalidChangelogSchema, InvalidName, UnsupportedType
        """
        feed = cls(queue, store)
        require("contract", contract, ChangeContract, "a ps.ChangeContract")
        data = canonical_schema(schema)
        what = f"the schema of feed {queue!r}"
        check_reserved(data, what)
        check_there(
            data, what, [*contract.row_id, contract.row_version, contract.sequence, contract.unchanged]
        )
        open_store(store).create_queue(
            queue,
            pa.schema([*data, *METADATA_FIELDS]),
            partitions=partitions,
            key=_key(data, contract),
            retention=retention,
            contract=json.dumps(asdict(contract)),
        )
        return feed

    def append_commit(self, version: int, timestamp: datetime, rows: Rows) -> AppendResult:
        """Append one commit, all of it or nothing.

        Parameters
        ----------
        version
            A whole number from 0, above that of the newest commit.
        timestamp
            When it happened, with a time zone; not before the newest commit.
        rows
            Its change rows (a table, a batch, or dicts): the data columns and ``_change_type``.

        Raises
        ------
        CommitOutOfOrder
            When a version or a timestamp goes backwards; a writer that was killed finds its last one with ``newest``.
        SchemaMismatch
            When a row does not fit.
        ChangelogContractViolation
            When a row's change type is none, or its row id is NULL: no reader could go past it. Nothing is appended in any case.
        """
        check_version(version)
        moment = micros(timestamp)
        queue, contract = self._writing()
        table = queue.conformed(rows, _given).combine_chunks()
        full, written = queue.schema, table.schema
        batch = table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], schema=written)
        change_type = batch.column(written.get_field_index(CHANGE_TYPE))
        _check_changes(table, contract)
        commit = change_rows(batch, full, change_type=change_type, version=version, timestamp=moment)
        return AppendResult(append_commit(queue, version, moment, pa.Table.from_batches([commit])).ranges)

    # The protocol of a feed.

    @property
    def url(self) -> str:
        return str(FeedUrl("queue", self.queue, pairs(store=self.store)))

    @property
    def name(self) -> str:
        return f"queue {self.queue!r}"

    @classmethod
    def from_url(cls, url: str) -> QueueFeed:
        parts = FeedUrl.of(url)
        parts.require_known(["store"])
        store = parts.one("store")
        if store is None:
            raise FeedUnavailable(
                f"the feed of queue {parts.target!r} needs its store: queue:{parts.target}?store=sqlite:///penstock.db",
                condition="FEED_UNAVAILABLE.STORE_MISSING",
            )
        return cls(parts.target, store)

    def describe(self) -> Description:
        store = open_store(self.store, verify=True)
        record = store.queue(self.queue).record
        return Description(
            f"queue:{store.uuid}/{record.name}/{record.generation}", record.schema, self._contract(record)
        )

    def begin(self) -> int:
        """Where all can be read that is kept; nothing has to be made for a new query."""
        return self.oldest()

    def oldest(self) -> int:
        return int(self._run(feed_commits.oldest))

    def newest(self, after: int) -> int:
        found = self._run(feed_commits.newest)
        return after if found is None else max(after, found.version)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        done = after

        def page(tx: Transaction, queue: QueueRecord) -> list[feed_commits.FeedCommit]:
            self._check_there(tx, queue, done)
            return feed_commits.page(tx, queue, done, upto)

        while found := self._run(page):
            for each in found:
                yield Commit(each.version, each.timestamp, each.rows)
            done = found[-1].version

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Any]:
        from penstock.spark.source.admission import split_into_tasks

        def bounds(tx: Transaction, queue: QueueRecord) -> tuple[list[int], list[int]]:
            self._check_there(tx, queue, after)
            return (
                feed_commits.starts(tx, queue, after, queue.partitions),
                feed_commits.starts(tx, queue, upto, queue.partitions),
            )

        start, end = self._run(bounds)
        return split_into_tasks(start, end, rows_per_task)

    def read(self, task: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from penstock.spark.source.read_task import RangePartition, Scan

        piece: RangePartition = RangePartition(*task)
        return Scan(self.store, open_store(self.store).queue(self.queue).record, schema).read(piece)

    def logged(self, upto: int) -> None:
        """Nothing: the queue's retention says what stays."""

    def _check_there(self, tx: Transaction, queue: QueueRecord, after: int) -> None:
        oldest = feed_commits.oldest(tx, queue)
        if after >= oldest:
            return
        first = [part.first_index for part in catalog.partitions(tx, queue)]
        if any(
            start < bound
            for start, bound in zip(feed_commits.starts(tx, queue, after, len(first)), first, strict=True)
        ):
            raise DataLost(
                f"the commits of {self.name} up to {oldest} have been trimmed, and those above {after} were asked for: start "
                f"from version {oldest + 1}, with a new checkpoint",
                feed=self.name,
                after=after,
                oldest=oldest,
            )

    def _writing(self) -> tuple[Queue, ChangeContract]:
        """The queue, and what it has promised."""
        # A commit is small: looking its queue up each time would cost as much as the commit.
        known: tuple[int, Queue, ChangeContract] | None = self.__dict__.get("_queue")
        if known is None or known[0] != os.getpid():
            queue = open_store(self.store).queue(self.queue)
            known = os.getpid(), queue, self._contract(queue.record)
            object.__setattr__(self, "_queue", known)
        return known[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {"queue": self.queue, "store": self.store}

    def _run(self, work: Any) -> Any:
        store = open_store(self.store)
        record = store.queue(self.queue).record
        return store.database.run(lambda tx: work(tx, record), write=False)

    def _contract(self, record: QueueRecord) -> ChangeContract:
        if record.contract is None:
            raise FeedUnavailable(
                f"queue {record.name!r} holds rows, not a change feed: make one with QueueFeed.create, or read the queue with "
                "format('penstock') and use penstock.changes.post_process",
                condition="FEED_UNAVAILABLE.NOT_A_FEED",
                queue=record.name,
            )
        # Whatever its maker said: commits are appended whole, and micro-batches hold whole ones.
        return ChangeContract(**json.loads(record.contract) | {"whole_commits": True})


@lru_cache(maxsize=64)
def _given(queue: QueueRecord) -> pa.Schema:
    """The columns that a writer of commits gives."""
    return pa.schema(
        [field for field in queue.schema if field.name not in (COMMIT_VERSION, COMMIT_TIMESTAMP)]
    )


def _check_changes(rows: pa.Table, contract: ChangeContract) -> None:
    known = pa.array(TYPES, rows.schema.field(CHANGE_TYPE).type)
    unknown = pc.invert(pc.is_in(rows[CHANGE_TYPE], value_set=known))
    if pc.any(unknown).as_py():
        found = rows[CHANGE_TYPE][pc.index(unknown, True).as_py()].as_py()
        raise ChangelogContractViolation(
            f"{CHANGE_TYPE} is {found!r}: give {', '.join(TYPES)}",
            condition="CHANGELOG_CONTRACT_VIOLATION.UNEXPECTED_CHANGE_TYPE",
        )
    names = (
        [] if contract.nullable_row_id else [name for name in contract.row_id if name in rows.column_names]
    )
    lacking = next((name for name in names if rows[name].null_count), None)
    if lacking is not None:
        raise ChangelogContractViolation(
            f"{lacking} is NULL: a row without its id cannot be followed",
            condition="CHANGELOG_CONTRACT_VIOLATION.NULL_ROW_ID",
        )


def _key(data: pa.Schema, contract: ChangeContract) -> tuple[str, ...]:
    plain = all(name in data.names and not pat.is_nested(data.field(name).type) for name in contract.row_id)
    return tuple(contract.row_id) if plain else ()
