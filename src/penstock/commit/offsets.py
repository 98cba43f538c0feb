"""Offsets of queues as sources, in the form in which Spark writes them to its offset log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock.errors import CheckpointMismatchError
from penstock.json_text import Json
from penstock.store.records.catalog import MAX_PARTITIONS

T = TypeVar("T")

_FIELDS = {"store", "queue", "generation", "from", "to"}


@dataclass(frozen=True)
class QueueOffset:
    """Rows [start, end) of a queue by partition, which one micro-batch reads from one source.

    The start is included because Spark does not log where its first micro-batch began.
    """

    store: str
    queue: str
    consumer: str | None
    generation: int
    epoch: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    rows_per_task: int | None = None
    """The largest number of rows in a task. It is stored so that a repeated micro-batch has the same
    tasks.
    """
    max_tasks: int | None = None
    """The number of tasks above which partitions with few rows share tasks; None if partitions never
    share.
    """
    moved_by_sink: bool = False
    """Whether the sink's own transaction moves the consumer, as far as the source knew when it planned the
    micro-batch.
    """
    owner: str | None = None
    """The identity of the consumer's owner. The epoch is not enough, since a restored store may assign it
    again.
    """
    unplanned: bool = False
    """Whether the store has no plan of the micro-batch. The sink's transaction checks the owner in that
    case.
    """
    times: tuple[int | None, ...] = ()
    """When the last row of each partition's range was appended, in microseconds since 1970. None if there is
    no such row, and -1 if it was trimmed. If the store was restored and has received new rows since, it has
    other rows there, and these times reveal it.
    """

    def to_dict(self) -> Json:
        fields: Json = {
            "store": self.store,
            "queue": self.queue,
            "consumer": self.consumer,
            "generation": self.generation,
            "epoch": self.epoch,
            "from": list(self.start),
            "to": list(self.end),
        }
        if self.rows_per_task is not None:
            fields["rowsPerTask"] = self.rows_per_task
        if self.max_tasks is not None:
            fields["maxTasks"] = self.max_tasks
        if self.moved_by_sink:
            fields["movedBySink"] = True
        if self.owner is not None:
            fields["owner"] = self.owner
        if self.unplanned:
            fields["unplanned"] = True
        if any(time is not None for time in self.times):
            fields["times"] = list(self.times)
        return fields

    @classmethod
    def of(cls, value: object) -> QueueOffset | None:
        """Return the offset in a parsed line of the offset log; None if the line belongs to another kind of
        source.
        """
        if not isinstance(value, Mapping) or not value.keys() >= _FIELDS:
            return None
        _require_offset(value)
        start, end = pad(value["from"], len(value["to"])), tuple(value["to"])
        return cls(
            value["store"],
            value["queue"],
            value.get("consumer"),
            value["generation"],
            value.get("epoch", 0),
            start,
            end,
            value.get("rowsPerTask"),
            value.get("maxTasks"),
            value.get("movedBySink", False),
            value.get("owner"),
            value.get("unplanned", False),
            tuple(value.get("times", ())),
        )

    @property
    def empty(self) -> bool:
        return self.start == self.end

    def last_rows(self, partitions: Iterable[int]) -> dict[tuple[int, int], int]:
        """Return when the last row of the range was appended in each of these partitions, by partition and
        end.

        Partitions for which this is unknown are left out.
        """
        known = [partition for partition in partitions if partition < len(self.times)]
        times = {(partition, self.end[partition]): self.times[partition] for partition in known}
        return {key: time for key, time in times.items() if time is not None}

    def moves(self, partitions: Iterable[int] | None = None) -> dict[str, list[int]]:
        """Return how the offsets of these partitions, or of all, move: the columns ``partition``, ``old`` and
        ``new``.
        """
        selected = range(len(self.end)) if partitions is None else partitions
        moved = [partition for partition in selected if self.start[partition] != self.end[partition]]
        return {
            "partition": moved,
            "old": [self.start[partition] for partition in moved],
            "new": [self.end[partition] for partition in moved],
        }

    @property
    def identity(self) -> tuple[str, str, str, int]:
        return self.store, self.queue, self.consumer or "", self.generation

    def require(self, store: str, queue: str, consumer: str | None, generation: int) -> None:
        """Refuse an offset that another source has written."""
        expected = {"store": store, "queue": queue, "consumer": consumer, "generation": generation}
        for name, value in expected.items():
            stored = getattr(self, name)
            if stored == value:
                continue
            if name != "generation":
                reason = "it belongs to another query, or the query's source was changed"
            elif consumer is None:
                reason = f"queue {queue!r} was dropped and recreated"
            else:
                reason = (
                    f"consumer {consumer!r} was moved by a seek or registered again, as after its queue was "
                    "recreated"
                )
            resume_hint = (
                "begins at startingOffsets" if consumer is None else "resumes at the consumer's offset"
            )
            raise CheckpointMismatchError(
                f"the checkpoint's offset has {name} {stored!r}, but the source has {value!r}: {reason}. "
                f"Start with a new checkpoint, with which the query {resume_hint}",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
                field=name,
                found=stored,
                expected=value,
            )

    def require_reached(self, ends: Sequence[int]) -> None:
        """Refuse an offset past the ends of the partitions: their store must be older than the checkpoint."""
        if len(self.end) <= len(ends) and all(
            offset <= end for offset, end in zip(self.end, ends, strict=False)
        ):
            return
        raise CheckpointMismatchError(
            f"queue {self.queue!r} was read up to {list(self.end)}, but it ends at {list(ends)}: if its "
            "store was restored from an older backup, restore the checkpoint of the same time, or use a "
            "new one",
            condition="CHECKPOINT_MISMATCH.SOURCE_BEHIND",
            queue=self.queue,
            offsets=list(self.end),
            ends=list(ends),
        )


def _require_offset(value: Mapping[str, Any]) -> None:
    """Check the format of an offset, since other programs may write to the checkpoint."""
    start, end = value["from"], value["to"]
    task_limits = [value.get(name) for name in ("rowsPerTask", "maxTasks")]
    times = value.get("times", [])
    integers = [
        value["generation"],
        value.get("epoch", 0),
        *(0 if limit is None else limit for limit in task_limits),
    ]
    texts = [value["store"], value["queue"]]
    optional = [value.get("consumer"), value.get("owner")]
    is_valid = (
        isinstance(start, list)
        and isinstance(end, list)
        and len(start) <= len(end) <= MAX_PARTITIONS
        and all(type(number) is int and number >= 0 for number in [*start, *end, *integers])
        and all(isinstance(text, str) for text in texts)
        and all(text is None or isinstance(text, str) for text in optional)
        and all(isinstance(value.get(name, False), bool) for name in ("movedBySink", "unplanned"))
        and isinstance(times, list)
        and len(times) <= len(end)
        and all(time is None or type(time) is int for time in times)
    )
    if not is_valid:
        raise CheckpointMismatchError(
            "the checkpoint's offset is not in Penstock's format: restore the file from a copy, or start "
            "with a new checkpoint; the query resumes at the consumer's offset",
            condition="CHECKPOINT_MISMATCH.MALFORMED",
        )


def plan_text(offset: QueueOffset) -> str:
    """Return a micro-batch's plan as the text that the store keeps."""
    return json.dumps(offset.to_dict())


def pad(offsets: Sequence[int], length: int) -> tuple[int, ...]:
    """Extend offsets to ``length`` partitions. Partitions that were added later start at 0."""
    return (*offsets, *[0] * (length - len(offsets)))


def batch_ranges(now: Sequence[object], before: Sequence[object]) -> list[QueueOffset]:
    """Return the range of each queue source of a micro-batch. A range is empty if there are no new rows.

    ``now`` and ``before`` are the parsed lines of the offset log for this micro-batch and for the previous
    one (empty for the first micro-batch).
    """
    previous = {offset for offset in map(QueueOffset.of, before) if offset is not None}
    ranges: dict[tuple[str, str, str, int], QueueOffset] = {}
    for offset in map(QueueOffset.of, now):
        if offset is None:
            continue
        batch_range = replace(offset, start=offset.end) if offset in previous else offset
        existing = ranges.setdefault(offset.identity, batch_range)
        if offset.consumer is not None and existing != batch_range:
            raise CheckpointMismatchError(
                f"consumer {offset.consumer!r} reads queue {offset.queue!r} twice in one query, with "
                "different ranges: read it once and reuse the DataFrame, or give each read its own "
                "consumer",
                condition="CHECKPOINT_MISMATCH.CONSUMER_READ_TWICE",
                consumer=offset.consumer,
            )
    return list(ranges.values())


def other_offsets(now: Sequence[T]) -> list[T]:
    """Return the parsed lines of sources other than queues."""
    return [value for value in now if QueueOffset.of(value) is None]
