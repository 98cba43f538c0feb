"""The rows to remove from the data files of a Delta table: deleted, replaced or updated ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from penstock.lake.deletion_vectors import Positions
from penstock.lake.parquet import FileSplit
from penstock.tables.changes.wanted_keys import WantedKeys
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.statistics import FileStatistics
from penstock.tables.delta.stored_files import Identity, Stored, StoredFiles
from penstock.tables.delta.stored_rows import StoredRows

_RANGES = 16
"""The number of key ranges with which a table's files are compared."""


@dataclass(frozen=True)
class Leaving:
    """The rows to remove from one file."""

    positions: Positions
    values: pa.Table | None = None
    """New values of some columns, with which the same rows are stored again; None if they are not."""


class LeavingRows(ABC):
    """Rows to remove from stored files."""

    @abstractmethod
    def files(self, stored: StoredFiles) -> list[Stored]:
        """Return the files that may have such rows."""

    @abstractmethod
    def of(self, rows: StoredRows) -> Leaving:
        """Return the live rows to remove from a file."""


class RowsOfKeys(LeavingRows):
    """The rows with certain keys, which tasks look for."""

    keys: pa.Schema

    @property
    @abstractmethod
    def bounds(self) -> Sequence[str]:
        """The minimum and maximum of the keys, as file statistics."""

    @property
    @abstractmethod
    def wanted(self) -> WantedKeys:
        """The keys."""

    def files(self, stored: StoredFiles) -> list[Stored]:
        return stored.near(self.keys, self.bounds)

    def of(self, rows: StoredRows) -> Leaving:
        found = [positions for positions, _ in rows.with_keys(self.wanted, self.keys, FileSplit())]
        return Leaving(np.concatenate([np.empty(0, np.int64), *found]))


class StagedKeys(RowsOfKeys):
    """The rows with a key of the micro-batch; tasks read the keys from the micro-batch's files."""

    def __init__(self, stage: DeltaStage, files: Sequence[DataFile]) -> None:
        self.stage, self.staged = stage, tuple(files)
        self.keys = pa.schema([stage.layout.schema.field(key) for key in stage.layout.keys])
        self._wanted: WantedKeys | None = None

    @property
    def bounds(self) -> list[str]:
        return [file.statistics for file in self.staged]

    @property
    def wanted(self) -> WantedKeys:
        if self._wanted is None:
            self._wanted = WantedKeys(self.stage.columns(self.staged, self.keys.names))
        return self._wanted


class GivenKeys(RowsOfKeys):
    """The rows with one of the keys in a table."""

    def __init__(self, table: pa.Table) -> None:
        self.keys, self._wanted = table.schema, WantedKeys(table)

    @property
    def bounds(self) -> list[str]:
        return bounds_of(self._wanted.keys)

    @property
    def wanted(self) -> WantedKeys:
        return self._wanted


@dataclass
class KnownRows(LeavingRows):
    """Rows whose positions are known."""

    stored: Sequence[Stored] = field(repr=False)
    """The files that have such rows."""
    rows: Mapping[Identity, Leaving] = field(repr=False)

    def files(self, stored: StoredFiles) -> list[Stored]:
        return list(self.stored)

    def of(self, rows: StoredRows) -> Leaving:
        return self.rows[rows.file.identity]


def bounds_of(keys: pa.Table) -> list[str]:
    """Return statistics of keys, one for each range of the first column; an empty list without keys."""
    if not keys.num_rows:
        return []
    ordered = keys.sort_by(keys.column_names[0]).combine_chunks()
    size = -(-keys.num_rows // _RANGES)
    found = []
    for batch in ordered.to_batches(max_chunksize=size):
        statistics = FileStatistics.of(keys.schema, keys.column_names)
        statistics.add(batch)
        found.append(statistics.to_json())
    return found
