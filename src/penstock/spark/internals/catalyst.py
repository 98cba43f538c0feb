"""Scala collections, and the trees that Spark's plans and expressions are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.util import PythonEvalType


def listed(sequence: Any) -> list[Any]:
    """A Scala sequence as a list."""
    return [sequence.apply(place) for place in range(sequence.size())]


def sequence(jvm: Any, items: Iterable[Any]) -> Any:
    """A Scala sequence of some objects of the JVM's."""
    return jvm.PythonUtils.toSeq(list(items))


def children(tree: Any) -> list[Any]:
    """The children of a plan's node or of an expression."""
    return listed(tree.children())


def walk(tree: Any) -> Iterator[Any]:
    """A plan's node or an expression, and all below it, from the top."""
    yield tree
    for child in children(tree):
        yield from walk(child)


def name_of(tree: Any) -> str:
    """What Spark calls a plan's node or an expression, such as Project or Alias."""
    return str(tree.nodeName())


def analysed(frame: DataFrame) -> Any:
    """The JVM's analysed plan of a classic DataFrame."""
    java: Any = frame
    return java._jdf.queryExecution().analyzed()


def frame_of(spark: SparkSession, plan: Any) -> DataFrame:
    """The DataFrame of a plan of the JVM's, as each method of a DataFrame makes one of the plan that it has made."""
    java: Any = spark
    made = java._jvm.org.apache.spark.sql.classic.Dataset.ofRows(java._jsparkSession, plan)
    return DataFrame(made, spark)


# ---- logical: Operators and expressions of a plan as the JVM has them (classic sessions, Spark 4.2 and 4.3).

ARROW, PANDAS, PYTHON = "Arrow", "pandas", "Python"
_ARROW = (PythonEvalType.SQL_SCALAR_ARROW_UDF, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)


@dataclass(frozen=True)
class Expression:
    """An expression of an operator's."""

    java: Any

    @property
    def name(self) -> str:
        return name_of(self.java)

    @property
    def sql(self) -> str:
        """As SQL writes it."""
        return str(self.java.sql())

    def walk(self) -> Iterator[Expression]:
        """The expression and all below it."""
        yield from map(Expression, walk(self.java))

    def cast_text(self) -> tuple[str, str] | None:
        """The literal that a cast is of, as text, and the type's name; None for anything else."""
        if self.name != "Cast" or name_of(self.java.child()) != "Literal":
            return None
        return str(self.java.child().value()), str(self.java.dataType().typeName())


@dataclass(frozen=True)
class Operator:
    """An operator of a logical or a physical plan."""

    java: Any
    jvm: Any

    @property
    def name(self) -> str:
        return name_of(self.java)

    def children(self) -> list[Operator]:
        return [Operator(child, self.jvm) for child in children(self.java)]

    def expressions(self) -> list[Expression]:
        return [Expression(each) for each in listed(self.java.expressions())]

    def expressions_text(self) -> str:
        """All expressions as they are printed, which is one call to the JVM."""
        return str(self.java.expressions().mkString(" "))

    def has_time_or_subquery(self) -> bool:
        """Whether an expression here or below asks for the current time, or is a subquery, which Spark knows without a search."""
        patterns = self.jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        return bool(
            self.java.containsPattern(patterns.CURRENT_LIKE())
            or self.java.containsPattern(patterns.PLAN_EXPRESSION())
        )

    def generator(self) -> str:
        """What the generator of a Generate is called."""
        return name_of(self.java.generator())

    def udf_kind(self) -> str:
        """The kind of the Python functions that an ArrowEvalPython runs: ARROW, PANDAS or PYTHON."""
        kind = int(self.java.evalType())
        return PYTHON if kind == PythonEvalType.SQL_ARROW_BATCHED_UDF else ARROW if kind in _ARROW else PANDAS


def analysed_plan(frame: DataFrame) -> Operator:
    """The top of a classic DataFrame's analysed plan."""
    java: Any = frame
    return Operator(analysed(frame), java.sparkSession._jvm)


def executed_plan(frame: DataFrame) -> Operator:
    """The top of a classic DataFrame's physical plan."""
    java: Any = frame
    return Operator(java._jdf.queryExecution().executedPlan(), java.sparkSession._jvm)
