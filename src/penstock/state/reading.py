"""``state.read`` and the counts of ``state.show``, read with Spark's state data source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.types import StructField, StructType

from penstock.arguments import did_you_mean, in_quotes, require
from penstock.errors import StateRefusedError
from penstock.spark.checkpoint import redact_location
from penstock.spark.state_reader import load_state, spark_reason, unreadable
from penstock.state.logs import CONTINUOUS, may_exist
from penstock.state.operators import (
    JOIN,
    Layout,
    StateOperator,
    StatePart,
    is_timers,
    read_layout,
    read_options,
    why_no_changes,
)


def read(
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    operator: int = 0,
    *,
    part: str | None = None,
    batch: int | None = None,
) -> DataFrame:
    """Read the state of one stateful operator, without starting the query.

    Parameters
    ----------
    checkpoint
        The query's ``checkpointLocation``: a path, or the URL of a file system that Python and Spark both
        reach.
    operator
        The operator's id; ``show`` lists them.
    part
        The part to read, for an operator with several: ``left`` or ``right`` of a stream-stream join, a
        variable of a transformWithState, or its ``timers``.
    batch
        Read the state as it was after this batch; by default, after the last committed batch.

    Returns
    -------
    DataFrame
        Columns ``key``, ``value`` and ``partition_id``, as in Spark's data source ``statestore``. Variables
        have the columns of their kind, with a row for each element of a list or map. The DataFrame is lazy.
        It fails if a running query cleans up the batch before the DataFrame is used.

    Raises
    ------
    CheckpointNotFoundError
        When there is no checkpoint.
    StateRefusedError
        When the state does not exist or cannot be read.
    """
    layout = read_layout(checkpoint)
    stateful = _operator(layout, operator)
    options = read_options(stateful, _part(stateful, part))
    _require_schemas(layout, stateful)
    return state_frame(spark, layout, operator, {**options.rows, "batchId": str(_batch(layout, batch))})


def first_rows_of_state(
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    operator: int,
    *,
    part: str | None,
    batch: int | None,
    rows: int,
) -> pa.Table:
    """Read the first rows of a state. Raise StateRefusedError if its files turn out to be damaged, too."""
    frame = read(spark, checkpoint, operator, part=part, batch=batch)
    try:
        return frame.limit(rows).toArrow()
    except Exception as error:
        raise unreadable(redact_location(os.fspath(checkpoint)), operator, error) from error


def state_frame(spark: SparkSession, layout: Layout, operator: int, options: Mapping[str, str]) -> DataFrame:
    """Load state with options of Spark's state reader."""
    last = layout.logs.committed
    state_ids = last is not None and last.state_ids
    return load_state(spark, layout.files.checkpoint, operator, options, state_ids=state_ids)


def _operator(layout: Layout, number: int) -> StateOperator:
    require("operator", number, int, "an operator's id, as penstock.state.show lists them")
    location = layout.files.label
    if not layout.operators:
        last = layout.logs.planned or layout.logs.committed
        reason = (
            "it belongs to a continuous query, which keeps none"
            if last is not None and last.engine == CONTINUOUS
            else "the query keeps none, or has not run a batch yet"
        )
        raise StateRefusedError(
            f"the checkpoint at {location!r} has no state: {reason}. penstock.state.show lists its content",
            condition="STATE_REFUSED.NO_STATE",
            checkpoint=location,
        )
    for operator in layout.operators:
        if operator.id == number:
            return operator
    operator_list = ", ".join(
        f"{operator.id} ({operator.name or 'no name'})" for operator in layout.operators
    )
    raise StateRefusedError(
        f"the checkpoint at {location!r} has no operator {number}: pass one of {operator_list}",
        condition="STATE_REFUSED.NO_OPERATOR",
        checkpoint=location,
        operator=number,
    )


def _part(operator: StateOperator, name: str | None) -> StatePart:
    part_names = [part.name for part in operator.parts]
    if name is None and len(part_names) == 1:
        return operator.parts[0]
    if name in part_names:
        return operator.parts[part_names.index(name)]
    operator_text = f"operator {operator.id} ({operator.name or 'no name'})"
    problem = (
        f"{operator_text} has {len(part_names)} parts"
        if name is None
        else f"{operator_text} has no part {in_quotes(name)}"
    )
    hint = "" if name is None else did_you_mean(name, part_names)
    raise StateRefusedError(
        f"{problem}: pass one of {', '.join(part_names) or 'none'} as part.{hint}",
        condition="STATE_REFUSED.NO_PART",
        operator=operator.id,
        parts=part_names,
    )


def _require_schemas(layout: Layout, operator: StateOperator) -> None:
    """Refuse a checkpoint that was moved, if Spark opens its schemas by an absolute path."""
    for path in layout.schema_paths.get(operator.id, ()):
        if not may_exist(path):
            raise StateRefusedError(
                "the checkpoint was written elsewhere, and Spark opens the schemas of operator "
                f"{operator.id} by the absolute path {path}: copy the checkpoint back there, or read it "
                "where the query runs",
                condition="STATE_REFUSED.MOVED",
                operator=operator.id,
                path=path,
            )


def _batch(layout: Layout, batch: int | None) -> int:
    readable_batches = layout.logs.batches
    if not readable_batches:
        planned = layout.logs.planned
        reason = (
            "no batch has begun" if planned is None else f"batch {planned.id} has begun and is not committed"
        )
        raise StateRefusedError(
            f"the checkpoint at {layout.files.label!r} has no committed batch ({reason}), and only its state "
            "can be read: let the query run until it has committed",
            condition="STATE_REFUSED.NOTHING_COMMITTED",
            checkpoint=layout.files.label,
        )
    if batch is None:
        return readable_batches[-1]
    if batch not in readable_batches:
        raise StateRefusedError(
            f"batch {batch} is not committed, or was cleaned up: pass one of the batches "
            f"{readable_batches[0]} to {readable_batches[-1]}",
            condition="STATE_REFUSED.NO_BATCH",
            batch=batch,
            first=readable_batches[0],
            last=readable_batches[-1],
        )
    return batch


_KEYS = ("key", "user_map_key")


@dataclass
class _Count:
    """A count of a part's rows, or of its changes in a batch."""

    operator: StateOperator
    part: StatePart
    options: Mapping[str, str]
    """The options of Spark's state reader."""
    of_changes: bool = False
    schema: StructType | None = None
    rows: int | None = None
    """The number of rows or changes; None if it is unknown."""
    removals: int = 0
    error: str | None = None
    """Why the rows could not be counted."""


def count_rows(spark: SparkSession, layout: Layout, batch: int) -> tuple[StateOperator, ...]:
    """Return the operators with columns and row counts at the end of a batch."""
    counts = [
        count
        for operator in layout.operators
        for part in operator.parts
        for count in _counts(operator, part, batch)
    ]
    frames: list[tuple[_Count, DataFrame]] = []
    for count in counts:
        try:
            frame = state_frame(spark, layout, count.operator.id, count.options)
        except StateRefusedError as error:
            count.error = str(error)
        else:
            count.schema = frame.schema
            frames.append((count, frame))
    if frames:
        _count_in_one_job(frames)
    return tuple(
        _with_counts(operator, batch, [count for count in counts if count.operator is operator])
        for operator in layout.operators
    )


def _counts(operator: StateOperator, part: StatePart, batch: int) -> Iterator[_Count]:
    options = read_options(operator, part)
    # Spark counts a list as one row.
    list_options = {"flattenCollectionTypes": "false"} if part.kind == "ListState" else {}
    yield _Count(operator, part, {**options.rows, **list_options, "batchId": str(batch)})
    if options.changes is not None and why_no_changes(operator, options, batch) is None:
        batch_range = {"changeStartBatchId": str(batch), "changeEndBatchId": str(batch)}
        changes = {**options.changes, **list_options, "readChangeFeed": "true", **batch_range}
        yield _Count(operator, part, changes, of_changes=True)


def _count_in_one_job(frames: Sequence[tuple[_Count, DataFrame]]) -> None:
    try:
        parts = [_aggregated(frame, position, count) for position, (count, frame) in enumerate(frames)]
        for row in reduce(lambda one, other: one.union(other), parts).collect():
            count, _ = frames[row["place"]]
            count.rows, count.removals = row["rows"], row["removals"]
    except Exception as error:
        if len(frames) == 1:
            frames[0][0].error = spark_reason(error)
            return
        # Count them one by one, to find out which of them failed.
        for pair in frames:
            _count_in_one_job([pair])


def _aggregated(frame: DataFrame, position: int, count: _Count) -> DataFrame:
    is_removal = fn.col("change_type") == "delete" if count.of_changes else fn.lit(False)
    return frame.agg(
        fn.lit(position).alias("place"),
        fn.count("*").alias("rows"),
        fn.count_if(is_removal).alias("removals"),
    )


def _with_counts(operator: StateOperator, batch: int, counts: Sequence[_Count]) -> StateOperator:
    parts = tuple(
        reduce(_with_count, (count for count in counts if count.part is part), part)
        for part in operator.parts
    )
    counted = [part for part in parts if not is_timers(part)]
    return replace(
        operator,
        parts=parts,
        rows=_sum(part.rows for part in counted),
        updated=_sum(part.updated for part in counted),
        removed=_sum(part.removed for part in counted),
        unknown=(*operator.unknown, *_unknown(operator, batch, counts)),
    )


def _with_count(part: StatePart, count: _Count) -> StatePart:
    if count.schema is not None and not count.of_changes:
        columns = {field.name: field for field in count.schema if field.name != "partition_id"}
        keys = [columns.pop(name) for name in _KEYS if name in columns]
        part = replace(part, keys=_columns(keys), values=_columns(columns.values()))
    if count.rows is None:
        return part
    if not count.of_changes:
        return replace(part, rows=count.rows)
    # A join also rewrites a row when it matches the row or moves it into a gap.
    updated = None if count.operator.name == JOIN else count.rows - count.removals
    return replace(part, updated=updated, removed=count.removals)


def _columns(columns: Iterable[StructField]) -> str:
    """Format columns with their types, with the fields of a struct in its place."""
    structs = (column.dataType if isinstance(column.dataType, StructType) else [column] for column in columns)
    return ", ".join(
        f"{field.name} {field.dataType.simpleString()}" for struct in structs for field in struct
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum of counts; None if there are no counts or some are unknown."""
    values = list(counts)
    return sum(count for count in values if count is not None) if values and None not in values else None


def _unknown(operator: StateOperator, batch: int, counts: Sequence[_Count]) -> Iterator[str]:
    if not operator.parts:
        yield "rows: Spark's reader does not know this operator's state"
    for count in counts:
        if count.error is not None:
            yield f"{'changes' if count.of_changes else 'rows'} of {count.part.name}: {count.error}"
    parts = [part for part in operator.parts if not is_timers(part)]
    reasons = {why_no_changes(operator, read_options(operator, part), batch) for part in parts}
    yield from (f"updated and removed rows: {reason}" for reason in reasons if reason is not None)
    if operator.name == JOIN and None in reasons:
        yield "updated rows: a join rewrites rows for other reasons too"
