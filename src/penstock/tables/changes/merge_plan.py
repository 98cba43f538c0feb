"""Plan of a merge: the changes that staged events make to a table, computed with Arrow from the keys only.
Values that events leave out are filled from the stored rows that the events updated.

Each event is a line with the columns of its key, ``SEQUENCE`` and ``PRESENT``. The lines are sorted by key
and sequence, and each is compared with its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.tables.changes.events import PRESENT, SEQUENCE, UNKNOWN, EventLayout
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.unchanged_values import column_numbers

_NUMBER, _END, _STORED = "_penstock_number", "_penstock_end", 2
_ROW, _STORED_ROW = "_penstock_row", "_penstock_stored_row"


@dataclass(frozen=True)
class MergePlan:
    """The events to merge, and the events to record as applied."""

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


def plan_events(
    events: EventLayout, staged: pa.Table, known: pa.Table, versions: Callable[[], pa.Table]
) -> tuple[MergePlan, pa.Table]:
    """Return the merge plan, and the staged events that leave out values which no stored row has.

    ``staged`` has the columns for planning, ``known`` the recorded events of the same keys. ``versions``
    reads the stored versions of these keys, and is only called with history.
    """
    keys = list(events.keys)
    placed = staged.select([*keys, SEQUENCE, PRESENT])
    if events.history:
        stored = versions()
        plan, unmatched = plan_history(keys, placed, known, stored), without_version
    else:
        stored = known.filter(pc.equal(known[PRESENT], 1))
        plan, unmatched = plan_latest(keys, placed, known), without_row
    if events.unchanged is None:
        return plan, staged.schema.empty_table()
    return plan, unmatched(keys, incomplete(staged, plan.taken), stored)


def plan_latest(keys: Sequence[str], staged: pa.Table, known: pa.Table) -> MergePlan:
    """Plan SCD type 1: the staged event of a key is applied if it sorts after the last known one."""
    order = [("descending", SEQUENCE), ("descending", PRESENT), ("ascending", _NUMBER)]
    lines = _sorted(keys, [numbered(staged, _NUMBER), _unnumbered(known)], order)
    first = lines.filter(_starts(lines, keys))
    won = first.filter(pc.greater_equal(first[_NUMBER], 0))
    return MergePlan(_chosen(won, staged.num_rows), won.drop_columns([_NUMBER]))


def plan_history(keys: Sequence[str], staged: pa.Table, ended: pa.Table, stored: pa.Table) -> MergePlan:
    """Plan SCD type 2: each row is valid from its event to the next event of its key.

    There is one staged event for each key and sequence. ``ended`` has the known deletes of those keys, and
    ``stored`` has the key, ``VALID_FROM`` and ``VALID_TO`` of all stored rows with those keys.
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


def distinct_events(events: EventLayout, lines: pa.Table) -> pa.Table:
    """Return recorded events, sorted by key, without redundant ones.

    For SCD type 1 that leaves the last event of each key, for type 2 one delete for each key and sequence.
    """
    keys = list(events.keys)
    order = [(SEQUENCE, "descending"), (PRESENT, "descending")]
    ordered = lines.sort_by([*((key, "ascending") for key in keys), *order]).combine_chunks()
    return ordered.filter(_starts(ordered, [*keys, SEQUENCE] if events.history else keys))


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
    """Return the sequence of the next line, or null if the next line has another key."""
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


def incomplete(staged: pa.Table, taken: pa.BooleanArray) -> pa.Table:
    """Return the taken events that leave values out."""
    return staged.filter(pc.and_(taken, pc.is_valid(staged[UNKNOWN])))


def _matched(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Join events with the stored rows that they updated; return the row numbers of both."""
    names = [name for name in (VALID_FROM, VALID_TO) if name in stored.column_names]
    left = numbered(events.select([*keys, SEQUENCE]), _ROW)
    right = numbered(stored.select([*keys, *names]), _STORED_ROW)
    both = left.join(right, keys=list(keys), join_type="inner")
    if names:
        begun = pc.less(both[VALID_FROM], both[SEQUENCE])
        not_ended = pc.fill_null(pc.less(both[SEQUENCE], both[VALID_TO]), True)
        both = both.filter(pc.and_(begun, not_ended))
    return both.select([_ROW, _STORED_ROW])


def without_row(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the events whose key no stored row has."""
    unmatched = numbered(events.select(keys), _ROW).join(
        stored.select(keys), keys=list(keys), join_type="left anti"
    )
    return events.take(unmatched[_ROW])


def without_version(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the events that updated no stored version."""
    matched = _matched(keys, events, stored)[_ROW]
    return events.filter(pc.invert(pc.is_in(np.arange(events.num_rows), matched.combine_chunks())))


def fill(rows: pa.Table, keys: Sequence[str], read: Callable[[pa.Table, list[str]], pa.Table]) -> pa.Table:
    """Fill the values that events leave out from the stored rows that they updated.

    ``read`` takes keys and column names, and returns the rows with these keys: the keys, the named columns,
    and with history ``VALID_FROM`` and ``VALID_TO``.
    """
    unknown = rows[UNKNOWN]
    places = np.flatnonzero(pc.is_valid(unknown).to_numpy())
    if not len(places):
        return rows
    numbers = column_numbers(pc.unique(unknown).drop_null().to_pylist())
    events = rows.take(places)
    stored = read(events.select(keys), [rows.column_names[n] for n in numbers])
    matched = _matched(keys, events, stored)
    source = np.arange(rows.num_rows)
    source[places[matched[_ROW].to_numpy()]] = rows.num_rows + matched[_STORED_ROW].to_numpy()
    for number in numbers:
        name = rows.column_names[number]
        left_out = pc.fill_null(pc.match_substring(unknown, f",{number},"), False).to_numpy()
        both = pa.chunked_array(
            [*rows[name].chunks, *stored[name].cast(rows[name].type).chunks], rows[name].type
        )
        taken = both.take(np.where(left_out, source, np.arange(rows.num_rows)))
        rows = rows.set_column(number, rows.schema.field(number), taken)
    return rows
