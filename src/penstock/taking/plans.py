"""What a plan does to its rows, as far as taking some of them depends on it."""

from __future__ import annotations

from enum import IntEnum

from pyspark.sql import DataFrame

from penstock.spark.internals.operators import Is, of
from penstock.spark.internals.plan_text import tree_of

_READ = "StreamingRelationV2"


class Reach(IntEnum):
    """On how much of the stream a row that comes out may depend."""

    ROW = 1
    """On one row that went in."""
    MICRO_BATCH = 2
    """On those of one micro-batch."""
    STREAM = 3
    """On all that came before, which Spark keeps as state, or on something that is not known here."""


def reach_of(frame: DataFrame) -> Reach:
    """The reach of a plan over one streaming read; STREAM for all plans with more leaves."""
    names = [node.name for node in tree_of(frame).walk()]
    operators = [of(name) for name in names if name != _READ]
    if names.count(_READ) != 1 or not all(map(_is_short, operators)):
        return Reach.STREAM
    return Reach.MICRO_BATCH if any(Is.PER_BATCH in each for each in operators) else Reach.ROW


def keeps_state(frame: DataFrame) -> bool:
    """Whether a task may have to read all its rows, because what it keeps of them is committed behind the last one."""
    names = {node.name for node in tree_of(frame).walk() if node.children}
    return not all(name == "Union" or _is_short(of(name)) for name in names)


def _is_short(operator: Is) -> bool:
    """Whether rows that come out of an operator depend on one micro-batch at the most."""
    return bool(operator & (Is.PER_ROW | Is.PER_BATCH))
