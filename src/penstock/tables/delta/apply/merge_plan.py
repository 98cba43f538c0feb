"""Planning of a merge: what staged events change in a Delta table, computed with Arrow from their keys alone.

Each event is a line with the columns of its key, ``SEQUENCE`` and ``PRESENT``. The lines are sorted by key
and sequence, and each is compared with its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.apply.events import PRESENT, SEQUENCE

_NUMBER, _END, _STORED = "_penstock_number", "_penstock_end", 2


@dataclass(frozen=True)
class MergePlan:
    """What to merge, and what to record as applied."""

    taken: pa.BooleanArray
    """For each staged event, whether its row is merged."""
    recorded: pa.Table
    """The events to record as applied."""
    ends: pa.Array | None = None
    """With history: for each merged event, in order, the sequence of the next event of its key."""
    changed: pa.Table | None = None
    """With history: key, ``VALID_FROM`` and new ``VALID_TO`` of stored rows whose end changes."""

    @property
    def is_empty(self) -> bool:
        changed = 0 if self.changed is None else self.changed.num_rows
        return not (self.recorded.num_rows or changed or pc.any(self.taken).as_py())


def plan_latest(keys: Sequence[str], staged: pa.Table, known: pa.Table) -> MergePlan:
    """Plan type 1: a staged event counts when it sorts after the last known one of its key.

    Parameters
    ----------
    staged
        One event of each key.
    known
        At most one event of each of those keys.
    """
    order = [("descending", SEQUENCE), ("descending", PRESENT), ("ascending", _NUMBER)]
    lines = _sorted(keys, [numbered(staged, _NUMBER), _unnumbered(known)], order)
    first = lines.filter(_starts(lines, keys))
    won = first.filter(pc.greater_equal(first[_NUMBER], 0))
    return MergePlan(_chosen(won, staged.num_rows), won.drop_columns([_NUMBER]))


def plan_history(keys: Sequence[str], staged: pa.Table, ended: pa.Table, stored: pa.Table) -> MergePlan:
    """Plan type 2: each row is valid from its event to the next one of its key.

    Parameters
    ----------
    staged
        One event of each key and sequence.
    ended
        The known deletes of those keys.
    stored
        Key, ``VALID_FROM`` and ``VALID_TO`` of all stored rows that have those keys.
    """
    versions = stored.filter(pc.is_valid(stored[VALID_FROM])).rename_columns([*keys, SEQUENCE, _END])
    kind = pa.array(np.full(versions.num_rows, _STORED), pa.int32())
    order = [("ascending", SEQUENCE), ("descending", PRESENT), ("ascending", _NUMBER)]
    parts = [
        numbered(staged, _NUMBER),
        _unnumbered(ended),
        _unnumbered(versions.append_column(PRESENT, kind)),
    ]
    lines = _sorted(keys, parts, order)
    lines = lines.filter(_starts(lines, [*keys, SEQUENCE]))
    ends = _next(lines, keys)
    new = pc.greater_equal(lines[_NUMBER], 0)
    present = lines[PRESENT]
    moved = pc.and_(pc.equal(present, _STORED), _differ(lines[_END], ends))
    changed = lines.select([*keys, SEQUENCE]).append_column(VALID_TO, ends).filter(moved)
    added = pc.and_(new, pc.equal(present, 1))
    rows = pa.table({_NUMBER: lines[_NUMBER], VALID_TO: ends}).filter(added).sort_by(_NUMBER)
    deletes = lines.filter(pc.and_(new, pc.equal(present, 0)))
    return MergePlan(
        _chosen(rows, staged.num_rows),
        deletes.select([*keys, SEQUENCE, PRESENT]),
        rows[VALID_TO].combine_chunks(),
        changed.rename_columns([*keys, VALID_FROM, VALID_TO]),
    )


def numbered(rows: pa.Table, name: str) -> pa.Table:
    """Add the row numbers as a column."""
    return rows.append_column(name, pa.array(np.arange(rows.num_rows)))


def _unnumbered(known: pa.Table) -> pa.Table:
    return known.append_column(_NUMBER, pa.array(np.full(known.num_rows, -1)))


def _sorted(keys: Sequence[str], parts: Sequence[pa.Table], order: Sequence[tuple[str, str]]) -> pa.Table:
    lines = pa.concat_tables(parts, promote_options="default")
    by = [*((key, "ascending") for key in keys), *((name, way) for way, name in order)]
    return lines.sort_by(by).combine_chunks()


def _starts(lines: pa.Table, names: Sequence[str]) -> pa.BooleanArray:
    """Return for each line whether its values differ from the one before."""
    starts = np.zeros(lines.num_rows, dtype=bool)
    starts[:1] = True
    for name in names:
        column = lines[name]
        starts[1:] |= pc.not_equal(column.slice(1), column.slice(0, max(len(column) - 1, 0))).to_numpy()
    return pa.array(starts)


def _next(lines: pa.Table, keys: Sequence[str]) -> pa.ChunkedArray:
    """Return the sequence of the next line, null where that has another key."""
    sequence = lines[SEQUENCE]
    no_next = pa.nulls(min(1, lines.num_rows), sequence.type)
    following = pa.chunked_array([*sequence.slice(1).chunks, no_next], sequence.type)
    starts = _starts(lines, keys)
    is_last = pa.concat_arrays([starts.slice(1), pa.array([True] * min(1, lines.num_rows), pa.bool_())])
    return pc.if_else(is_last, pa.scalar(None, sequence.type), following)


def _differ(old: pa.ChunkedArray, new: pa.ChunkedArray) -> pa.ChunkedArray:
    values = pc.fill_null(pc.not_equal(old, new), False)
    return pc.or_(values, pc.not_equal(pc.is_null(old), pc.is_null(new)))


def _chosen(lines: pa.Table, count: int) -> pa.BooleanArray:
    chosen = np.zeros(count, dtype=bool)
    chosen[lines[_NUMBER].to_numpy()] = True
    return pa.array(chosen)
