"""Plans of a continuous query with hidden columns, besides the plans that the user sees (Spark 4.2, 4.3).

Each operation is applied to the user's columns only, so that names, stars, types and errors are Spark's own.
The operators that it adds to the analysed plan are then rebuilt over the carried plan, with the same
attributes plus the hidden columns.

Expressions are guarded: they are evaluated on real rows only. Markers and fillers pass every filter, and get
a value without evaluation of the expression. Otherwise a marker, whose values are arbitrary, would reach the
expressions after a filter, such as a division by a zero that the filter removes, or a Python function that
does not expect a null.
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
    """A JVM plan of the user's columns, and the same plan with the hidden columns."""

    plain: JavaObject
    carried: JavaObject
    kind: JavaObject
    """The hidden attribute of the carried plan with the kind of a row."""
    epoch: JavaObject
    """The hidden attribute with the row's epoch."""


class HiddenColumnRewriter:
    """Rebuilds a session's plans with the hidden columns as the last two: the kind of a row, and its epoch.

    ``check`` is called with each operator of the user, and raises an error for unsupported ones.
    """

    def __init__(self, spark: SparkSession, check: Callable[[Operator], None]) -> None:
        self.spark = spark
        self._jvm = jvm_of(spark)
        self._plans = self._jvm.org.apache.spark.sql.catalyst.plans.logical
        self._check = check
        self._to_seq = partial(to_seq, self._jvm)

    def begin(self, carried: DataFrame) -> PlanPair:
        """Start from a DataFrame whose last two columns are hidden; Spark's messages may show the others."""
        plan = analysed(carried)
        *own, kind, epoch = to_list(plan.output())
        nothing = self._jvm.scala.Option.empty()
        empty = self._plans.LocalRelation(self._to_seq(own), self._to_seq([]), False, nothing)
        return PlanPair(empty, plan, kind, epoch)

    def plain(self, pair: PlanPair) -> DataFrame:
        return to_dataframe(self.spark, pair.plain)

    def carried(self, pair: PlanPair) -> DataFrame:
        return to_dataframe(self.spark, pair.carried)

    def carry(self, plain: DataFrame, known: tuple[PlanPair, ...]) -> PlanPair:
        """Rebuild over the carried plan the operators that an operation added to the user's columns.

        Spark may change operators below the newest known pair, for example for a filter on a column that a
        select left out.
        """
        return self._rebuilt(analysed(plain), known)

    def carry_function(self, plain: DataFrame, carried: DataFrame) -> PlanPair:
        """Give a function over the carried plan the output attributes of the user's function."""
        node, output = analysed(carried), to_list(analysed(carried).output())
        own = [attribute.withNullability(True) for attribute in to_list(analysed(plain).output())]
        # The function, the output, the child, whether it is a barrier, and the resource profile.
        parts = [node.productElement(index) for index in range(node.productArity())]
        parts[1] = self._to_seq([*own, *output[-2:]])
        rebuilt = getattr(self._plans, node_name(node))(*parts)
        return PlanPair(analysed(plain), rebuilt, output[-2], output[-1])

    def without_nulls(self, pair: PlanPair) -> DataFrame:
        """Return the carried DataFrame with other values for the nulls of markers and fillers."""
        guards = self._guards(pair)
        columns = [guards.without_null(attribute) for attribute in to_list(pair.plain.output())]
        projected = self._to_seq([*columns, pair.kind, pair.epoch])
        return to_dataframe(self.spark, self._plans.Project(projected, pair.carried))

    def _rebuilt(self, plan: JavaObject, known: tuple[PlanPair, ...]) -> PlanPair:
        for pair in known:
            if plan.fastEquals(pair.plain):
                return pair
        self._check(Operator(plan, self._jvm))
        below = self._rebuilt(children(plan)[0], known)
        rebuild = {"Project": self._project, "Filter": self._filter, "Generate": self._generate}
        rebuilt = rebuild.get(node_name(plan), self._unchanged)(plan, below)
        return PlanPair(plan, rebuilt, below.kind, below.epoch)

    def _project(self, plan: JavaObject, below: PlanPair) -> JavaObject:
        guards = self._guards(below)
        columns = [guards.column(column) for column in to_list(plan.projectList())]
        return self._plans.Project(self._to_seq([*columns, below.kind, below.epoch]), below.carried)

    def _filter(self, plan: JavaObject, below: PlanPair) -> JavaObject:
        return self._plans.Filter(self._guards(below).condition(plan.condition()), below.carried)

    def _generate(self, plan: JavaObject, below: PlanPair) -> JavaObject:
        # A marker's element is null.
        output = [attribute.withNullability(True) for attribute in to_list(plan.generatorOutput())]
        return self._plans.Generate(
            self._guards(below).generator(plan.generator()),
            plan.unrequiredChildIndex(),
            plan.outer(),
            plan.qualifier(),
            self._to_seq(output),
            below.carried,
        )

    def _unchanged(self, plan: JavaObject, below: PlanPair) -> JavaObject:
        return with_children(self._jvm, plan, [below.carried])

    def _guards(self, pair: PlanPair) -> Guards:
        return Guards(self.spark, pair.kind)


_UNGUARDED = ("AttributeReference", "Literal")
_ONE_ROW_GENERATORS = ("JsonTuple",)
"""Generators that produce exactly one row for each input row."""


class Guards:
    """Builds the guarded form of resolved expressions; ``kind`` is the carried plan's attribute for it."""

    def __init__(self, spark: SparkSession, kind: JavaObject) -> None:
        self._kind = kind
        self._jvm = jvm = jvm_of(spark)
        self._expressions = expressions = jvm.org.apache.spark.sql.catalyst.expressions
        # Looking up a name in the JVM takes as long as calling it.
        self._case_when, self._default = expressions.CaseWhen, expressions.Literal.default
        self._tuple, self._option = jvm.scala.Tuple2, jvm.scala.Option.apply
        self._to_seq, self._with_children = partial(to_seq, jvm), partial(with_children, jvm)

    def column(self, expression: JavaObject) -> JavaObject:
        """Guard a column of a projection, and keep its name."""
        if node_name(expression) != "Alias":
            return expression
        (value,) = children(expression)
        return self._with_children(expression, [self._value(value)])

    def condition(self, expression: JavaObject) -> JavaObject:
        """Guard the condition of a filter, which markers and fillers pass."""
        return self._case(self._wrapped(expression), self._expressions.Literal.TrueLiteral())

    def generator(self, expression: JavaObject) -> JavaObject:
        """Guard a generator, which produces one row for a marker or a filler."""
        if node_name(expression) in _ONE_ROW_GENERATORS:
            return self._with_children(expression, [self._value(child) for child in children(expression)])
        (value,) = children(expression)
        guarded = self._case(self._wrapped(value), self._one_element(value.dataType()))
        return self._with_children(expression, [guarded])

    def without_null(self, attribute: JavaObject) -> JavaObject:
        """Replace the null of a marker or a filler, if the type of the column has another value."""
        return self._expressions.Alias(
            self._case(attribute, self._placeholder(attribute.dataType())),
            attribute.name(),
            attribute.exprId(),
            attribute.qualifier(),
            self._option(attribute.metadata()),
            self._to_seq([]),
        )

    @cached_property
    def _is_row(self) -> JavaObject:
        # The default of a number is 0, which is ROW.
        return self._expressions.EqualTo(self._kind, self._default(self._kind.dataType()))

    @cached_property
    def _python_udf_pattern(self) -> JavaObject:
        return self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()

    def _value(self, expression: JavaObject) -> JavaObject:
        if node_name(expression) in _UNGUARDED:
            return expression
        return self._case(self._wrapped(expression), self._placeholder(expression.dataType()))

    def _case(self, value: JavaObject, otherwise: JavaObject) -> JavaObject:
        return self._case_when(self._to_seq([self._tuple(self._is_row, value)]), self._option(otherwise))

    def _placeholder(self, data_type: JavaObject) -> JavaObject:
        """Return a literal, non-null if the type has one: a null would turn pandas' integers into floats."""
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

    def _wrapped(self, expression: JavaObject) -> JavaObject:
        """Wrap each Python function in an expression: Spark runs those before it evaluates conditions."""
        if not expression.containsPattern(self._python_udf_pattern):
            return expression
        if node_name(expression) == "PythonUDF":
            return self._wrapped_udf(expression)
        return self._with_children(expression, [self._wrapped(child) for child in children(expression)])

    def _wrapped_udf(self, udf: JavaObject) -> JavaObject:
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
        arguments = [self._kind, *map(self._argument, children(udf))]
        return self._expressions.PythonUDF(
            udf.name(),
            wrapped,
            udf.dataType(),
            self._to_seq(arguments),
            udf.evalType(),
            udf.udfDeterministic(),
            udf.resultId(),
        )

    def _argument(self, expression: JavaObject) -> JavaObject:
        if node_name(expression) == "NamedArgumentExpression":
            (value,) = children(expression)
            return self._with_children(expression, [self._argument(value)])
        if node_name(expression) == "AttributeReference" and expression.nullable():
            return self._case(expression, self._placeholder(expression.dataType()))
        return self._value(expression)
