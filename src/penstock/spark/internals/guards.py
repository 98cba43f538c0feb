"""Expressions of a continuous query that are evaluated on real rows only (Spark 4.2, 4.3).

Markers and fillers pass every filter, and get a value without the expression being evaluated. Otherwise a
marker that is the copy of a filtered row would reach what comes after the filter: a division by the zero that
was filtered out, or a Python function that does not expect a null.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from penstock.spark.internals.catalyst import children, node_name, to_seq, with_children
from penstock.spark.internals.sessions import JvmException

FunctionWrapper = Callable[[bytes, int, str], bytes]
"""Wraps a pickled Python function, so that it is called with real rows only.

Called with the pickled command, Spark's number for
the kind of function, and its return type as JSON."""
_UNGUARDED = ("AttributeReference", "Literal")
_ONE_ROW_GENERATORS = ("JsonTuple",)
"""Generators that produce exactly one row for each input row."""


class Guards:
    """Builds the guarded form of resolved expressions.

    Parameters
    ----------
    spark
        A classic session.
    kind
        The attribute of the carried plan with the kind of each row.
    wrap
        Wraps users' Python functions.
    """

    def __init__(self, spark: Any, kind: Any, wrap: FunctionWrapper) -> None:
        self._kind, self._wrap = kind, wrap
        self._jvm = jvm = spark._jvm
        self._expressions = expressions = jvm.org.apache.spark.sql.catalyst.expressions
        # To look up a name in the JVM takes as long as to call it.
        self._case_when, self._default = expressions.CaseWhen, expressions.Literal.default
        self._tuple, self._option = jvm.scala.Tuple2, jvm.scala.Option.apply
        self._to_seq, self._with_children = partial(to_seq, jvm), partial(with_children, jvm)

    def column(self, expression: Any) -> Any:
        """Guard a column of a projection, and keep its name."""
        if node_name(expression) != "Alias":
            return expression
        (value,) = children(expression)
        return self._with_children(expression, [self._value(value)])

    def condition(self, expression: Any) -> Any:
        """Guard the condition of a filter, which markers and fillers pass."""
        return self._case(self._wrapped(expression), self._expressions.Literal.TrueLiteral())

    def generator(self, expression: Any) -> Any:
        """Guard a generator, which produces one row for a marker or a filler."""
        if node_name(expression) in _ONE_ROW_GENERATORS:
            return self._with_children(expression, [self._value(child) for child in children(expression)])
        (value,) = children(expression)
        guarded = self._case(self._wrapped(value), self._one_element(value.dataType()))
        return self._with_children(expression, [guarded])

    def without_null(self, attribute: Any) -> Any:
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
    def _is_row(self) -> Any:
        # The default of a number is 0, which is ROW.
        return self._expressions.EqualTo(self._kind, self._default(self._kind.dataType()))

    @cached_property
    def _python_udf_pattern(self) -> Any:
        return self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()

    def _value(self, expression: Any) -> Any:
        if node_name(expression) in _UNGUARDED:
            return expression
        return self._case(self._wrapped(expression), self._placeholder(expression.dataType()))

    def _case(self, value: Any, otherwise: Any) -> Any:
        return self._case_when(self._to_seq([self._tuple(self._is_row, value)]), self._option(otherwise))

    def _placeholder(self, data_type: Any) -> Any:
        """Return a non-null literal if the type has one: with a null, pandas would see floats instead of
        integers.
        """
        try:
            return self._default(data_type)
        except JvmException:
            return self._expressions.Literal.create(None, data_type)

    def _one_element(self, data_type: Any) -> Any:
        literal = self._expressions.Literal
        if data_type.typeName() == "map":
            entry = [literal.default(data_type.keyType()), literal.create(None, data_type.valueType())]
            return self._expressions.CreateMap(self._to_seq(entry))
        return self._expressions.CreateArray(self._to_seq([literal.create(None, data_type.elementType())]))

    def _wrapped(self, expression: Any) -> Any:
        """Wrap each Python function in an expression: Spark runs those before it evaluates any condition."""
        if not expression.containsPattern(self._python_udf_pattern):
            return expression
        if node_name(expression) == "PythonUDF":
            return self._wrapped_udf(expression)
        return self._with_children(expression, [self._wrapped(child) for child in children(expression)])

    def _wrapped_udf(self, udf: Any) -> Any:
        function = udf.func()
        command = bytes(function.command().toArray(self._jvm.scala.reflect.ClassTag.Byte()))
        wrapped = self._jvm.org.apache.spark.api.python.SimplePythonFunction(
            bytearray(self._wrap(command, udf.evalType(), udf.dataType().json())),
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

    def _argument(self, expression: Any) -> Any:
        if node_name(expression) == "NamedArgumentExpression":
            (value,) = children(expression)
            return self._with_children(expression, [self._argument(value)])
        if node_name(expression) == "AttributeReference" and expression.nullable():
            return self._case(expression, self._placeholder(expression.dataType()))
        return self._value(expression)
