"""The rows of a stored data file, as tasks read them, identified by position since files never change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.lake.deletion_vectors import CorruptDeletionVector, Positions
from penstock.lake.parquet import FileSplit, align_to_schema, cast_to_schema, open_parquet, read_row_groups
from penstock.lake.storage import DeltaPlace
from penstock.tables.changes.wanted_keys import WantedKeys
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.stored_files import Stored


@dataclass
class StoredRows:
    """The rows of a file; columns that the file lacks are null."""

    place: DeltaPlace = field(repr=False)
    file: Stored

    @property
    def count(self) -> int:
        """The number of rows in the file, including deleted ones."""
        return int(self._metadata.num_rows)

    @cached_property
    def deleted(self) -> Positions:
        """The positions of deleted rows."""
        if self.file.vector is None:
            return np.empty(0, np.int64)
        try:
            found = self.file.vector.positions(self.place.files())
        except CorruptDeletionVector:
            raise UnreadableFile from None
        if len(found) and found[-1] >= self.count:
            raise UnreadableFile
        return found

    def with_keys(
        self, wanted: WantedKeys, schema: pa.Schema, split: FileSplit
    ) -> Iterator[tuple[Positions, pa.RecordBatch]]:
        """Yield the live rows of a piece that have a wanted key, and their positions.

        ``schema`` has the columns to read, with the keys first.
        """
        for group in split.row_groups(self._metadata):
            if not wanted.any_between(*self._bounds(group, schema.names[0])):
                continue
            for places, rows in wanted.rows_in(self._batches(group, schema)):
                positions = self._starts[group] + places
                live = ~self._is_deleted(positions)
                if live.any():
                    yield positions[live], rows.filter(pa.array(live))

    def at(self, positions: Positions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows at the given positions, which are sorted, with the columns of ``schema``."""
        ends = np.searchsorted(positions, self._starts)
        for group in np.flatnonzero(np.diff(ends)).tolist():
            at, wanted = self._starts[group], positions[ends[group] : ends[group + 1]]
            for batch in self._batches(group, schema):
                low, high = np.searchsorted(wanted, (at, at + batch.num_rows))
                if low < high:
                    yield batch.take(pa.array(wanted[low:high] - at))
                at += batch.num_rows

    def _is_deleted(self, positions: Positions) -> NDArray[np.bool_]:
        found, end = (np.searchsorted(self.deleted, positions, side) for side in ("left", "right"))
        return found < end

    def _batches(self, group: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self.place.files().open_input_file(self.file.path) as source:
            for batch in read_row_groups(open_parquet(source, self._metadata), [group], schema.names):
                yield align_to_schema(cast_to_schema(batch, schema, UnreadableFile), schema)

    def _bounds(self, group: int, name: str) -> tuple[object, object]:
        """Return the smallest and largest value of a column in a row group; None for unknown ones."""
        columns = map(self._metadata.row_group(group).column, range(self._metadata.num_columns))
        for column in columns:
            if column.path_in_schema == name and column.is_stats_set and column.statistics.has_min_max:
                return column.statistics.min, column.statistics.max
        return None, None

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        with self.place.files().open_input_file(self.file.path) as source:
            return pq.read_metadata(source)

    @cached_property
    def _starts(self) -> Positions:
        """The position of each row group's first row, and finally the number of rows."""
        groups = (self._metadata.row_group(number) for number in range(self._metadata.num_row_groups))
        return np.cumsum([0, *(group.num_rows for group in groups)])
