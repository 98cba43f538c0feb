"""What a checkpoint holds: its last batches, its stateful operators and their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from penstock.instants import moment_text
from penstock.state.logs import Batch

if TYPE_CHECKING:
    from penstock.limits.progress import LimitProgress

HDFS, ROCKSDB = "hdfs", "rocksdb"


@dataclass(frozen=True)
class StatePart:
    """Rows of one schema: all of an operator's state, a side of a join, or a variable of a transformWithState."""

    name: str
    """What ``ps.state.read`` takes as ``part``."""
    kind: str | None = None
    """ValueState, ListState or MapState, for a variable."""
    keys: str | None = None
    """The columns of the key with their types; None where they were not asked for, or could not be told."""
    values: str | None = None
    rows: int | None = None
    """Rows as of the last committed batch; a list counts as one."""
    updated: int | None = None
    """Rows that the last committed batch wrote."""
    removed: int | None = None
    """Rows that the last committed batch removed."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "keys": self.keys,
            "values": self.values,
            "rows": self.rows,
            "updated": self.updated,
            "removed": self.removed,
        }


@dataclass(frozen=True)
class StateStore:
    """The files of one state store of an operator, over all partitions."""

    name: str
    kind: str | None
    """``hdfs`` or ``rocksdb``, by the files' names; None where there are none."""
    partitions: int
    bytes: int
    """Of all files that are kept, those of older batches too; without checksums and what crashes left."""
    newest_snapshot: int | None
    """The batch of the newest file that has the whole state of a partition."""
    newest_delta: int | None
    """The batch of the newest file that has the changes of one batch."""
    written_at: datetime | None
    """When the newest of the two was written, by the file's time."""
    batches_with_changes: frozenset[int] = frozenset()
    """The batches whose changes every partition has a file of."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "partitions": self.partitions,
            "bytes": self.bytes,
            "newest_snapshot": self.newest_snapshot,
            "newest_delta": self.newest_delta,
            "written_at": moment_text(self.written_at),
        }


@dataclass(frozen=True)
class StateOperator:
    """One stateful operator of a query."""

    id: int
    name: str | None
    """Spark's name for it, such as ``stateStoreSave``; None where the files do not tell."""
    stores: tuple[StateStore, ...]
    parts: tuple[StatePart, ...] = ()
    rows: int | None = None
    """Rows in state as Spark's progress counts them, as of the last committed batch."""
    updated: int | None = None
    """Rows that the last committed batch wrote."""
    removed: int | None = None
    """Rows that the last committed batch removed."""
    properties: Mapping[str, Any] = field(default_factory=dict)
    """What Spark keeps about the operator: the variables and modes of transformWithState."""
    untold: tuple[str, ...] = ()
    """What could not be told, and why."""

    @property
    def partitions(self) -> int:
        """Partitions that have state."""
        return max((store.partitions for store in self.stores), default=0)

    @property
    def bytes(self) -> int:
        """Bytes on disk, of all stores and all batches that are kept."""
        return sum(store.bytes for store in self.stores)

    @property
    def newest_batch(self) -> int | None:
        """The batch of the newest file of the state, which may not be committed."""
        found = (batch for store in self.stores for batch in (store.newest_snapshot, store.newest_delta))
        return max((batch for batch in found if batch is not None), default=None)

    @property
    def written_at(self) -> datetime | None:
        """When the newest file of the state was written."""
        return max((store.written_at for store in self.stores if store.written_at), default=None)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "id": self.id,
            "name": self.name,
            "rows": self.rows,
            "updated": self.updated,
            "removed": self.removed,
            "partitions": self.partitions,
            "bytes": self.bytes,
            "newest_batch": self.newest_batch,
            "written_at": moment_text(self.written_at),
            "parts": [part.to_dict() for part in self.parts],
            "stores": [store.to_dict() for store in self.stores],
            "properties": dict(self.properties),
            "untold": list(self.untold),
        }


@dataclass(frozen=True, repr=False)
class CheckpointState:
    """What the checkpoint of a streaming query holds; ``print`` and a notebook show it as text."""

    location: str
    """Without secrets."""
    query_id: str | None
    """The query's id, the same over all runs; None where the file that has it is missing."""
    committed: Batch | None
    """The last committed batch."""
    planned: Batch | None
    """A batch behind it that is planned and not committed: it runs now, or the query ended in it and begins with it again."""
    operators: tuple[StateOperator, ...] = ()
    limit: LimitProgress | None = None
    """How far a pipeline's limit has come; None where the query has none."""
    untold: tuple[str, ...] = ()
    """What could not be told, and why."""

    @property
    def engine(self) -> str | None:
        """The engine of the last batch, ``micro-batch`` or ``continuous``, as far as the files tell."""
        last = self.planned or self.committed
        return None if last is None else last.engine

    @property
    def last_planned(self) -> int | None:
        """The id of the last batch or epoch whose offsets are logged."""
        last = self.planned or self.committed
        return None if last is None else last.id

    @property
    def last_committed(self) -> int | None:
        """The id of the last batch or epoch that is committed."""
        return None if self.committed is None else self.committed.id

    @property
    def watermark(self) -> datetime | None:
        """The one that the next batch runs with, or the one that is planned."""
        if self.planned is not None:
            return self.planned.watermark
        return None if self.committed is None else self.committed.next_watermark

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON: times are texts in UTC. Keys are never renamed or removed; new ones may be added."""
        return {
            "location": self.location,
            "query_id": self.query_id,
            "engine": self.engine,
            "last_planned": self.last_planned,
            "last_committed": self.last_committed,
            "watermark": moment_text(self.watermark),
            "committed": None if self.committed is None else self.committed.to_dict(),
            "planned": None if self.planned is None else self.planned.to_dict(),
            "limit": None if self.limit is None else self.limit.to_dict(),
            "operators": [operator.to_dict() for operator in self.operators],
            "untold": list(self.untold),
        }

    def __repr__(self) -> str:
        about = {"query_id": self.query_id, "committed": self.last_committed, "planned": self.last_planned}
        told = "".join(f", {name}={value!r}" for name, value in about.items())
        return f"CheckpointState({self.location!r}{told}, operators={len(self.operators)})"

    def __str__(self) -> str:
        from penstock.state.render import text

        return text(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"
