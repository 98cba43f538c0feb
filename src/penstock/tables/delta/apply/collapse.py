"""Collapsing of a micro-batch's change events in Spark: of each key the last one, since later events replace
earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.spark.schemas import quote_column
from penstock.tables.columns import staged_order
from penstock.tables.delta.apply.events import EventLayout
from penstock.tables.row_checks import present
from penstock.tables.row_encoding import JSON


def collapse(frame: DataFrame, events: EventLayout) -> DataFrame:
    """Return the last event of each key, and with history that of each key and sequence.

    The columns are c0, c1 and so on; ``sequence``; ``present``; ``unknown`` where values may be left out; and
    ``ambiguous``, whether another event has the same place in the order and another row. Rows without a
    sequence or of an unknown change type pass through, so that the tasks refuse them.
    """
    data = [f"c{n}" for n in range(len(events.columns))]
    projected = frame.select(
        *(F.col(quote_column(name)).alias(short) for name, short in zip(events.columns, data, strict=True)),
        F.col(quote_column(events.sequence_by)).alias("sequence"),
        *(F.col(quote_column(name)).alias(f"t{n}") for n, name in enumerate(events.ties)),
        present(),
        *([] if events.unchanged is None else [events.unchanged.unknown()]),
    )
    order = staged_order(events.ties)
    keys = [short for name, short in zip(events.rows.schema.names, data, strict=True) if name in events.keys]
    if events.unchanged is not None and events.unchanged.numbers:
        projected = _carry_over(projected, events.unchanged.numbers, keys, order)
    within = Window.partitionBy(*keys, *(["sequence"] if events.history else []))
    invalid = F.col("sequence").isNull() | F.col("present").isNull()
    # The frame of this window ends with the peers of a row, so the first rows see the number of all their
    # peers.
    window = within.orderBy(invalid.desc(), *(F.col(name).desc() for name in order))
    last = (
        projected.withColumn("place", F.rank().over(window))
        .withColumn("peers", F.count("*").over(window))
        .where("place = 1")
    )
    # Peers are rare, so few rows are written as text.
    digest = F.when(F.expr("peers > 1 and present = 1"), F.md5(F.to_json(F.struct(*data), JSON)))
    one = (
        last.withColumn("digest", digest)
        .withColumn("ambiguous", F.min("digest").over(window) != F.max("digest").over(window))
        .withColumn("number", F.row_number().over(window))
        .where("number = 1")
    )
    kept = [name for name in projected.columns if name not in order[1:-1]]
    return one.select(*kept, F.coalesce("ambiguous", F.lit(False)).alias("ambiguous"))


def _carry_over(
    projected: DataFrame, numbers: Sequence[int], keys: Sequence[str], order: Sequence[str]
) -> DataFrame:
    """Carry unchanged values over from earlier events of the key; ``unknown`` has the columns that are left.

    Parameters
    ----------
    numbers
        The columns whose values may be left out.
    order
        The columns that order the events of a key.
    """
    before = (
        Window.partitionBy(*keys).orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    last = {n: f"last{n}" for n in numbers}
    has_value = {n: ~F.contains(F.coalesce("unknown", F.lit("")), F.lit(f",{n},")) for n in numbers}
    with_last = projected.select(
        "*",
        *(
            F.last(F.when(has_value[n] & (F.col("present") == 1), F.struct(f"c{n}")), ignorenulls=True)
            .over(before)
            .alias(last[n])
            for n in numbers
        ),
    )

    def column(name: str) -> Column:
        n = int(name[1:])
        if n not in last:
            return F.col(name)
        return F.when(has_value[n], F.col(name)).otherwise(F.col(f"{last[n]}.{name}")).alias(name)

    left = F.concat(
        *(F.when(has_value[n] | F.col(last[n]).isNotNull(), "").otherwise(f",{n},") for n in numbers)
    )
    listed = F.substring("unknown", 1, 1) == ","
    data = [name for name in projected.columns if name not in (*order, "unknown")]
    return with_last.select(
        *map(column, data),
        *order,
        F.when(listed, F.nullif(left, F.lit(""))).otherwise(F.col("unknown")).alias("unknown"),
    )
