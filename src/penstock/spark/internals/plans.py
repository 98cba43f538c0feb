"""Properties of a query's analysed plan, and replacement of its streaming reads (Spark 4.2, 4.3)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

from py4j.java_gateway import JavaObject, JVMView
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.util import PythonEvalType

from penstock.spark.internals.sessions import is_classic, jvm_of

if TYPE_CHECKING:
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

_PYTHON_AGGREGATE = "PythonUDAF"
ARROW, PANDAS, PYTHON = "Arrow", "pandas", "Python"
_ARROW_UDFS = (PythonEvalType.SQL_SCALAR_ARROW_UDF, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)


def to_list(seq: JavaObject) -> list[JavaObject]:
    return [seq.apply(index) for index in range(seq.size())]


def to_seq(jvm: JVMView, items: Iterable[JavaObject]) -> JavaObject:
    return jvm.PythonUtils.toSeq(list(items))


def children(tree: JavaObject) -> list[JavaObject]:
    return to_list(tree.children())


def with_children(jvm: JVMView, tree: JavaObject, new_children: Iterable[JavaObject]) -> JavaObject:
    """Return a copy of a plan node or an expression with other children."""
    return tree.withNewChildren(to_seq(jvm, new_children))


def walk(tree: JavaObject) -> Iterator[JavaObject]:
    yield tree
    for child in children(tree):
        yield from walk(child)


def node_name(tree: JavaObject) -> str:
    """Return Spark's name of a plan node or an expression, such as Project or Alias."""
    return str(tree.nodeName())


def java_frame(frame: DataFrame) -> JavaObject:
    return cast("ClassicDataFrame", frame)._jdf


def analysed(frame: DataFrame) -> JavaObject:
    """Return the JVM's analysed plan of a classic DataFrame."""
    return java_frame(frame).queryExecution().analyzed()


def optimized(frame: DataFrame) -> JavaObject:
    """Return the optimized plan of a classic DataFrame, which may be streaming."""
    dataset = java_frame(frame)
    return dataset.sparkSession().sessionState().optimizer().execute(dataset.queryExecution().analyzed())


def explained(frame: DataFrame) -> str:
    """Return the printed physical plan of a classic DataFrame. A streaming one is planned in append mode."""
    modes = jvm_of(frame.sparkSession).org.apache.spark.sql.execution.ExplainMode
    return str(java_frame(frame).queryExecution().explainString(modes.fromString("simple")))


def python_aggregates(frame: DataFrame) -> frozenset[str]:
    """Return the printed calls of Python aggregate functions in a classic DataFrame."""
    aggregates = (node for node in walk(analysed(frame)) if node_name(node) == "Aggregate")
    return frozenset(
        str(expression.toString())
        for node in aggregates
        for result in to_list(node.aggregateExpressions())
        for expression in walk(result)
        if str(expression.getClass().getSimpleName()) == _PYTHON_AGGREGATE
    )


def to_dataframe(spark: SparkSession, plan: JavaObject) -> DataFrame:
    """Create a DataFrame from a JVM plan, as the methods of DataFrame do."""
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

    def expressions(self) -> Iterator[Expression]:
        """Yield the operator's expressions, each before its subexpressions."""
        for expression in to_list(self.java.expressions()):
            yield from map(Expression, walk(expression))

    def expressions_text(self) -> str:
        """Print all expressions with one call to the JVM."""
        return str(self.java.expressions().mkString(" "))

    def has_time_or_subquery(self) -> bool:
        """Return whether Catalyst finds the current time or a subquery in this operator or below."""
        patterns = self.jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        return bool(
            self.java.containsPattern(patterns.CURRENT_LIKE())
            or self.java.containsPattern(patterns.PLAN_EXPRESSION())
        )

    def generator(self) -> str:
        return node_name(self.java.generator())

    def udf_kind(self) -> str:
        """Return the kind of functions that an ArrowEvalPython runs: ARROW, PANDAS or PYTHON."""
        kind = int(self.java.evalType())
        if kind == PythonEvalType.SQL_ARROW_BATCHED_UDF:
            return PYTHON
        return ARROW if kind in _ARROW_UDFS else PANDAS


def analysed_plan(frame: DataFrame) -> Operator:
    return Operator(analysed(frame), jvm_of(frame.sparkSession))


def executed_plan(frame: DataFrame) -> Operator:
    return Operator(java_frame(frame).queryExecution().executedPlan(), jvm_of(frame.sparkSession))


# Equal queries have different object addresses and column ids in their plans.
_IDENTITIES = re.compile(r"@[0-9a-f]+|#\d+L?")


@dataclass(frozen=True)
class StreamingRead:
    """A leaf of a plan that reads a stream."""

    format: str
    """The format in lower case; empty for a source of V1, such as files."""
    options: Mapping[str, str] = field(repr=False)
    """The options by name, in lower case."""
    _leaf: JavaObject = field(repr=False, compare=False)

    @classmethod
    def of(cls, leaf: JavaObject) -> StreamingRead:
        if node_name(leaf) != "StreamingRelationV2":
            return cls("", {}, leaf)
        return cls(str(leaf.sourceName()).lower(), dict(leaf.extraOptions()), leaf)

    @cached_property
    def schema(self) -> StructType:
        return StructType.fromJson(json.loads(self._leaf.schema().json()))


def streaming_reads(frame: DataFrame) -> list[StreamingRead] | None:
    """Return the streaming reads of a plan, from left to right; None over Spark Connect."""
    if not is_classic(frame):
        return None
    return [StreamingRead.of(leaf) for leaf in to_list(analysed(frame).collectLeaves()) if leaf.isStreaming()]


def watermarks_above(plan: JavaObject, column: str) -> list[str]:
    """Return the event-time columns of all watermarks above the watermark of a column, in a JVM plan."""
    columns: list[str] = []

    def visit(node: JavaObject, above: list[str]) -> None:
        if node_name(node) == "EventTimeWatermark":
            name = str(node.eventTime().name())
            columns.extend(above if name == column else ())
            above = [*above, name]
        for child in children(node):
            visit(child, above)

    visit(plan, [])
    return columns


def fingerprint(frame: DataFrame, *details: str) -> str:
    """Return a short hash that is the same for all runs of the same query with the same details."""
    plan = str(analysed(frame).canonicalized().toString()) if is_classic(frame) else ""
    lines = [*details, frame.schema.json(), _IDENTITIES.sub("", plan)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


Replacement = Callable[[StreamingRead], DataFrame | None]
"""Returns a DataFrame to replace a streaming read, with columns of the same types in the same order.

None keeps the read.
"""


def replace_reads(frame: DataFrame, replacement: Replacement) -> DataFrame:
    """Apply the same transformations to other reads; the result is only streaming if one of them is."""
    spark = frame.sparkSession
    plan = _rebuild(jvm_of(spark), analysed(frame), replacement)
    return frame if plan is None else to_dataframe(spark, plan)


def _rebuild(jvm: JVMView, node: JavaObject, replacement: Replacement) -> JavaObject | None:
    """Rebuild a node on the replaced reads; None if no read below it is replaced."""
    old_children = children(node)
    if not old_children:
        replaced = replacement(StreamingRead.of(node)) if node.isStreaming() else None
        return None if replaced is None else _with_attributes(jvm, node, replaced)
    new_children = [_rebuild(jvm, child, replacement) for child in old_children]
    if all(child is None for child in new_children):
        return None
    return with_children(
        jvm,
        node,
        [
            old_child if child is None else child
            for old_child, child in zip(old_children, new_children, strict=True)
        ],
    )


def _with_attributes(jvm: JVMView, leaf: JavaObject, frame: DataFrame) -> JavaObject:
    """Give the columns of a DataFrame the ids, names and metadata of a leaf's columns."""
    plan = analysed(frame)
    catalyst, option = jvm.org.apache.spark.sql.catalyst, jvm.scala.Option
    columns = []
    for column, value in zip(to_list(leaf.output()), to_list(plan.output()), strict=True):
        identity = column.exprId(), column.qualifier(), option.apply(column.metadata()), to_seq(jvm, [])
        columns.append(catalyst.expressions.Alias(value, column.name(), *identity))
    return catalyst.plans.logical.Project(to_seq(jvm, columns), plan)
