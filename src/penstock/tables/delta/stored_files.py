"""The data files of a Delta table, and the ones that may have rows with certain keys."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.lake.deletion_vectors import DeletionVector
from penstock.lake.storage import DeltaPlace, import_deltalake
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.log_files import Actions, adds_in_log
from penstock.tables.delta.vectors import may_have_vectors, vector_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.=-]+")
Identity = tuple[str, DeletionVector | None]


@dataclass(frozen=True)
class Stored:
    """A data file of the table."""

    path: str
    size: int
    add: dict[str, Any] | None = None
    """The file's add action, if the table's files may have deletion vectors."""

    @property
    def vector(self) -> DeletionVector | None:
        return None if self.add is None else vector_of(self.add)

    @property
    def identity(self) -> Identity:
        """The path and the vector, which determine the file's live rows."""
        return self.path, self.vector

    def remove_action(self) -> Any:
        """Return deltalake's ``RemoveAction``."""
        return import_deltalake("deltalake.transaction").RemoveAction(
            path=self.path,
            data_change=True,
            deletion_timestamp=time.time_ns() // 1_000_000,
            size=self.size,
            partition_values={},
        )


@dataclass
class StoredFiles:
    """The data files of a table as one attempt to commit has loaded it; the log is read once.

    Each attempt reads the log again, since a table that another process has recreated has other commits.
    """

    place: DeltaPlace
    table: DeltaTable = field(repr=False)
    _adds: Actions = field(default_factory=dict, repr=False)

    def near(self, keys: pa.Schema, bounds: Sequence[str]) -> list[Stored]:
        """Return the files that may have rows with keys within the bounds of the given statistics.

        Raises
        ------
        UnreadableFile
            When only deltalake can read or replace one of them.
        """
        with self.place.translating_errors(beside=(UnreadableFile,)):
            stored = _may_share_keys(self._actions, keys, bounds)
            if not all(_PLAIN_PATH.fullmatch(file.path) for file in stored):
                # The log may encode other paths differently.
                raise UnreadableFile
            if may_have_vectors(self.table):
                unknown = [file.path for file in stored if file.path not in self._adds]
                if unknown:
                    self._adds |= adds_in_log(self.place, self.table.version(), unknown)
                stored = [Stored(file.path, file.size, self._adds[file.path]) for file in stored]
        return stored

    @cached_property
    def _actions(self) -> pa.Table:
        return pa.table(self.table.get_add_actions(flatten=True))


def _may_share_keys(actions: pa.Table, keys: pa.Schema, bounds: Sequence[str]) -> list[Stored]:
    ordered = {
        key: (kind, *(_column(actions, f"{part}.{key}", kind) for part in ("min", "max")))
        for key, kind in zip(keys.names, keys.types, strict=True)
        if _is_ordered(kind)
    }
    near = pa.repeat(False, actions.num_rows)
    for statistics in bounds:
        apart = pa.repeat(False, actions.num_rows)
        found = json.loads(statistics, parse_int=str)
        for key, (kind, least, most) in ordered.items():
            low, high = (found.get(part, {}).get(key) for part in ("minValues", "maxValues"))
            if low is not None and high is not None:
                # Writers may truncate upper bounds, to milliseconds or 32 characters, so compare them with
                # lower bounds that are truncated in the same way.
                below = pc.less(most, pa.scalar(low).cast(kind))
                above = pc.greater(least, pa.scalar(high).cast(kind))
                apart = pc.or_(apart, pc.fill_null(pc.or_kleene(below, above), False))
        near = pc.or_(near, pc.invert(apart))
    chosen = actions.filter(near)
    sizes = zip(chosen["path"].to_pylist(), chosen["size_bytes"].to_pylist(), strict=True)
    return [Stored(path, size) for path, size in sizes]


def _is_ordered(kind: pa.DataType) -> bool:
    """Whether the bounds of a key type can be compared, whichever writer they come from."""
    return any(test(kind) for test in (pat.is_integer, pat.is_date, pat.is_string, pat.is_timestamp))


def _column(actions: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column of bounds, null for files without bounds."""
    if name not in actions.column_names:
        return pa.chunked_array([pa.nulls(actions.num_rows, kind)])
    return actions[name].cast(kind)
