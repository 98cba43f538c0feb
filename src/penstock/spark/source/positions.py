"""Where reads start and end, for one view of a queue's partitions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from penstock.commit.offsets import QueueOffset, pad
from penstock.errors import CheckpointMismatch, DataLost, InvalidPosition
from penstock.spark.options import SourceOptions
from penstock.store.database import Transaction
from penstock.store.records import consumers
from penstock.store.records.catalog import PartitionRecord, QueueRecord

log = logging.getLogger("penstock.spark")


def start_positions(
    tx: Transaction, options: SourceOptions, queue: QueueRecord, there: Sequence[PartitionRecord]
) -> list[int]:
    """Where a read without a checkpoint starts, by partition; the rows there may have been trimmed.

    Raises
    ------
    InvalidPosition
        When a row index that was given is past the newest row, or its partition does not exist.
    """
    if options.consumer is not None:
        registration = consumers.find_registration(tx, options.consumer, queue.name)
        return list(pad(consumers.read_offsets(tx, registration)[0], len(there))[: len(there)])
    if options.starting_timestamp is not None:
        found = consumers.resolve(tx, queue, options.starting_timestamp)
        return [min(index, part.next_index) for index, part in zip(found, there, strict=False)]
    start = options.starting_offsets or "earliest"
    if isinstance(start, str):
        return [part.first_index if start == "earliest" else part.next_index for part in there]
    return _given(queue, there, start, [part.first_index for part in there])


def end_positions(
    options: SourceOptions, queue: QueueRecord, there: Sequence[PartitionRecord], start: Sequence[int]
) -> list[int]:
    """Where a batch read ends, by partition; nowhere before its start.

    Raises
    ------
    InvalidPosition
        When a row index that was given is past the newest row or before the start that was given.
    """
    end = options.ending_offsets
    if isinstance(end, str):
        found = [part.first_index if end == "earliest" else part.next_index for part in there]
    else:
        found = _given(queue, there, end, [part.next_index for part in there])
    if isinstance(options.starting_offsets, Mapping) and isinstance(end, Mapping):
        for partition in options.starting_offsets.keys() & end.keys():
            if found[partition] < options.starting_offsets[partition]:
                raise InvalidPosition(
                    f"endingOffsets has row {found[partition]} for partition {partition}, before startingOffsets' "
                    f"{options.starting_offsets[partition]}: exchange them",
                    partition=partition,
                )
    return [max(first, last) for first, last in zip(start, found, strict=True)]


def _given(
    queue: QueueRecord, there: Sequence[PartitionRecord], given: Mapping[int, int], others: Sequence[int]
) -> list[int]:
    offsets = list(others)
    for partition, index in given.items():
        if not 0 <= partition < len(there):
            raise InvalidPosition(
                f"queue {queue.name!r} has partitions 0 to {len(there) - 1}, not {partition}",
                partition=partition,
            )
        if not 0 <= index <= there[partition].next_index:
            raise InvalidPosition(
                f"queue {queue.name!r}, partition {partition}, has rows up to {there[partition].next_index}, "
                f"not {index}: a position lies between 0 and that",
                partition=partition,
            )
        offsets[partition] = index
    return offsets


def require_reached(offset: QueueOffset, there: Sequence[PartitionRecord]) -> None:
    """Refuse an offset that the queue has not reached: its store is older than the checkpoint.

    Raises
    ------
    CheckpointMismatch
    """
    ends = [part.next_index for part in there]
    if len(offset.end) <= len(ends) and all(at <= end for at, end in zip(offset.end, ends, strict=False)):
        return
    raise CheckpointMismatch(
        f"the checkpoint has read queue {offset.queue!r} up to {list(offset.end)}, and the queue ends at {ends}: was its store "
        "restored from an older backup? Then restore the checkpoint of the same moment, or use a new one",
        condition="CHECKPOINT_MISMATCH.SOURCE_BEHIND",
        queue=offset.queue,
        offsets=list(offset.end),
        ends=ends,
    )


def skip_trimmed(
    options: SourceOptions, there: Sequence[PartitionRecord], offsets: Sequence[int]
) -> list[int]:
    """The offsets, moved to the first rows that are there where data loss is accepted.

    Raises
    ------
    DataLost
        When rows from an offset on have been trimmed, and ``failOnDataLoss`` is true.
    """
    for part, offset in zip(there, offsets, strict=True):
        if offset < part.first_index:
            report_loss(
                options.queue, part.partition, offset, part.first_index, fail=options.fail_on_data_loss
            )
    return [max(offset, part.first_index) for part, offset in zip(there, offsets, strict=True)]


def report_loss(queue: str, partition: int, start: int, end: int, *, fail: bool) -> None:
    """Raise, or write to the log, that rows [start, end) have been trimmed before they were read."""
    lost = (
        f"rows [{start}, {end}) of queue {queue!r}, partition {partition}, were trimmed before they were read"
    )
    if not fail:
        log.warning(
            "going on without what is lost: %s",
            lost,
            extra={"action": "data_lost", "queue": queue, "partition": partition, "start": start, "end": end},
        )
        return
    raise DataLost(
        f"{lost}: set failOnDataLoss=false to go on without them, or start anew from rows that are there (seek the "
        "consumer to 'earliest', and a stream needs a new checkpoint then)",
        queue=queue,
        partition=partition,
        start=start,
        end=end,
    )
