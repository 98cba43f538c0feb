"""Change rows as input of the passes: the row, commit and content of each change as integer codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.feeds.contract import IS_INSERT, IS_POSTIMAGE, TYPES
from penstock.spark.factorize import Codes, combine_codes, cumcount, factorize, order_codes

Item = TypeVar("Item", bound=np.generic)
Mask: TypeAlias = NDArray[np.bool_]
Numbers: TypeAlias = NDArray[np.integer]
Path: TypeAlias = tuple[int, ...]
EVENT_TIME = "__penstock_event_time"
"""Helper column: the commit time of rows that wait in the state store."""


@dataclass(frozen=True)
class Groups:
    """A partition of rows into groups, some of which may be empty."""

    of: Numbers
    """The number of each row's group: 0, 1, 2, …"""
    count: int

    @classmethod
    def by(cls, codes: Codes) -> Groups:
        """Return the groups of rows with equal codes."""
        dense = codes.dense()
        return cls(dense.values, dense.size)

    def places(self, rows: Mask) -> Numbers:
        """Return for each group the index of its row in a mask; undefined unless it has exactly one."""
        places = np.zeros(self.count, np.int64)
        chosen = np.flatnonzero(rows)
        places[self.of[chosen]] = chosen
        return places

    def filter(self, keep: Mask) -> Groups:
        """Return the groups of the rows in a mask, with the same numbers."""
        return Groups(self.of[keep], self.count)

    def counts(self, rows: Mask) -> Numbers:
        """Count the rows in a mask for each group."""
        return np.bincount(self.of[rows], minlength=self.count)

    def per_row(self, groups: NDArray[Item]) -> NDArray[Item]:
        """Return the value of its group for each row, from an array of one value per group."""
        return groups[self.of]

    def cumcount(self, rows: Numbers) -> Numbers:
        """Return for each row of a list of indexes how many rows before it are in the same group."""
        counts: Numbers = cumcount(self.of[rows])
        return counts


@dataclass(frozen=True)
class Layout:
    """The positions of a contract's columns; a path has the positions of nested columns."""

    change_type: int
    version: int
    timestamp: int
    row_id: tuple[Path, ...]
    data: tuple[Path, ...]
    """All data columns."""
    row_version: Path | None = None
    sequence: Path | None = None
    nullable_row_id: bool = False
    unchanged: Path | None = None
    """The column with the names of columns with unchanged TOAST values."""
    keyless: bool = False
    """Whether rows with equal ids are equal, and a table may hold duplicates."""
    repeats: bool = False
    """Whether the feed may deliver a change again."""

    @property
    def content(self) -> tuple[Path, ...]:
        """The columns that are equal in a carry-over pair: the row version, or else all data.

        If a commit may change a row several times, the row version does not distinguish these changes.
        """
        return self.data if self.row_version is None or self.sequence is not None else (self.row_version,)


class ChangeRows:
    """A table of change rows, with attributes of one number per row, computed on first use.

    Parameters
    ----------
    known
        Attributes that have already been computed.
    """

    def __init__(self, table: pa.Table, layout: Layout, known: Mapping[str, object] | None = None) -> None:
        self.table = table
        self.layout = layout
        self.__dict__.update(known or {})

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def columns(self, paths: Sequence[Path]) -> list[pa.Array]:
        return [column_at(self.table, path) for path in paths]

    @cached_property
    def kinds(self) -> Numbers:
        """Indexes in TYPES; -1 for an unknown or missing change type."""
        known = pa.array(TYPES, self.table.schema.field(self.layout.change_type).type)
        places = pc.index_in(column_at(self.table, (self.layout.change_type,)), value_set=known)
        kinds: Numbers = places.fill_null(-1).to_numpy().astype(np.int8)
        return kinds

    @cached_property
    def row(self) -> Codes:
        """The row of the table that was changed."""
        return factorize(self.columns(self.layout.row_id))

    @cached_property
    def change(self) -> Codes:
        """The row and the commit."""
        return combine_codes(self.row, factorize(self.columns([(self.layout.version,)])))

    @cached_property
    def changes(self) -> Groups:
        """The groups of changes by row and commit."""
        return Groups.by(self.change)

    @cached_property
    def content(self) -> Codes:
        """The row, the commit and the content."""
        return combine_codes(self.change, factorize(self.columns(self.layout.content)))

    @cached_property
    def order(self) -> list[Numbers | Mask]:
        """The sort keys of the changes of one row, the least significant first, as for numpy.lexsort."""
        paths = [path for path in (self.layout.sequence, (self.layout.version,)) if path is not None]
        after = np.isin(self.kinds, (IS_INSERT, IS_POSTIMAGE))
        return [after, *(order_codes(column_at(self.table, path)) for path in paths)]

    def in_groups(self, group: Codes) -> tuple[Numbers, Mask]:
        """Return the row indexes sorted by group and order, and the mask of those that begin a group."""
        order = np.lexsort([*self.order, group.values])
        sorted_groups = group.values[order]
        return order, np.r_[True, sorted_groups[1:] != sorted_groups[:-1]][: len(order)]

    def filter(self, keep: Mask) -> ChangeRows:
        """Return the rows in a mask, with the attributes that have already been computed."""
        if keep.all():
            return self
        known: dict[str, object] = {"kinds": self.kinds[keep]}
        for name in ("row", "change"):
            if name in self.__dict__:
                codes: Codes = self.__dict__[name]
                known[name] = Codes(codes.values[keep], codes.size)
        if "changes" in self.__dict__:
            known["changes"] = self.changes.filter(keep)
        return ChangeRows(self.table.filter(pa.array(keep)), self.layout, known)

    def with_table(self, table: pa.Table, **known: object) -> ChangeRows:
        """Return the same changes with another table of data."""
        names = ("row", "change", "changes", "kinds")
        computed: dict[str, object] = {name: self.__dict__[name] for name in names if name in self.__dict__}
        return ChangeRows(table, self.layout, {**computed, **known})

    def with_kinds(self, kinds: Numbers) -> ChangeRows:
        """Return the same rows with other change types."""
        place, field = self.layout.change_type, self.table.schema.field(self.layout.change_type)
        names = pa.array(TYPES, field.type).take(pa.array(kinds))
        return self.with_table(self.table.set_column(place, field, names), kinds=kinds)


def column_at(table: pa.Table, path: Path) -> pa.Array:
    """Return the values at a path as one array; a null struct has null fields."""
    column = _combined(table.column(path[0]))
    for place in path[1:]:
        column = column.flatten()[place]
    return column


def _combined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    except pa.ArrowInvalid:
        # More text than 32-bit offsets can address.
        large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}[column.type]
        return pa.concat_arrays(column.cast(large).chunks)
