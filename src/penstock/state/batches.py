"""A batch of a checkpoint, micro-batch or epoch: what it covers, and whether it is committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.commit.offsets import QueueOffset
from penstock.instants import moment_text

MICRO_BATCH, CONTINUOUS = "micro-batch", "continuous"


@dataclass(frozen=True)
class Source:
    """One source's offset in a batch."""

    position: int
    """The source's place in the query, from 0."""
    name: str | None
    """The source's name, where the log has names (its format 2)."""
    offset: Any
    """As it is logged: JSON, or a text; None where the source had none yet."""

    @property
    def queue(self) -> QueueOffset | None:
        """The rows of a queue that the batch covers; None for another kind of source."""
        return QueueOffset.of(self.offset)

    @property
    def kind(self) -> str:
        """``queue``, ``feed`` or ``other``."""
        if self.queue is not None:
            return "queue"
        is_feed = isinstance(self.offset, Mapping) and self.offset.keys() == {"feed", "from", "to"}
        return "feed" if is_feed else "other"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        about: dict[str, Any] = {"source": self.position, "name": self.name, "kind": self.kind}
        queue = self.queue
        if queue is None:
            return {**about, "offset": self.offset}
        ranges = [
            {"partition": partition, "from": start, "to": end}
            for partition, (start, end) in enumerate(zip(queue.start, queue.end, strict=True))
        ]
        names = {"store": queue.store, "queue": queue.queue, "consumer": queue.consumer}
        return {**about, **names, "partitions": ranges}


@dataclass(frozen=True)
class Batch:
    """A micro-batch, or an epoch of a continuous query."""

    id: int
    committed: bool = False
    """Whether it is in the commit log."""
    engine: str | None = None
    """``micro-batch`` or ``continuous``; None where the files do not tell."""
    planned_at: datetime | None = None
    """When its offsets were logged, by the driver's clock, in UTC."""
    committed_at: datetime | None = None
    """When the entry of the commit log was written, by the file's time."""
    watermark: datetime | None = None
    """The one that it ran with; None where there was none yet."""
    next_watermark: datetime | None = None
    """The one that the next batch runs with, from the commit log."""
    sources: tuple[Source, ...] = ()
    state_ids: bool = False
    """Whether the commit log names the files of the state (format 2 of Spark's state checkpoints)."""
    rows: int | None = None
    """Rows that it takes from queues; None where it has another source, or the files do not tell."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "id": self.id,
            "committed": self.committed,
            "planned_at": moment_text(self.planned_at),
            "committed_at": moment_text(self.committed_at),
            "watermark": moment_text(self.watermark),
            "next_watermark": moment_text(self.next_watermark),
            "rows": self.rows,
            "sources": [source.to_dict() for source in self.sources],
        }
