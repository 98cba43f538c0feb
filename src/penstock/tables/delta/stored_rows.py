"""Reader for the rows of a Delta table's data file, which are identified by position in the file."""

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
from penstock.lake.storage import DeltaLocation
from penstock.tables.changes.lookup_keys import LookupKeys
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.stored_files import StoredFile


@dataclass
class StoredRows:
    """The rows of a data file; columns that the file lacks are null."""

    location: DeltaLocation = field(repr=False)
    file: StoredFile

    @property
    def row_count(self) -> int:
        """The number of rows in the file, including deleted ones."""
        return int(self._metadata.num_rows)

    @cached_property
    def deleted(self) -> Positions:
        """The positions of deleted rows."""
        if self.file.vector is None:
            return np.empty(0, np.int64)
        try:
            deleted = self.file.vector.positions(self.location.files())
        except CorruptDeletionVector:
            raise UnreadableFile from None
        if len(deleted) and deleted[-1] >= self.row_count:
            raise UnreadableFile
        return deleted

    def with_keys(
        self, lookup_keys: LookupKeys, schema: pa.Schema, split: FileSplit
    ) -> Iterator[tuple[Positions, pa.RecordBatch]]:
        """Yield the live rows of a split that have one of the keys, and their positions.

        ``schema`` has the columns to read, with the keys first.
        """
        for group in split.row_groups(self._metadata):
            if not lookup_keys.any_between(*self._bounds(group, schema.names[0])):
                continue
            for matches, rows in lookup_keys.rows_in(self._batches(group, schema)):
                positions = self._group_starts[group] + matches
                live = ~self._is_deleted(positions)
                if live.any():
                    yield positions[live], rows.filter(pa.array(live))

    def at_positions(self, positions: Positions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows at the given positions, which are sorted, with the columns of ``schema``."""
        ends = np.searchsorted(positions, self._group_starts)
        for group in np.flatnonzero(np.diff(ends)).tolist():
            offset, group_positions = self._group_starts[group], positions[ends[group] : ends[group + 1]]
            for batch in self._batches(group, schema):
                start, stop = np.searchsorted(group_positions, (offset, offset + batch.num_rows))
                if start < stop:
                    yield batch.take(pa.array(group_positions[start:stop] - offset))
                offset += batch.num_rows

    def _is_deleted(self, positions: Positions) -> NDArray[np.bool_]:
        first, last = (np.searchsorted(self.deleted, positions, side) for side in ("left", "right"))
        return first < last

    def _batches(self, group: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self.location.files().open_input_file(self.file.path) as source:
            for batch in read_row_groups(open_parquet(source, self._metadata), [group], schema.names):
                yield align_to_schema(cast_to_schema(batch, schema, UnreadableFile), schema)

    def _bounds(self, group: int, name: str) -> tuple[object, object]:
        """Return the minimum and maximum of a column in a row group; None if unknown."""
        columns = map(self._metadata.row_group(group).column, range(self._metadata.num_columns))
        for column in columns:
            if column.path_in_schema == name and column.is_stats_set and column.statistics.has_min_max:
                return column.statistics.min, column.statistics.max
        return None, None

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        with self.location.files().open_input_file(self.file.path) as source:
            return pq.read_metadata(source)

    @cached_property
    def _group_starts(self) -> Positions:
        """The position of each row group's first row, and finally the number of rows."""
        groups = (self._metadata.row_group(number) for number in range(self._metadata.num_row_groups))
        return np.cumsum([0, *(group.num_rows for group in groups)])
