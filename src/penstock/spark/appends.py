"""Where appends begin and end in a backlog, merged segments included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.store.database import Transaction
from penstock.store.log.segmenting import Runs
from penstock.store.records.catalog import QueueRecord


@dataclass(frozen=True)
class Backlog:
    """Rows [start, end) of a partition, waiting."""

    partition: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    def upto(self, end: int) -> Backlog:
        """The rows before ``end``."""
        return Backlog(self.partition, self.start, max(self.start, min(self.end, end)))


def whole_appends(
    tx: Transaction, queue: QueueRecord, waiting: Sequence[Backlog], limited: Sequence[Backlog]
) -> list[Backlog]:
    """The appends in ``waiting`` all of whose rows are in ``limited``; or else the oldest one, however large.

    Append ids ascend inside each partition, so the rows up to one id are a prefix of every partition.
    """
    cut = [
        _append_at(tx, queue, part.partition, part.end)
        for full, part in zip(waiting, limited, strict=True)
        if part.end < full.end
    ]
    first_left = min((append for append in cut if append is not None), default=None)
    if first_left is None:
        return list(waiting)
    whole = [_before(tx, queue, each, first_left) for each in waiting]
    if not any(each.rows for each in whole):
        whole = [_before(tx, queue, each, first_left + 1) for each in waiting]
    return whole


def _append_at(tx: Transaction, queue: QueueRecord, partition: int, row: int) -> int | None:
    """The id of the append that brought a row; None when it and all later ones are gone."""
    segment = _segment(tx, queue, partition, row)
    if segment is None:
        return None
    if segment.first_append == segment.last_append:
        return int(segment.first_append)
    return Runs.from_bytes(segment.runs).append_at(row - segment.start_index)


def _before(tx: Transaction, queue: QueueRecord, backlog: Backlog, append: int) -> Backlog:
    """The rows whose append id is below ``append``, by bisection."""
    low, high = backlog.start, backlog.end
    while low < high:
        middle = (low + high) // 2
        segment = _segment(tx, queue, backlog.partition, middle)
        if segment is None or segment.first_append >= append:
            high = middle if segment is None else min(middle, max(low, segment.start_index))
        elif segment.last_append < append:
            low = segment.end_index
        else:
            return backlog.upto(segment.start_index + Runs.from_bytes(segment.runs).end_of(append - 1))
    return backlog.upto(low)


def _segment(tx: Transaction, queue: QueueRecord, partition: int, row: int) -> Any:
    """The segment of a row with its runs, in one statement: a merge may take it away before a second one."""
    return tx.one("appends_at", queue_id=queue.queue_id, partition=partition, row_index=row)
