"""Plans of a continuous query with hidden columns, next to the plans that the user sees (Spark 4.2, 4.3).

Each operation is first applied to the user's plan, which has no hidden columns, so names, stars, types and
errors are Spark's own. Then the operators that the operation added to the analysed user plan are rebuilt on
the full plan, with the same attributes and the hidden columns.

Expressions are guarded, which means that they are only evaluated for rows of the source. Markers and fillers
pass every filter and get placeholder values. Otherwise their arbitrary values would reach expressions after a
filter, such as a division by a zero that the filter removes, or a Python function that does not expect nulls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.internals.plans import (
    Operator,
    analysed,
    children,
    node_name,
    to_dataframe,
    to_list,
    to_seq,
    with_children,
)
from penstock.spark.internals.sessions import JvmException, jvm_of
from penstock.spark.internals.udf_wrapper import wrap_command


@dataclass(frozen=True)
class PlanPair:
    """A JVM plan with the user's columns, and the same plan with the hidden columns in addition."""

    user_plan: JavaObject
    full_plan: JavaObject
    kind: JavaObject
    """The hidden attribute with the kind of a row, in the full plan."""
    epoch: JavaObject
    """The hidden attribute with the epoch of a row."""


class HiddenColumnRewriter:
    """Rebuilds plans with two hidden last columns: the kind of a row, and its epoch.

    ``check`` is called with each operator of the user's plan, and raises an error for unsupported ones.
    """

    def __init__(self, spark: SparkSession, check: Callable[[Operator], None]) -> None:
        self.spark = spark
        self._jvm = jvm_of(spark)
        self._plans = self._jvm.org.apache.spark.sql.catalyst.plans.logical
        self._check = check
        self._to_seq = partial(to_seq, self._jvm)

    def start(self, full_frame: DataFrame) -> PlanPair:
        """Start from a DataFrame whose last two columns are to be hidden; the user plan has the others."""
        plan = analysed(full_frame)
        *user_output, kind, epoch = to_list(plan.output())
        no_stream = self._jvm.scala.Option.empty()
        user_plan = self._plans.LocalRelation(self._to_seq(user_output), self._to_seq([]), False, no_stream)
        return PlanPair(user_plan, plan, kind, epoch)

    def user_frame(self, pair: PlanPair) -> DataFrame:
        return to_dataframe(self.spark, pair.user_plan)

    def full_frame(self, pair: PlanPair) -> DataFrame:
        return to_dataframe(self.spark, pair.full_plan)

    def extend(self, user_frame: DataFrame, pairs: tuple[PlanPair, ...]) -> PlanPair:
        """Rebuild the operators that an operation added to the user plan, on top of the full plan.

        ``pairs`` has the newest pair first. Spark may change operators below it, for example for a filter on
        a column that a select left out.
        """
        return self._rebuild(analysed(user_frame), pairs)

    def extend_function(self, user_frame: DataFrame, full_frame: DataFrame) -> PlanPair:
        """Give a function on the full plan the output attributes of the user's function."""
        node, output = analysed(full_frame), to_list(analysed(full_frame).output())
        user_output = [
            attribute.withNullability(True) for attribute in to_list(analysed(user_frame).output())
        ]
        # The function, the output, the child, whether it is a barrier, and the resource profile.
        arguments = [node.productElement(index) for index in range(node.productArity())]
        arguments[1] = self._to_seq([*user_output, *output[-2:]])
        rebuilt = getattr(self._plans, node_name(node))(*arguments)
        return PlanPair(analysed(user_frame), rebuilt, output[-2], output[-1])

    def without_nulls(self, pair: PlanPair) -> DataFrame:
        """Return the full DataFrame, with other values instead of the nulls of markers and fillers."""
        guards = self._guards(pair)
        columns = [guards.without_null(attribute) for attribute in to_list(pair.user_plan.output())]
        output = self._to_seq([*columns, pair.kind, pair.epoch])
        return to_dataframe(self.spark, self._plans.Project(output, pair.full_plan))

    def _rebuild(self, plan: JavaObject, pairs: tuple[PlanPair, ...]) -> PlanPair:
        for pair in pairs:
            if plan.fastEquals(pair.user_plan):
                return pair
        self._check(Operator(plan, self._jvm))
        child = self._rebuild(children(plan)[0], pairs)
        rebuilders = {"Project": self._project, "Filter": self._filter, "Generate": self._generate}
        rebuilt = rebuilders.get(node_name(plan), self._replace_child)(plan, child)
        return PlanPair(plan, rebuilt, child.kind, child.epoch)

    def _project(self, plan: JavaObject, child: PlanPair) -> JavaObject:
        guards = self._guards(child)
        columns = [guards.column(column) for column in to_list(plan.projectList())]
        return self._plans.Project(self._to_seq([*columns, child.kind, child.epoch]), child.full_plan)

    def _filter(self, plan: JavaObject, child: PlanPair) -> JavaObject:
        return self._plans.Filter(self._guards(child).condition(plan.condition()), child.full_plan)

    def _generate(self, plan: JavaObject, child: PlanPair) -> JavaObject:
        # The element of a marker is null.
        output = [attribute.withNullability(True) for attribute in to_list(plan.generatorOutput())]
        return self._plans.Generate(
            self._guards(child).generator(plan.generator()),
            plan.unrequiredChildIndex(),
            plan.outer(),
            plan.qualifier(),
            self._to_seq(output),
            child.full_plan,
        )

    def _replace_child(self, plan: JavaObject, child: PlanPair) -> JavaObject:
        return with_children(self._jvm, plan, [child.full_plan])

    def _guards(self, pair: PlanPair) -> Guards:
        return Guards(self.spark, pair.kind)


_UNGUARDED = ("AttributeReference", "Literal")
_ONE_ROW_GENERATORS = ("JsonTuple",)
"""Generators that return exactly one row for each input row."""


class Guards:
    """Guards resolved expressions; ``kind`` is the hidden attribute with the kind of a row."""

    def __init__(self, spark: SparkSession, kind: JavaObject) -> None:
        self._kind = kind
        self._jvm = jvm = jvm_of(spark)
        self._expressions = expressions = jvm.org.apache.spark.sql.catalyst.expressions
        # Looking up a name in the JVM takes as long as a call.
        self._case_when, self._default = expressions.CaseWhen, expressions.Literal.default
        self._tuple, self._option = jvm.scala.Tuple2, jvm.scala.Option.apply
        self._to_seq, self._with_children = partial(to_seq, jvm), partial(with_children, jvm)

    def column(self, expression: JavaObject) -> JavaObject:
        """Guard a column of a projection, and keep its name."""
        if node_name(expression) != "Alias":
            return expression
        (value,) = children(expression)
        return self._with_children(expression, [self._guard(value)])

    def condition(self, expression: JavaObject) -> JavaObject:
        """Guard the condition of a filter, so that markers and fillers pass it."""
        return self._if_row(self._wrap_udfs(expression), self._expressions.Literal.TrueLiteral())

    def generator(self, expression: JavaObject) -> JavaObject:
        """Guard a generator, so that it returns one row for a marker or a filler."""
        if node_name(expression) in _ONE_ROW_GENERATORS:
            return self._with_children(expression, [self._guard(child) for child in children(expression)])
        (value,) = children(expression)
        guarded = self._if_row(self._wrap_udfs(value), self._one_element(value.dataType()))
        return self._with_children(expression, [guarded])

    def without_null(self, attribute: JavaObject) -> JavaObject:
        """Replace the null of a marker or a filler, if the column's type has a default value."""
        return self._expressions.Alias(
            self._if_row(attribute, self._placeholder(attribute.dataType())),
            attribute.name(),
            attribute.exprId(),
            attribute.qualifier(),
            self._option(attribute.metadata()),
            self._to_seq([]),
        )

    @cached_property
    def _is_row(self) -> JavaObject:
        # The default value of a number is 0, which is ROW.
        return self._expressions.EqualTo(self._kind, self._default(self._kind.dataType()))

    @cached_property
    def _python_udf_pattern(self) -> JavaObject:
        return self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()

    def _guard(self, expression: JavaObject) -> JavaObject:
        if node_name(expression) in _UNGUARDED:
            return expression
        return self._if_row(self._wrap_udfs(expression), self._placeholder(expression.dataType()))

    def _if_row(self, value: JavaObject, otherwise: JavaObject) -> JavaObject:
        return self._case_when(self._to_seq([self._tuple(self._is_row, value)]), self._option(otherwise))

    def _placeholder(self, data_type: JavaObject) -> JavaObject:
        """Return the type's default value, or else null; pandas turns integers with nulls into floats."""
        try:
            return self._default(data_type)
        except JvmException:
            return self._expressions.Literal.create(None, data_type)

    def _one_element(self, data_type: JavaObject) -> JavaObject:
        literal = self._expressions.Literal
        if data_type.typeName() == "map":
            entry = [literal.default(data_type.keyType()), literal.create(None, data_type.valueType())]
            return self._expressions.CreateMap(self._to_seq(entry))
        return self._expressions.CreateArray(self._to_seq([literal.create(None, data_type.elementType())]))

    def _wrap_udfs(self, expression: JavaObject) -> JavaObject:
        """Wrap the Python functions in an expression: Spark calls them before it evaluates conditions."""
        if not expression.containsPattern(self._python_udf_pattern):
            return expression
        if node_name(expression) == "PythonUDF":
            return self._wrap_udf(expression)
        return self._with_children(expression, [self._wrap_udfs(child) for child in children(expression)])

    def _wrap_udf(self, udf: JavaObject) -> JavaObject:
        function = udf.func()
        command = bytes(function.command().toArray(self._jvm.scala.reflect.ClassTag.Byte()))
        wrapped = self._jvm.org.apache.spark.api.python.SimplePythonFunction(
            bytearray(wrap_command(command, udf.evalType(), udf.dataType().json())),
            function.envVars(),
            function.pythonIncludes(),
            function.pythonExec(),
            function.pythonVer(),
            function.broadcastVars(),
            function.accumulator(),
        )
        arguments = [self._kind, *map(self._guard_argument, children(udf))]
        return self._expressions.PythonUDF(
            udf.name(),
            wrapped,
            udf.dataType(),
            self._to_seq(arguments),
            udf.evalType(),
            udf.udfDeterministic(),
            udf.resultId(),
        )

    def _guard_argument(self, expression: JavaObject) -> JavaObject:
        if node_name(expression) == "NamedArgumentExpression":
            (value,) = children(expression)
            return self._with_children(expression, [self._guard_argument(value)])
        if node_name(expression) == "AttributeReference" and expression.nullable():
            return self._if_row(expression, self._placeholder(expression.dataType()))
        return self._guard(expression)
