"""``penstock consumer lag``: the rows that consumers have not processed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from penstock.cli.commands.consumer import group as group
from penstock.cli.commands.consumer import omitted_registrations
from penstock.cli.commands.shared import MAX_LISTED, Run, argument, command, note_missing
from penstock.cli.output import Column, Section
from penstock.cli.units import age_text, count_text, counted, size_text
from penstock.errors import (
    ConsumerNotFoundError,
    InvalidNameError,
    NotRegisteredError,
    QueueNotFoundError,
    StoreError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from penstock.json_text import Json
    from penstock.queue.consumer import Lag, PartitionLag
    from penstock.queue.store import Store
    from penstock.store.database import Row, Transaction
    from penstock.ui.unreadable import UnreadableRecords


def _age_or_blank(seconds: float | None) -> str:
    return "" if seconds is None else age_text(seconds)


_LAG_COLUMNS = (
    Column("consumer", "consumer"),
    Column("queue", "queue"),
    Column("rows", "rows", count_text, right=True),
    Column("trimmed_rows", "trimmed", count_text, right=True),
    Column("bytes", "size", size_text, right=True),
    Column("seconds", "oldest", _age_or_blank, right=True),
)
_PARTITION_LAG_COLUMNS = (
    Column("partition", "partition", count_text, right=True),
    Column("offset", "offset", count_text, right=True),
    Column("next_index", "next", count_text, right=True),
    *_LAG_COLUMNS[2:],
)


@command(group, "lag", "penstock consumer lag", "penstock consumer lag billing orders --json")
def lag(
    run: Run,
    consumer: Annotated[str | None, argument("CONSUMER", "Only this consumer.")] = None,
    queue: Annotated[str | None, argument("QUEUE", "Only this queue.")] = None,
) -> None:
    """Show the number, size and age of the unprocessed rows.

    "trimmed" is how many of the rows no longer exist, because they were trimmed before the consumer processed
    them. "size" and "oldest", the age of the oldest row, are those of the rows that still exist. With a
    consumer and a queue, each partition has a row: "offset" is the index of the first row that the consumer
    has not processed, and "next" the index that the next row to be appended will get.

    Without a consumer the list has the first 5,000 rows by name, and a note says how many are left out.
    """
    from penstock.store.records.consumers import summarize_registrations
    from penstock.ui.unreadable import UnreadableRecords

    unreadable, omitted = UnreadableRecords(), 0
    with run.connect() as store:
        lags = _LagReader(store, unreadable)
        if consumer is not None and queue is not None:
            data = lags.lag_of(consumer, queue)
            run.output.describe({"lags": [data]}, _lag_sections(data))
            return
        if consumer is not None:
            rows = lags.lags_of_consumer(consumer)
        else:
            registrations = store.database.run(
                lambda tx: summarize_registrations(tx, MAX_LISTED), write=False
            )
            rows, omitted_for_partitions = lags.lags_of_registrations(registrations)
            omitted = omitted_registrations(registrations) + omitted_for_partitions
    note_missing(run.output, unreadable, omitted, "consumers", "the first ones by name")
    run.output.table("lags", _LAG_COLUMNS, rows)


class _LagReader:
    """Reader of the lags of a store's consumers; records that cannot be read are noted."""

    def __init__(self, store: Store, unreadable: UnreadableRecords) -> None:
        self._store, self._unreadable = store, unreadable
        self._first_indexes: dict[str, list[int]] = {}

    def lag_of(self, consumer: str, queue: str) -> Json:
        registered = self._store.consumer(consumer)
        # Read these before the offsets, because rows that are trimmed later may have been processed by then.
        first_indexes = self._first_indexes_of(queue)
        return _lag_data(consumer, queue, registered.lag(queue), first_indexes)

    def _first_indexes_of(self, queue: str) -> list[int]:
        from penstock.store.records import catalog

        def read(tx: Transaction) -> list[int]:
            return [part.first_index for part in catalog.partitions(tx, catalog.find_queue(tx, queue))]

        if queue not in self._first_indexes:
            self._first_indexes[queue] = self._store.database.run(read, write=False)
        return self._first_indexes[queue]

    def lags_of_consumer(self, consumer: str) -> list[Json]:
        from penstock.ui.unreadable import record_name

        lags = []
        for queue in self._store.consumer(consumer).queues():
            try:
                lags.append(self.lag_of(consumer, queue))
            except QueueNotFoundError:
                # Dropped since it was listed.
                continue
            except StoreUnavailableError:
                raise
            except StoreError as error:
                self._unreadable.add(record_name("queue", queue), error)
        return lags

    def lags_of_registrations(self, listed: list[Row]) -> tuple[list[Json], int]:
        """Return the lags of registrations, and how many of them were left out since they have too many
        partitions in all.
        """
        from penstock.ui.reading import MAX_PARTITIONS
        from penstock.ui.unreadable import record_name

        lags: list[Json] = []
        partitions = omitted = 0
        for row in listed:
            if row.queue is None:
                continue
            if partitions >= MAX_PARTITIONS:
                omitted += 1
                continue
            try:
                data = self.lag_of(row.consumer, row.queue)
            except (QueueNotFoundError, ConsumerNotFoundError, NotRegisteredError):
                # Dropped since it was listed.
                continue
            except StoreUnavailableError:
                raise
            except (InvalidNameError, StoreError) as error:
                # Other programs may have written an invalid name, or any offset.
                self._unreadable.add(record_name("consumer", row.consumer), error)
            else:
                lags.append(data)
                partitions += len(data["partitions"])
        return lags, omitted


def _lag_data(consumer: str, queue: str, lag: Lag, first_indexes: list[int]) -> Json:
    # Partitions may have been added to the queue since.
    first_by_partition = first_indexes + [0] * (len(lag.partitions) - len(first_indexes))
    partitions = [_partition_data(part, first_by_partition[part.partition]) for part in lag.partitions]
    return {
        "consumer": consumer,
        "queue": queue,
        "rows": lag.rows,
        "trimmed_rows": sum(part["trimmed_rows"] for part in partitions),
        "bytes": lag.bytes,
        "seconds": max((part["seconds"] for part in partitions if part["seconds"] is not None), default=None),
        "partitions": partitions,
    }


def _partition_data(part: PartitionLag, first_index: int) -> Json:
    trimmed = min(max(first_index - part.offset, 0), part.rows)
    return {
        "partition": part.partition,
        "offset": part.offset,
        "next_index": part.next_index,
        "rows": part.rows,
        "trimmed_rows": trimmed,
        "bytes": part.bytes,
        "seconds": round(part.seconds, 3) if part.rows > trimmed else None,
    }


def _lag_sections(lag: Json) -> list[Section]:
    pairs = [("consumer", lag["consumer"]), ("queue", lag["queue"]), ("behind", _behind_text(lag))]
    if lag["trimmed_rows"]:
        pairs.append(("trimmed", "rows are lost to it: its next read fails with DATA_LOST.TRIMMED"))
    return [Section("", pairs), Section("", columns=_PARTITION_LAG_COLUMNS, rows=lag["partitions"])]


def _behind_text(lag: Json) -> str:
    if not lag["rows"]:
        return "nothing: it has processed all rows"
    parts = [counted(lag["rows"], "row")]
    if lag["trimmed_rows"]:
        parts.append(f"{lag['trimmed_rows']:,} of them trimmed")
    if lag["seconds"] is not None:
        parts += [size_text(lag["bytes"]), f"the oldest {age_text(lag['seconds'])} old"]
    return ", ".join(parts)
