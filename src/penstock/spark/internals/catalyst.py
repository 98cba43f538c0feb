"""Handles on Catalyst's plans and expressions in the JVM of a classic session (Spark 4.2, 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from py4j.java_gateway import JavaObject, JVMView
from pyspark.sql import DataFrame, SparkSession
from pyspark.util import PythonEvalType

from penstock.spark.internals.sessions import jvm_of

if TYPE_CHECKING:
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

ARROW, PANDAS, PYTHON = "Arrow", "pandas", "Python"
_ARROW_UDFS = (PythonEvalType.SQL_SCALAR_ARROW_UDF, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)


def to_list(seq: JavaObject) -> list[JavaObject]:
    """Copy a Scala sequence into a list."""
    return [seq.apply(index) for index in range(seq.size())]


def to_seq(jvm: JVMView, items: Iterable[JavaObject]) -> JavaObject:
    """Copy JVM objects into a Scala sequence."""
    return jvm.PythonUtils.toSeq(list(items))


def children(tree: JavaObject) -> list[JavaObject]:
    """Return the children of a plan node or an expression."""
    return to_list(tree.children())


def with_children(jvm: JVMView, tree: JavaObject, new: Iterable[JavaObject]) -> JavaObject:
    """Return a copy of a plan node or an expression with other children."""
    return tree.withNewChildren(to_seq(jvm, new))


def walk(tree: JavaObject) -> Iterator[JavaObject]:
    """Yield a plan node or an expression and its descendants, from the top."""
    yield tree
    for child in children(tree):
        yield from walk(child)


def node_name(tree: JavaObject) -> str:
    """Return Spark's name of a plan node or an expression, such as Project or Alias."""
    return str(tree.nodeName())


def java_frame(frame: DataFrame) -> JavaObject:
    """Return the JVM's Dataset of a classic DataFrame."""
    return cast("ClassicDataFrame", frame)._jdf


def analysed(frame: DataFrame) -> JavaObject:
    """Return the JVM's analysed plan of a classic DataFrame."""
    return java_frame(frame).queryExecution().analyzed()


def to_dataframe(spark: SparkSession, plan: JavaObject) -> DataFrame:
    """Make a DataFrame of a JVM plan, as every DataFrame method does with the plan it has built."""
    dataset = jvm_of(spark).org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan)
    return DataFrame(dataset, spark)


@dataclass(frozen=True)
class Expression:
    """An expression of an operator."""

    java: JavaObject

    @property
    def name(self) -> str:
        return node_name(self.java)

    @property
    def sql(self) -> str:
        return str(self.java.sql())

    def walk(self) -> Iterator[Expression]:
        """Yield the expression and its descendants."""
        yield from map(Expression, walk(self.java))

    def cast_text(self) -> tuple[str, str] | None:
        """Return the text and the type name of a literal's cast; None for any other expression."""
        if self.name != "Cast" or node_name(self.java.child()) != "Literal":
            return None
        return str(self.java.child().value()), str(self.java.dataType().typeName())


@dataclass(frozen=True)
class Operator:
    """An operator of a logical or a physical plan."""

    java: JavaObject
    jvm: JVMView

    @property
    def name(self) -> str:
        return node_name(self.java)

    def children(self) -> list[Operator]:
        return [Operator(child, self.jvm) for child in children(self.java)]

    def expressions(self) -> list[Expression]:
        return [Expression(expression) for expression in to_list(self.java.expressions())]

    def expressions_text(self) -> str:
        """Print all expressions, in one call to the JVM."""
        return str(self.java.expressions().mkString(" "))

    def has_time_or_subquery(self) -> bool:
        """Return whether the current time or a subquery is used here or below, by Catalyst's patterns."""
        patterns = self.jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        return bool(
            self.java.containsPattern(patterns.CURRENT_LIKE())
            or self.java.containsPattern(patterns.PLAN_EXPRESSION())
        )

    def generator(self) -> str:
        """Return the name of the generator of a Generate."""
        return node_name(self.java.generator())

    def udf_kind(self) -> str:
        """Return ARROW, PANDAS or PYTHON for the functions that an ArrowEvalPython runs."""
        kind = int(self.java.evalType())
        if kind == PythonEvalType.SQL_ARROW_BATCHED_UDF:
            return PYTHON
        return ARROW if kind in _ARROW_UDFS else PANDAS


def analysed_plan(frame: DataFrame) -> Operator:
    """Return the root of a classic DataFrame's analysed plan."""
    return Operator(analysed(frame), jvm_of(frame.sparkSession))


def executed_plan(frame: DataFrame) -> Operator:
    """Return the root of a classic DataFrame's physical plan."""
    return Operator(java_frame(frame).queryExecution().executedPlan(), jvm_of(frame.sparkSession))
