"""Counts of state rows, in one Spark job: all rows, and those that the last committed batch wrote and
removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as fn
from pyspark.sql.types import StructType

from penstock.errors import StateRefusedError
from penstock.state.layout import Layout
from penstock.state.operators import (
    JOIN,
    StateOperator,
    StatePart,
    is_timers,
    read_options,
    why_no_changes,
)
from penstock.state.reading import spark_reason, state_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KEYS = {"key", "user_map_key"}


@dataclass(frozen=True)
class _Counter:
    """One count: of the rows of a part, or of its changes in a batch."""

    operator: int
    part: str
    of_changes: bool = False

    def __str__(self) -> str:
        return f"{'changes' if self.of_changes else 'rows'} of {self.part}"


@dataclass(frozen=True)
class _Count:
    rows: int
    """All rows or changes."""
    removals: int


_Counts = dict[_Counter, _Count | str]
"""A count, or why there is none."""


def count_rows(spark: SparkSession, layout: Layout, batch: int) -> tuple[StateOperator, ...]:
    """Return the operators with columns and row counts, as of the end of a batch."""
    frames: dict[_Counter, DataFrame] = {}
    counts: _Counts = {}
    for operator in layout.operators:
        for part in operator.parts:
            for counter, settings in _counters(operator, part, batch):
                try:
                    frames[counter] = state_frame(spark, layout, operator.id, settings)
                except StateRefusedError as error:
                    counts[counter] = str(error)
    counts |= _count_in_one_job(frames)
    schemas = {counter: frame.schema for counter, frame in frames.items()}
    return tuple(_with_counts(operator, batch, counts, schemas) for operator in layout.operators)


def _counters(
    operator: StateOperator, part: StatePart, batch: int
) -> Iterable[tuple[_Counter, dict[str, str]]]:
    options = read_options(operator, part)
    # Spark counts a list as one row.
    flat = {"flattenCollectionTypes": "false"} if part.kind == "ListState" else {}
    yield _Counter(operator.id, part.name), {**options.rows, **flat, "batchId": str(batch)}
    if options.changes is not None and why_no_changes(operator, options, batch) is None:
        one = {"changeStartBatchId": str(batch), "changeEndBatchId": str(batch)}
        changes = {**options.changes, **flat, "readChangeFeed": "true", **one}
        yield _Counter(operator.id, part.name, True), changes


def _count_in_one_job(frames: Mapping[_Counter, DataFrame]) -> _Counts:
    if not frames:
        return {}
    counters = list(frames)
    try:
        parts = [_aggregated(frames[counter], place, counter) for place, counter in enumerate(counters)]
        rows = reduce(lambda one, other: one.union(other), parts).collect()
    except Exception as error:
        if len(counters) == 1:
            return {counters[0]: spark_reason(error)}
        # One by one, to find which of them failed.
        counts: _Counts = {}
        for counter in counters:
            counts |= _count_in_one_job({counter: frames[counter]})
        return counts
    return {counters[row["place"]]: _Count(row["rows"], row["removals"]) for row in rows}


def _aggregated(frame: DataFrame, place: int, counter: _Counter) -> DataFrame:
    is_removal = fn.col("change_type") == "delete" if counter.of_changes else fn.lit(False)
    return frame.agg(
        fn.lit(place).alias("place"), fn.count("*").alias("rows"), fn.count_if(is_removal).alias("removals")
    )


def _with_counts(
    operator: StateOperator, batch: int, counts: _Counts, schemas: Mapping[_Counter, StructType]
) -> StateOperator:
    parts = tuple(_part(operator, part, counts, schemas) for part in operator.parts)
    counted = [part for part in parts if not is_timers(part)]
    return replace(
        operator,
        parts=parts,
        rows=_sum(part.rows for part in counted),
        updated=_sum(part.updated for part in counted),
        removed=_sum(part.removed for part in counted),
        unknown=(*operator.unknown, *_unknown(operator, batch, counts)),
    )


def _part(
    operator: StateOperator, part: StatePart, counts: _Counts, schemas: Mapping[_Counter, StructType]
) -> StatePart:
    counter = _Counter(operator.id, part.name)
    rows, changes = counts.get(counter), counts.get(replace(counter, of_changes=True))
    if counter in schemas:
        fields = [field for field in schemas[counter] if field.name != "partition_id"]
        keys = _columns(StructType([field for field in fields if field.name in _KEYS]))
        values = _columns(StructType([field for field in fields if field.name not in _KEYS]))
        part = replace(part, keys=keys, values=values)
    if isinstance(rows, _Count):
        part = replace(part, rows=rows.rows)
    if isinstance(changes, _Count):
        # A join also rewrites a row when it matches it, or moves it into a gap.
        updated = None if operator.name == JOIN else changes.rows - changes.removals
        part = replace(part, updated=updated, removed=changes.removals)
    return part


def _columns(struct: StructType) -> str:
    fields = [
        inner
        for field in struct
        for inner in (field.dataType if isinstance(field.dataType, StructType) else [field])
    ]
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields)


def _sum(counts: Iterable[int | None]) -> int | None:
    """Sum counts; None when there are none, or some are unknown."""
    known = list(counts)
    return sum(count for count in known if count is not None) if known and None not in known else None


def _unknown(operator: StateOperator, batch: int, counts: _Counts) -> Iterable[str]:
    if not operator.parts:
        yield "rows: Spark's reader does not know this operator's state"
    for counter, count in counts.items():
        if counter.operator == operator.id and isinstance(count, str):
            yield f"{counter}: {count}"
    parts = [part for part in operator.parts if not is_timers(part)]
    reasons = {why_no_changes(operator, read_options(operator, part), batch) for part in parts}
    yield from (f"updated and removed rows: {reason}" for reason in reasons if reason is not None)
    if operator.name == JOIN and None in reasons:
        yield "updated rows: a join also rewrites rows when it matches or moves them"
