"""Of the events of a micro-batch for a Delta table, those that may count: later ones have taken the place of the others."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.spark.schemas import quoted
from penstock.tables.change_rows import present
from penstock.tables.columns import staged_order
from penstock.tables.delta_events import Events
from penstock.tables.delta_filling import carried
from penstock.tables.shaping import JSON


def collapsed(frame: DataFrame, events: Events) -> DataFrame:
    """The last event of each key, with history that of each key and sequence; in the columns c0, c1 and so on, and more.

    These are ``sequence``; ``present``; where values may be left out ``unknown``; and ``ambiguous``, whether others have the same place in the order, and another row.
    What is no event, without a sequence or of no known type, comes through, so that the tasks refuse it.
    """
    data = [f"c{n}" for n in range(len(events.columns))]
    shaped = frame.select(
        *(F.col(quoted(name)).alias(short) for name, short in zip(events.columns, data, strict=True)),
        F.col(quoted(events.sequence_by)).alias("sequence"),
        *(F.col(quoted(name)).alias(f"t{n}") for n, name in enumerate(events.ties)),
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
