"""Merge plan: the changes that staged events make to a table, computed with Arrow from the keys only. Values
that events omit are filled from the stored rows that the events update.

Events are rows with the key columns, ``SEQUENCE`` and ``PRESENT``. They are sorted by key and sequence, and
each is compared with its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.tables.changes.events import MISSING_COLUMNS, PRESENT, SEQUENCE, EventLayout
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.unchanged_values import column_numbers

_STAGED_NUMBER, _VALID_TO, _STORED = "_penstock_number", "_penstock_end", 2
_ROW, _STORED_ROW = "_penstock_row", "_penstock_stored_row"


@dataclass(frozen=True)
class MergePlan:
    """The events to merge into the table, and the events to record as applied."""

    merged: pa.BooleanArray
    """For each staged event, whether its row is merged."""
    recorded: pa.Table
    """The events to record as applied."""
    valid_to: pa.Array | None = None
    """With history: the ``VALID_TO`` of each merged event, in order: the sequence of the key's next event."""
    ended_versions: pa.Table | None = None
    """With history: key, ``VALID_FROM`` and new ``VALID_TO`` of stored row versions whose end changes."""

    @property
    def is_empty(self) -> bool:
        ended = 0 if self.ended_versions is None else self.ended_versions.num_rows
        return not (self.recorded.num_rows or ended or pc.any(self.merged).as_py())


def plan_events(
    events: EventLayout, staged: pa.Table, recorded: pa.Table, read_versions: Callable[[], pa.Table]
) -> tuple[MergePlan, pa.Table]:
    """Return the merge plan, and the staged events that omit values which no stored row has.

    ``staged`` has the planning columns of the staged events, and ``recorded`` the applied events of the same
    keys. ``read_versions`` reads the stored row versions of these keys; it is only called with history.
    """
    keys = list(events.keys)
    keys_and_order = staged.select([*keys, SEQUENCE, PRESENT])
    if events.keeps_history:
        stored = read_versions()
        plan, find_unmatched = plan_history(keys, keys_and_order, recorded, stored), without_stored_version
    else:
        stored = recorded.filter(pc.equal(recorded[PRESENT], 1))
        plan, find_unmatched = plan_latest(keys, keys_and_order, recorded), without_stored_row
    if events.unchanged is None:
        return plan, staged.schema.empty_table()
    return plan, find_unmatched(keys, with_missing_values(staged, plan.merged), stored)


def plan_latest(keys: Sequence[str], staged: pa.Table, recorded: pa.Table) -> MergePlan:
    """Plan SCD type 1: the staged event of a key is applied if it sorts after the last recorded event."""
    order = [("descending", SEQUENCE), ("descending", PRESENT), ("ascending", _STAGED_NUMBER)]
    candidates = _sort_events(
        keys, [with_row_numbers(staged, _STAGED_NUMBER), _without_numbers(recorded)], order
    )
    last_events = candidates.filter(_starts_group(candidates, keys))
    applied = last_events.filter(pc.greater_equal(last_events[_STAGED_NUMBER], 0))
    return MergePlan(_mask_of(applied, staged.num_rows), applied.drop_columns([_STAGED_NUMBER]))


def plan_history(
    keys: Sequence[str], staged: pa.Table, known_deletes: pa.Table, stored: pa.Table
) -> MergePlan:
    """Plan SCD type 2: each row is valid from its event to the next event of its key.

    There is one staged event for each key and sequence. ``known_deletes`` has the recorded deletes of those
    keys, and ``stored`` has the key, ``VALID_FROM`` and ``VALID_TO`` of all stored rows with those keys.
    """
    versions = stored.filter(pc.is_valid(stored[VALID_FROM])).rename_columns([*keys, SEQUENCE, _VALID_TO])
    stored_marker = pa.array(np.full(versions.num_rows, _STORED), pa.int32())
    order = [("ascending", SEQUENCE), ("descending", PRESENT), ("ascending", _STAGED_NUMBER)]
    sources = [
        with_row_numbers(staged, _STAGED_NUMBER),
        _without_numbers(known_deletes),
        _without_numbers(versions.append_column(PRESENT, stored_marker)),
    ]
    timeline = _sort_events(keys, sources, order)
    timeline = timeline.filter(_starts_group(timeline, [*keys, SEQUENCE]))
    next_sequence = _next_sequences(timeline, keys)
    is_staged = pc.greater_equal(timeline[_STAGED_NUMBER], 0)
    present = timeline[PRESENT]
    is_ended_earlier = pc.and_(pc.equal(present, _STORED), _differ(timeline[_VALID_TO], next_sequence))
    ended = timeline.select([*keys, SEQUENCE]).append_column(VALID_TO, next_sequence).filter(is_ended_earlier)
    is_new_version = pc.and_(is_staged, pc.equal(present, 1))
    new_versions = (
        pa.table({_STAGED_NUMBER: timeline[_STAGED_NUMBER], VALID_TO: next_sequence})
        .filter(is_new_version)
        .sort_by(_STAGED_NUMBER)
    )
    deletes = timeline.filter(pc.and_(is_staged, pc.equal(present, 0)))
    return MergePlan(
        _mask_of(new_versions, staged.num_rows),
        deletes.select([*keys, SEQUENCE, PRESENT]),
        new_versions[VALID_TO].combine_chunks(),
        ended.rename_columns([*keys, VALID_FROM, VALID_TO]),
    )


def distinct_events(events: EventLayout, recorded: pa.Table) -> pa.Table:
    """Return recorded events sorted by key, without redundant ones.

    For SCD type 1, only the last event of each key is kept; for type 2, one delete for each key and sequence.
    """
    keys = list(events.keys)
    order = [(SEQUENCE, "descending"), (PRESENT, "descending")]
    ordered = recorded.sort_by([*((key, "ascending") for key in keys), *order]).combine_chunks()
    return ordered.filter(_starts_group(ordered, [*keys, SEQUENCE] if events.keeps_history else keys))


def with_row_numbers(rows: pa.Table, name: str) -> pa.Table:
    """Add the row numbers as a column."""
    return rows.append_column(name, pa.array(np.arange(rows.num_rows)))


def _without_numbers(rows: pa.Table) -> pa.Table:
    return rows.append_column(_STAGED_NUMBER, pa.array(np.full(rows.num_rows, -1)))


def _sort_events(
    keys: Sequence[str], parts: Sequence[pa.Table], order: Sequence[tuple[str, str]]
) -> pa.Table:
    combined = pa.concat_tables(parts, promote_options="default")
    sort_keys = [*((key, "ascending") for key in keys), *((name, direction) for direction, name in order)]
    return combined.sort_by(sort_keys).combine_chunks()


def _starts_group(rows: pa.Table, names: Sequence[str]) -> pa.BooleanArray:
    """Return for each row whether its values differ from those of the row before."""
    starts = np.zeros(rows.num_rows, dtype=bool)
    starts[:1] = True
    for name in names:
        column = rows[name]
        starts[1:] |= pc.not_equal(column.slice(1), column.slice(0, max(len(column) - 1, 0))).to_numpy()
    return pa.array(starts)


def _next_sequences(events: pa.Table, keys: Sequence[str]) -> pa.ChunkedArray:
    """Return the sequence of the next event, or null if the next event has another key."""
    sequence = events[SEQUENCE]
    no_next = pa.nulls(min(1, events.num_rows), sequence.type)
    following = pa.chunked_array([*sequence.slice(1).chunks, no_next], sequence.type)
    starts = _starts_group(events, keys)
    is_last = pa.concat_arrays([starts.slice(1), pa.array([True] * min(1, events.num_rows), pa.bool_())])
    return pc.if_else(is_last, pa.scalar(None, sequence.type), following)


def _differ(old: pa.ChunkedArray, new: pa.ChunkedArray) -> pa.ChunkedArray:
    differ = pc.fill_null(pc.not_equal(old, new), False)
    return pc.or_(differ, pc.not_equal(pc.is_null(old), pc.is_null(new)))


def _mask_of(rows: pa.Table, count: int) -> pa.BooleanArray:
    mask = np.zeros(count, dtype=bool)
    mask[rows[_STAGED_NUMBER].to_numpy()] = True
    return pa.array(mask)


def with_missing_values(staged: pa.Table, merged: pa.BooleanArray) -> pa.Table:
    """Return the merged events that omit values."""
    return staged.filter(pc.and_(merged, pc.is_valid(staged[MISSING_COLUMNS])))


def _match_stored(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Join events with the stored rows that they update; return the row numbers of both."""
    validity = [name for name in (VALID_FROM, VALID_TO) if name in stored.column_names]
    event_keys = with_row_numbers(events.select([*keys, SEQUENCE]), _ROW)
    stored_keys = with_row_numbers(stored.select([*keys, *validity]), _STORED_ROW)
    pairs = event_keys.join(stored_keys, keys=list(keys), join_type="inner")
    if validity:
        has_begun = pc.less(pairs[VALID_FROM], pairs[SEQUENCE])
        not_ended = pc.fill_null(pc.less(pairs[SEQUENCE], pairs[VALID_TO]), True)
        pairs = pairs.filter(pc.and_(has_begun, not_ended))
    return pairs.select([_ROW, _STORED_ROW])


def without_stored_row(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the events whose key has no stored row."""
    unmatched = with_row_numbers(events.select(keys), _ROW).join(
        stored.select(keys), keys=list(keys), join_type="left anti"
    )
    return events.take(unmatched[_ROW])


def without_stored_version(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the events that update no stored row version."""
    matched = _match_stored(keys, events, stored)[_ROW]
    return events.filter(pc.invert(pc.is_in(np.arange(events.num_rows), matched.combine_chunks())))


def fill_missing_values(
    rows: pa.Table, keys: Sequence[str], read: Callable[[pa.Table, list[str]], pa.Table]
) -> pa.Table:
    """Fill the values that events omit from the stored rows that they update.

    ``read`` is called with keys and column names, and returns the stored rows of these keys: the keys, the
    named columns, and with history ``VALID_FROM`` and ``VALID_TO``.
    """
    missing = rows[MISSING_COLUMNS]
    positions = np.flatnonzero(pc.is_valid(missing).to_numpy())
    if not len(positions):
        return rows
    numbers = column_numbers(pc.unique(missing).drop_null().to_pylist())
    events = rows.take(positions)
    stored = read(events.select(keys), [rows.column_names[n] for n in numbers])
    matched = _match_stored(keys, events, stored)
    source = np.arange(rows.num_rows)
    source[positions[matched[_ROW].to_numpy()]] = rows.num_rows + matched[_STORED_ROW].to_numpy()
    for number in numbers:
        name = rows.column_names[number]
        left_out = pc.fill_null(pc.match_substring(missing, f",{number},"), False).to_numpy()
        values = pa.chunked_array(
            [*rows[name].chunks, *stored[name].cast(rows[name].type).chunks], rows[name].type
        )
        filled = values.take(np.where(left_out, source, np.arange(rows.num_rows)))
        rows = rows.set_column(number, rows.schema.field(number), filled)
    return rows
