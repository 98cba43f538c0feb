"""Unchanged values of change events, filled from the stored rows that the events updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.apply.events import SEQUENCE, UNKNOWN
from penstock.tables.delta.apply.merge_plan import numbered
from penstock.tables.delta.transactions import SOURCE, TARGET, source_columns
from penstock.tables.names import quoted
from penstock.tables.unchanged_values import column_numbers, has_value

_ROW, _STORED = "_penstock_row", "_penstock_stored"


def incomplete(staged: pa.Table, taken: pa.BooleanArray) -> pa.Table:
    """Return the events to merge that leave values out."""
    return staged.filter(pc.and_(taken, pc.is_valid(staged[UNKNOWN])))


def _matched_versions(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Join events with the versions that they updated, as row numbers of both.

    Parameters
    ----------
    stored
        Key, ``VALID_FROM`` and ``VALID_TO`` of the rows that have the events' keys.
    """
    left = numbered(events.select([*keys, SEQUENCE]), _ROW)
    right = numbered(stored.select([*keys, VALID_FROM, VALID_TO]), _STORED)
    both = left.join(right, keys=list(keys), join_type="inner")
    begun = pc.less(both[VALID_FROM], both[SEQUENCE])
    not_ended = pc.fill_null(pc.less(both[SEQUENCE], both[VALID_TO]), True)
    return both.filter(pc.and_(begun, not_ended)).select([_ROW, _STORED])


def without_row(keys: Sequence[str], events: pa.Table, rows: pa.Table) -> pa.Table:
    """Return the events whose key no row has."""
    unmatched = numbered(events.select(keys), _ROW).join(
        rows.select(keys), keys=list(keys), join_type="left anti"
    )
    return events.take(unmatched[_ROW])


def without_version(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the events that updated no stored version."""
    matched = _matched_versions(keys, events, stored)[_ROW]
    return events.filter(pc.invert(pc.is_in(np.arange(events.num_rows), matched.combine_chunks())))


def fill(rows: pa.Table, keys: Sequence[str], read: Callable[[pa.Table, list[str]], pa.Table]) -> pa.Table:
    """Fill the values that events leave out from the versions that they updated.

    Parameters
    ----------
    read
        Reads the rows that have some keys: the keys, ``VALID_FROM``, ``VALID_TO`` and the columns of the
        second argument.
    """
    unknown = rows[UNKNOWN]
    places = np.flatnonzero(pc.is_valid(unknown).to_numpy())
    if not len(places):
        return rows
    numbers = column_numbers(pc.unique(unknown).drop_null().to_pylist())
    events = rows.take(places)
    stored = read(events.select(keys), [rows.column_names[n] for n in numbers])
    matched = _matched_versions(keys, events, stored)
    source = np.arange(rows.num_rows)
    source[places[matched[_ROW].to_numpy()]] = rows.num_rows + matched[_STORED].to_numpy()
    for number in numbers:
        name = rows.column_names[number]
        left_out = pc.fill_null(pc.match_substring(unknown, f",{number},"), False).to_numpy()
        both = pa.chunked_array(
            [*rows[name].chunks, *stored[name].cast(rows[name].type).chunks], rows[name].type
        )
        taken = both.take(np.where(left_out, source, np.arange(rows.num_rows)))
        rows = rows.set_column(number, rows.schema.field(number), taken)
    return rows


def source_or_stored(names: Sequence[str], numbers: Sequence[int]) -> dict[str, str]:
    """Return a merge's assignments: the source's values, or the stored ones where the source leaves them
    out.
    """
    columns = source_columns(names)
    for number in numbers:
        name = quoted(names[number])
        in_source = has_value(f"{SOURCE}.{quoted(UNKNOWN)}", number)
        columns[name] = f"case when {in_source} then {SOURCE}.{name} else {TARGET}.{name} end"
    return columns
