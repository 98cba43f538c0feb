"""Stateful operators of a checkpoint: their stores, their parts and the rows in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.instants import moment_text

HDFS, ROCKSDB = "hdfs", "rocksdb"


@dataclass(frozen=True)
class StatePart:
    """Rows of one schema: all of an operator's state, a side of a join, or a variable of a
    transformWithState.
    """

    name: str
    """The ``part`` of ``penstock.state.read``."""
    kind: str | None = None
    """ValueState, ListState or MapState, for a variable."""
    keys: str | None = None
    """The columns of the key with their types; None where they were not read or are unknown."""
    values: str | None = None
    rows: int | None = None
    """Rows as of the last committed batch; a list counts as one."""
    updated: int | None = None
    """Rows that the last committed batch wrote."""
    removed: int | None = None
    """Rows that the last committed batch removed."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
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
    """The size of all files, those of older batches too; without checksums and leftovers of crashes."""
    newest_snapshot: int | None
    """The batch of the newest file that has the whole state of a partition."""
    newest_delta: int | None
    """The batch of the newest file that has the changes of one batch."""
    written_at: datetime | None
    """When the newest of the two was written, by the file's time."""
    batches_with_changes: frozenset[int] = frozenset()
    """The batches whose changes every partition has a file of."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
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
    """Spark's name for it, such as ``stateStoreSave``; None where the files do not have it."""
    stores: tuple[StateStore, ...]
    parts: tuple[StatePart, ...] = ()
    rows: int | None = None
    """Rows in state as Spark's progress counts them, as of the last committed batch."""
    updated: int | None = None
    """Rows that the last committed batch wrote."""
    removed: int | None = None
    """Rows that the last committed batch removed."""
    properties: Mapping[str, Any] = field(default_factory=dict)
    """Spark's properties of the operator: the variables and modes of transformWithState."""
    untold: tuple[str, ...] = ()
    """What is unknown, and why."""

    @property
    def partitions(self) -> int:
        """Partitions that have state."""
        return max((store.partitions for store in self.stores), default=0)

    @property
    def bytes(self) -> int:
        """Bytes on disk, of all stores and all retained batches."""
        return sum(store.bytes for store in self.stores)

    @property
    def newest_batch(self) -> int | None:
        """The batch of the newest file of the state, which may not be committed."""
        newest = (batch for store in self.stores for batch in (store.newest_snapshot, store.newest_delta))
        return max((batch for batch in newest if batch is not None), default=None)

    @property
    def written_at(self) -> datetime | None:
        """When the newest file of the state was written."""
        return max((store.written_at for store in self.stores if store.written_at), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
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
