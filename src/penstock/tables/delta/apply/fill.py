"""Values that events of a Delta table leave out, from the rows that they changed: earlier ones of the micro-batch, else those stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.spark.schemas import quote_column as column
from penstock.tables.change_rows import present
from penstock.tables.columns import VALID_FROM, VALID_TO, staged_order
from penstock.tables.delta.apply.events import SEQUENCE, UNKNOWN, Events
from penstock.tables.delta.apply.outcome import numbered
from penstock.tables.delta.transactions import SOURCE, TARGET, assigned
from penstock.tables.names import quoted
from penstock.tables.shaping import JSON
from penstock.tables.untouched_values import has_value, numbers_of

_ROW, _STORED = "_penstock_row", "_penstock_stored"


def lacking(staged: pa.Table, taken: pa.BooleanArray) -> pa.Table:
    """Events that count and do not have all values."""
    return staged.filter(pc.and_(taken, pc.is_valid(staged[UNKNOWN])))


def versions(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Which version of its row each event changed: the places of both, where there is one.

    Parameters
    ----------
    stored
        Key, ``VALID_FROM`` and ``VALID_TO`` of the rows that have the events' keys.
    """
    left = numbered(events.select([*keys, SEQUENCE]), _ROW)
    right = numbered(stored.select([*keys, VALID_FROM, VALID_TO]), _STORED)
    both = left.join(right, keys=list(keys), join_type="inner")
    begun = pc.less(both[VALID_FROM], both[SEQUENCE])
    going_on = pc.fill_null(pc.less(both[SEQUENCE], both[VALID_TO]), True)
    return both.filter(pc.and_(begun, going_on)).select([_ROW, _STORED])


def without(keys: Sequence[str], events: pa.Table, there: pa.Table) -> pa.Table:
    """Events whose key is not among others."""
    found = numbered(events.select(keys), _ROW).join(
        there.select(keys), keys=list(keys), join_type="left anti"
    )
    return events.take(found[_ROW])


def without_version(keys: Sequence[str], events: pa.Table, stored: pa.Table) -> pa.Table:
    """Events that changed no version of a stored row."""
    found = versions(keys, events, stored)[_ROW]
    return events.filter(pc.invert(pc.is_in(np.arange(events.num_rows), found.combine_chunks())))


def filled(rows: pa.Table, keys: Sequence[str], read: Callable[[pa.Table, list[str]], pa.Table]) -> pa.Table:
    """Events with the values of the versions that they changed.

    Parameters
    ----------
    read
        Reads the rows that have some keys: those, ``VALID_FROM``, ``VALID_TO`` and the columns that are asked for.
    """
    unknown = rows[UNKNOWN]
    places = np.flatnonzero(pc.is_valid(unknown).to_numpy())
    if not len(places):
        return rows
    numbers = numbers_of(pc.unique(unknown).drop_null().to_pylist())
    events = rows.take(places)
    stored = read(events.select(keys), [rows.column_names[n] for n in numbers])
    matched = versions(keys, events, stored)
    source = np.arange(rows.num_rows)
    source[places[matched[_ROW].to_numpy()]] = rows.num_rows + matched[_STORED].to_numpy()
    for number in numbers:
        name = rows.column_names[number]
        lacks = pc.fill_null(pc.match_substring(unknown, f",{number},"), False).to_numpy()
        both = pa.chunked_array(
            [*rows[name].chunks, *stored[name].cast(rows[name].type).chunks], rows[name].type
        )
        rows = rows.set_column(
            number, rows.schema.field(number), both.take(np.where(lacks, source, np.arange(rows.num_rows)))
        )
    return rows


def kept_or_assigned(names: Sequence[str], numbers: Sequence[int]) -> dict[str, str]:
    """What a merge sets: the columns take the values of the source, but for those that it leaves out."""
    columns = assigned(names)
    for number in numbers:
        name = quoted(names[number])
        told = has_value(f"{SOURCE}.{quoted(UNKNOWN)}", number)
        columns[name] = f"case when {told} then {SOURCE}.{name} else {TARGET}.{name} end"
    return columns


def carried(
    shaped: DataFrame, numbers: Sequence[int], keys: Sequence[str], order: Sequence[str]
) -> DataFrame:
    """Shaped events with what earlier ones of the same key tell; ``unknown`` names what is left.

    Parameters
    ----------
    numbers
        Of the columns whose values may be left out.
    order
        The columns that order the events of a key.
    """
    before = (
        Window.partitionBy(*keys).orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    last = {n: f"told{n}" for n in numbers}
    told = {n: ~F.contains(F.coalesce("unknown", F.lit("")), F.lit(f",{n},")) for n in numbers}
    looked = shaped.select(
        "*",
        *(
            F.last(F.when(told[n] & (F.col("present") == 1), F.struct(f"c{n}")), ignorenulls=True)
            .over(before)
            .alias(last[n])
            for n in numbers
        ),
    )

    def column(name: str) -> Column:
        n = int(name[1:])
        return (
            F.when(told[n], F.col(name)).otherwise(F.col(f"{last[n]}.{name}")).alias(name)
            if n in last
            else F.col(name)
        )

    left = F.concat(*(F.when(told[n] | F.col(last[n]).isNotNull(), "").otherwise(f",{n},") for n in numbers))
    listed = F.substring("unknown", 1, 1) == ","
    data = [name for name in shaped.columns if name not in (*order, "unknown")]
    return looked.select(
        *map(column, data),
        *order,
        F.when(listed, F.nullif(left, F.lit(""))).otherwise(F.col("unknown")).alias("unknown"),
    )


# ---- delta_collapsing: Of the events of a micro-batch for a Delta table, those that may count: later ones have taken the place of the others.


def collapsed(frame: DataFrame, events: Events) -> DataFrame:
    """The last event of each key, with history that of each key and sequence; in the columns c0, c1 and so on, and more.

    These are ``sequence``; ``present``; where values may be left out ``unknown``; and ``ambiguous``, whether others have the same place in the order, and another row.
    What is no event, without a sequence or of no known type, comes through, so that the tasks refuse it.
    """
    data = [f"c{n}" for n in range(len(events.columns))]
    shaped = frame.select(
        *(F.col(column(name)).alias(short) for name, short in zip(events.columns, data, strict=True)),
        F.col(column(events.sequence_by)).alias("sequence"),
        *(F.col(column(name)).alias(f"t{n}") for n, name in enumerate(events.ties)),
        present(),
        *([] if events.unchanged is None else [events.unchanged.unknown()]),
    )
    order = staged_order(events.ties)
    keys = [short for name, short in zip(events.rows.schema.names, data, strict=True) if name in events.keys]
    if events.unchanged is not None and events.unchanged.numbers:
        shaped = carried(shaped, events.unchanged.numbers, keys, order)
    within = Window.partitionBy(*keys, *(["sequence"] if events.history else []))
    none = F.col("sequence").isNull() | F.col("present").isNull()
    # Up to a row, the frame of this window has its peers too: those of the first row are all that there are of them.
    window = within.orderBy(none.desc(), *(F.col(name).desc() for name in order))
    last = (
        shaped.withColumn("place", F.rank().over(window))
        .withColumn("peers", F.count("*").over(window))
        .where("place = 1")
    )
    # Seldom there are any, so that few rows are written as text.
    told = F.when(F.expr("peers > 1 and present = 1"), F.md5(F.to_json(F.struct(*data), JSON)))
    one = (
        last.withColumn("told", told)
        .withColumn("ambiguous", F.min("told").over(window) != F.max("told").over(window))
        .withColumn("number", F.row_number().over(window))
        .where("number = 1")
    )
    kept = [name for name in shaped.columns if name not in order[1:-1]]
    return one.select(*kept, F.coalesce("ambiguous", F.lit(False)).alias("ambiguous"))
