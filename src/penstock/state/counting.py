"""Columns, rows, and rows that the last committed batch wrote and removed: from Spark's state data source, counted in one job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as fn
from pyspark.sql.types import StructType

from penstock.errors import StateRefused
from penstock.state.layout import Layout
from penstock.state.parts import JOIN, is_of_timers, way_to, why_no_changes
from penstock.state.reading import spark_says, state_frame
from penstock.state.result import StateOperator, StatePart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KEYS = {"key", "user_map_key"}


@dataclass(frozen=True)
class _Question:
    """What is counted of one part: its rows, or the changes of a batch."""

    operator: int
    part: str
    of_changes: bool = False

    def __str__(self) -> str:
        return f"{'changes' if self.of_changes else 'rows'} of {self.part}"


@dataclass(frozen=True)
class _Count:
    rows: int
    """All of them."""
    removals: int


_Answers = dict[_Question, _Count | str]
"""A count, or why there is none."""


def counted(spark: SparkSession, layout: Layout, batch: int) -> tuple[StateOperator, ...]:
    """The operators with what Spark reads of them, as of the end of a batch."""
    frames: dict[_Question, DataFrame] = {}
    answers: _Answers = {}
    for operator in layout.operators:
        for part in operator.parts:
            for question, options in _questions(operator, part, batch):
                try:
                    frames[question] = state_frame(spark, layout, operator.id, options)
                except StateRefused as error:
                    answers[question] = str(error)
    answers |= _answers(frames)
    schemas = {question: frame.schema for question, frame in frames.items()}
    return tuple(_filled(operator, batch, answers, schemas) for operator in layout.operators)


def _questions(
    operator: StateOperator, part: StatePart, batch: int
) -> Iterable[tuple[_Question, dict[str, str]]]:
    way = way_to(operator, part)
    # As Spark counts them: a list is one row.
    flat = {"flattenCollectionTypes": "false"} if part.kind == "ListState" else {}
    yield _Question(operator.id, part.name), {**way.rows, **flat, "batchId": str(batch)}
    if way.changes is not None and why_no_changes(operator, way, batch) is None:
        one = {"changeStartBatchId": str(batch), "changeEndBatchId": str(batch)}
        asked = {**way.changes, **flat, "readChangeFeed": "true", **one}
        yield _Question(operator.id, part.name, True), asked


def _answers(frames: Mapping[_Question, DataFrame]) -> _Answers:
    if not frames:
        return {}
    asked = list(frames)
    try:
        parts = [_aggregated(frames[question], place, question) for place, question in enumerate(asked)]
        found = reduce(lambda one, other: one.union(other), parts).collect()
    except Exception as error:
        if len(asked) == 1:
            return {asked[0]: spark_says(error)}
        # One by one, to know which of them it is.
        return {question: each for one in asked for question, each in _answers({one: frames[one]}).items()}
    return {asked[row["place"]]: _Count(row["rows"], row["removals"]) for row in found}


def _aggregated(frame: DataFrame, place: int, question: _Question) -> DataFrame:
    is_removal = fn.col("change_type") == "delete" if question.of_changes else fn.lit(False)
    return frame.agg(
        fn.lit(place).alias("place"), fn.count("*").alias("rows"), fn.count_if(is_removal).alias("removals")
    )


def _filled(
    operator: StateOperator, batch: int, answers: _Answers, schemas: Mapping[_Question, StructType]
) -> StateOperator:
    parts = tuple(_part(operator, part, answers, schemas) for part in operator.parts)
    own = [part for part in parts if not is_of_timers(part)]
    untold = [*operator.untold, *_untold(operator, batch, answers)]
    return replace(
        operator,
        parts=parts,
        rows=_sum(part.rows for part in own),
        updated=_sum(part.updated for part in own),
        removed=_sum(part.removed for part in own),
        untold=tuple(untold),
    )


def _part(
    operator: StateOperator, part: StatePart, answers: _Answers, schemas: Mapping[_Question, StructType]
) -> StatePart:
    question = _Question(operator.id, part.name)
    rows, changes = answers.get(question), answers.get(replace(question, of_changes=True))
    if question in schemas:
        tops = [field for field in schemas[question] if field.name != "partition_id"]
        keys = _columns(StructType([field for field in tops if field.name in _KEYS]))
        values = _columns(StructType([field for field in tops if field.name not in _KEYS]))
        part = replace(part, keys=keys, values=values)
    if isinstance(rows, _Count):
        part = replace(part, rows=rows.rows)
    if isinstance(changes, _Count):
        # A join also writes a row again when it matches it, or moves it into a gap.
        updated = None if operator.name == JOIN else changes.rows - changes.removals
        part = replace(part, updated=updated, removed=changes.removals)
    return part


def _columns(found: StructType) -> str:
    fields = [
        inner
        for field in found
        for inner in (field.dataType if isinstance(field.dataType, StructType) else [field])
    ]
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields)


def _sum(found: Iterable[int | None]) -> int | None:
    """The sum, when there is something and all of it is known."""
    known = list(found)
    return sum(each for each in known if each is not None) if known and None not in known else None


def _untold(operator: StateOperator, batch: int, answers: _Answers) -> Iterable[str]:
    if not operator.parts:
        yield "rows: Spark's reader does not know this operator's state"
    for question, answer in answers.items():
        if question.operator == operator.id and isinstance(answer, str):
            yield f"{question}: {answer}"
    told = [part for part in operator.parts if not is_of_timers(part)]
    without = {why_no_changes(operator, way_to(operator, part), batch) for part in told}
    yield from (f"updated and removed rows: {why}" for why in without if why is not None)
    if operator.name == JOIN and None in without:
        yield "updated rows: a join also writes rows again when it matches or moves them"
