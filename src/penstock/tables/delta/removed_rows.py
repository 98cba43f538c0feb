"""The rows that a commit removes from the data files of a Delta table, as it deletes or replaces them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from penstock.lake.deletion_vectors import Positions
from penstock.lake.parquet import FileSplit
from penstock.tables.changes.lookup_keys import LookupKeys
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.statistics import FileStatistics
from penstock.tables.delta.stored_files import FileIdentity, StoredFile, StoredFiles
from penstock.tables.delta.stored_rows import StoredRows

_KEY_RANGES = 16
"""The number of key ranges that the statistics of a table's files are compared with."""


@dataclass(frozen=True)
class FileRemovals:
    """The rows to remove from one file."""

    positions: Positions
    new_values: pa.Table | None = None
    """New values of some columns, if the rows are stored again with them; None if they are not."""


class RemovedRows(ABC):
    """Rows to remove from data files."""

    @abstractmethod
    def files(self, stored: StoredFiles) -> list[StoredFile]:
        """Return the files that may have such rows."""

    @abstractmethod
    def in_file(self, rows: StoredRows) -> FileRemovals:
        """Return the rows to remove from a file, except rows that are already deleted."""


class RemovedByKey(RemovedRows):
    """The rows with certain keys, which tasks look up."""

    keys: pa.Schema

    @property
    @abstractmethod
    def bounds(self) -> Sequence[str]:
        """Ranges of the keys, each as the JSON of file statistics."""

    @property
    @abstractmethod
    def lookup_keys(self) -> LookupKeys:
        """The keys."""

    def files(self, stored: StoredFiles) -> list[StoredFile]:
        return stored.overlapping(self.keys, self.bounds)

    def in_file(self, rows: StoredRows) -> FileRemovals:
        position_arrays = [
            positions for positions, _ in rows.with_keys(self.lookup_keys, self.keys, FileSplit())
        ]
        return FileRemovals(np.concatenate([np.empty(0, np.int64), *position_arrays]))


class RemovedByStagedKey(RemovedByKey):
    """The rows with a key of the micro-batch; tasks read the keys from the micro-batch's files."""

    def __init__(self, stage: DeltaStage, files: Sequence[DataFile]) -> None:
        self.stage, self.staged_files = stage, tuple(files)
        self.keys = pa.schema([stage.layout.schema.field(key) for key in stage.layout.keys])
        self._lookup_keys: LookupKeys | None = None

    @property
    def bounds(self) -> list[str]:
        return [file.statistics for file in self.staged_files]

    @property
    def lookup_keys(self) -> LookupKeys:
        if self._lookup_keys is None:
            self._lookup_keys = LookupKeys(self.stage.columns(self.staged_files, self.keys.names))
        return self._lookup_keys


class RemovedByGivenKey(RemovedByKey):
    """The rows with one of the keys in a table."""

    def __init__(self, table: pa.Table) -> None:
        self.keys, self._lookup_keys = table.schema, LookupKeys(table)

    @property
    def bounds(self) -> list[str]:
        return key_bounds(self._lookup_keys.keys)

    @property
    def lookup_keys(self) -> LookupKeys:
        return self._lookup_keys


@dataclass
class RemovedAtPositions(RemovedRows):
    """Rows whose positions have been looked up."""

    stored_files: Sequence[StoredFile] = field(repr=False)
    """The files that have such rows."""
    removals: Mapping[FileIdentity, FileRemovals] = field(repr=False)

    def files(self, stored: StoredFiles) -> list[StoredFile]:
        return list(self.stored_files)

    def in_file(self, rows: StoredRows) -> FileRemovals:
        return self.removals[rows.file.identity]


def key_bounds(keys: pa.Table) -> list[str]:
    """Return file statistics of keys, one for each range of the first column; none without keys."""
    if not keys.num_rows:
        return []
    ordered = keys.sort_by(keys.column_names[0]).combine_chunks()
    range_size = -(-keys.num_rows // _KEY_RANGES)
    statistics_of_ranges = []
    for batch in ordered.to_batches(max_chunksize=range_size):
        statistics = FileStatistics.of(keys.schema, keys.column_names)
        statistics.add(batch)
        statistics_of_ranges.append(statistics.to_json())
    return statistics_of_ranges
