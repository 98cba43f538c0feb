"""Which rows leave the data files of a Delta table: those with some keys, or that get another value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.tables.changes.merge_plan import numbered
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.statistics import FileStatistics
from penstock.tables.delta.stored_files import have_key

_ROW, _OTHER = "_penstock_row", "_penstock_other"


class LeavingRows(ABC):
    """Rows of stored files that leave them."""

    schema: pa.Schema
    """The columns that say which rows leave; the keys are the first ones."""
    keys: pa.Schema

    @property
    @abstractmethod
    def bounds(self) -> Sequence[str]:
        """Statistics of the keys of these rows."""

    @abstractmethod
    def chosen(self, stored: pa.Table) -> NDArray[np.bool_]:
        """Return for each row of a file whether it leaves, by the columns of the schema."""

    def new_values(self, rows: pa.Table) -> pa.Table | None:
        """Return the columns with which rows that leave are stored again; None if they are not.

        The rows have the columns of the schema.
        """
        return None


class StagedKeys(LeavingRows):
    """The rows with a key of the micro-batch; tasks read its keys in its files."""

    def __init__(self, stage: DeltaStage, files: Sequence[DataFile]) -> None:
        self.stage, self.files = stage, tuple(files)
        self.schema = self.keys = pa.schema([stage.layout.schema.field(key) for key in stage.layout.keys])
        self._read: pa.Table | None = None

    @property
    def bounds(self) -> list[str]:
        return [file.statistics for file in self.files]

    def chosen(self, stored: pa.Table) -> NDArray[np.bool_]:
        if self._read is None:
            self._read = self.stage.columns(self.files, self.keys.names)
        return have_key(stored, self._read)


@dataclass
class GivenKeys(LeavingRows):
    """The rows with some keys."""

    table: pa.Table = field(repr=False)

    def __post_init__(self) -> None:
        self.schema = self.keys = self.table.schema

    @property
    def bounds(self) -> list[str]:
        return bounds_of(self.table)

    def chosen(self, stored: pa.Table) -> NDArray[np.bool_]:
        return have_key(stored, self.table)


@dataclass
class NewEnds(LeavingRows):
    """Versions of rows that get another end: they are stored again with it."""

    table: pa.Table = field(repr=False)
    """Their keys, ``VALID_FROM``, and the new ``VALID_TO``."""

    def __post_init__(self) -> None:
        self.schema = pa.schema([column for column in self.table.schema if column.name != VALID_TO])
        self.keys = pa.schema([column for column in self.schema if column.name != VALID_FROM])

    @property
    def bounds(self) -> list[str]:
        return bounds_of(self.table.select(self.keys.names))

    def chosen(self, stored: pa.Table) -> NDArray[np.bool_]:
        return have_key(stored, self.table.select(self.schema.names))

    def new_values(self, rows: pa.Table) -> pa.Table:
        names = self.schema.names
        left, right = numbered(rows, _ROW), numbered(self.table.select(names), _OTHER)
        both = left.join(right, keys=names, join_type="inner").sort_by(_ROW)
        return self.table.select([VALID_TO]).take(both[_OTHER])


def bounds_of(keys: pa.Table) -> list[str]:
    """Return the statistics of some keys; none if there are none."""
    if not keys.num_rows:
        return []
    statistics = FileStatistics.of(keys.schema, keys.column_names)
    for batch in keys.combine_chunks().to_batches():
        statistics.add(batch)
    return [statistics.to_json()]
