"""The data files of a Delta table, pruned by statistics to those that may have certain keys."""

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
from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.log_files import Actions, adds_in_log
from penstock.tables.delta.vectors import may_have_vectors, vector_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.=-]+")
FileIdentity = tuple[str, DeletionVector | None]


@dataclass(frozen=True)
class StoredFile:
    """A data file of the table."""

    path: str
    size: int
    add: dict[str, Any] | None = None
    """The file's add action, if the table's files may have deletion vectors."""

    @property
    def vector(self) -> DeletionVector | None:
        return None if self.add is None else vector_of(self.add)

    @property
    def identity(self) -> FileIdentity:
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
    """The data files of a loaded table, for one attempt to commit.

    Each attempt reads the log again, since a table that another process has recreated has other commits.
    """

    location: DeltaLocation
    table: DeltaTable = field(repr=False)
    _adds: Actions = field(default_factory=dict, repr=False)

    def overlapping(self, keys: pa.Schema, bounds: Sequence[str]) -> list[StoredFile]:
        """Return the files that may have rows with keys within the bounds of the given statistics.

        Raises
        ------
        UnreadableFile
            When only deltalake can read or replace one of them.
        """
        with self.location.translating_errors(untranslated=(UnreadableFile,)):
            stored = _files_overlapping(self._actions, keys, bounds)
            if not all(_PLAIN_PATH.fullmatch(file.path) for file in stored):
                # The log may encode other paths differently.
                raise UnreadableFile
            if may_have_vectors(self.table):
                without_add = [file.path for file in stored if file.path not in self._adds]
                if without_add:
                    self._adds |= adds_in_log(self.location, self.table.version(), without_add)
                stored = [StoredFile(file.path, file.size, self._adds[file.path]) for file in stored]
        return stored

    @cached_property
    def _actions(self) -> pa.Table:
        return pa.table(self.table.get_add_actions(flatten=True))


def _files_overlapping(actions: pa.Table, keys: pa.Schema, bounds: Sequence[str]) -> list[StoredFile]:
    column_bounds = {
        key: (kind, *(_bounds_column(actions, f"{part}.{key}", kind) for part in ("min", "max")))
        for key, kind in zip(keys.names, keys.types, strict=True)
        if _has_comparable_bounds(kind)
    }
    overlaps = pa.repeat(False, actions.num_rows)
    for statistics in bounds:
        disjoint = pa.repeat(False, actions.num_rows)
        statistics_json = json.loads(statistics, parse_int=str)
        for key, (kind, minimums, maximums) in column_bounds.items():
            low, high = (statistics_json.get(part, {}).get(key) for part in ("minValues", "maxValues"))
            if low is not None and high is not None:
                # Writers may truncate upper bounds, to milliseconds or 32 characters, so compare them with
                # lower bounds that are truncated in the same way.
                below = pc.less(maximums, pa.scalar(low).cast(kind))
                above = pc.greater(minimums, pa.scalar(high).cast(kind))
                disjoint = pc.or_(disjoint, pc.fill_null(pc.or_kleene(below, above), False))
        overlaps = pc.or_(overlaps, pc.invert(disjoint))
    selected = actions.filter(overlaps)
    sizes = zip(selected["path"].to_pylist(), selected["size_bytes"].to_pylist(), strict=True)
    return [StoredFile(path, size) for path, size in sizes]


def _has_comparable_bounds(kind: pa.DataType) -> bool:
    """Whether bounds of a key type can be compared, whichever writer wrote them."""
    return any(test(kind) for test in (pat.is_integer, pat.is_date, pat.is_string, pat.is_timestamp))


def _bounds_column(actions: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column of bounds, null for files without bounds."""
    if name not in actions.column_names:
        return pa.chunked_array([pa.nulls(actions.num_rows, kind)])
    return actions[name].cast(kind)
