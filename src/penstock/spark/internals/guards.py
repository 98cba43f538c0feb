"""Expressions of a continuous query that look only at real rows (Spark 4.2, 4.3).

Markers and fillers, which pass every filter, get a value without them.

Without the guard a marker that is the copy of a row that a filter took out would meet what stands behind the filter: a division
by the zero that was filtered away, or a Python function that does not expect a null.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from penstock.spark.internals.catalyst import children, name_of, sequence
from penstock.spark.internals.sessions import JvmException

Shield = Callable[[bytes, int, str], bytes]
"""The form of a pickled Python function that sees real rows alone: of the command, Spark's number for its kind, and its return type."""
_PLAIN = ("AttributeReference", "Literal")
_ONE_ROW = ("JsonTuple",)
"""Generators that give one row for each, whatever it is."""


class Guards:
    """Makes the guarded form of resolved expressions.

    Parameters
    ----------
    spark
        A classic session.
    kind
        The attribute of the carried plan that says what a row is.
    shield
        Makes the form of users' Python functions that sees real rows alone.
    """

    def __init__(self, spark: Any, kind: Any, shield: Shield) -> None:
        self._kind, self._shield = kind, shield
        self._jvm = spark._jvm
        self._expressions = expressions = spark._jvm.org.apache.spark.sql.catalyst.expressions
        # To find a name in the JVM takes as long as to call it.
        self._case_when, self._default = expressions.CaseWhen, expressions.Literal.default
        self._tuple, self._option = spark._jvm.scala.Tuple2, spark._jvm.scala.Option.apply

    def column(self, expression: Any) -> Any:
        """A column of a projection, under its name."""
        if name_of(expression) != "Alias":
            return expression
        (value,) = children(expression)
        return self._with_children(expression, [self._value(value)])

    def condition(self, expression: Any) -> Any:
        """A filter's condition, which markers and fillers pass."""
        return self._case(self._shielded(expression), self._expressions.Literal.TrueLiteral())

    def generator(self, expression: Any) -> Any:
        """A generator that gives one row for a marker or a filler, whatever their array holds."""
        if name_of(expression) in _ONE_ROW:
            return self._with_children(expression, [self._value(child) for child in children(expression)])
        (value,) = children(expression)
        guarded = self._case(self._shielded(value), self._one_element(value.dataType()))
        return self._with_children(expression, [guarded])

    def without_null(self, attribute: Any) -> Any:
        """A column that is not null in a marker or a filler, where its type has anything else."""
        return self._expressions.Alias(
            self._case(attribute, self._something(attribute.dataType())),
            attribute.name(),
            attribute.exprId(),
            attribute.qualifier(),
            self._option(attribute.metadata()),
            self._sequence([]),
        )

    @cached_property
    def _is_row(self) -> Any:
        # The default of a number is 0, which is ROW.
        return self._expressions.EqualTo(self._kind, self._default(self._kind.dataType()))

    @cached_property
    def _python(self) -> Any:
        return self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()

    def _value(self, expression: Any) -> Any:
        if name_of(expression) in _PLAIN:
            return expression
        return self._case(self._shielded(expression), self._something(expression.dataType()))

    def _case(self, value: Any, otherwise: Any) -> Any:
        return self._case_when(self._sequence([self._tuple(self._is_row, value)]), self._option(otherwise))

    def _something(self, data_type: Any) -> Any:
        """A value that is not null, where the type has one: with a null, pandas would see floats instead of integers."""
        try:
            return self._default(data_type)
        except JvmException:
            return self._expressions.Literal.create(None, data_type)

    def _one_element(self, data_type: Any) -> Any:
        literal = self._expressions.Literal
        if data_type.typeName() == "map":
            entry = [literal.default(data_type.keyType()), literal.create(None, data_type.valueType())]
            return self._expressions.CreateMap(self._sequence(entry))
        return self._expressions.CreateArray(self._sequence([literal.create(None, data_type.elementType())]))

    def _shielded(self, expression: Any) -> Any:
        """The expression with each Python function in it shielded; Spark runs those ahead of any condition."""
        if not expression.containsPattern(self._python):
            return expression
        if name_of(expression) == "PythonUDF":
            return self._shielded_function(expression)
        return self._with_children(expression, [self._shielded(child) for child in children(expression)])

    def _shielded_function(self, udf: Any) -> Any:
        function = udf.func()
        command = bytes(function.command().toArray(self._jvm.scala.reflect.ClassTag.Byte()))
        shielded = self._jvm.org.apache.spark.api.python.SimplePythonFunction(
            bytearray(self._shield(command, udf.evalType(), udf.dataType().json())),
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
            shielded,
            udf.dataType(),
            self._sequence(arguments),
            udf.evalType(),
            udf.udfDeterministic(),
            udf.resultId(),
        )

    def _argument(self, expression: Any) -> Any:
        if name_of(expression) == "NamedArgumentExpression":
            (value,) = children(expression)
            return self._with_children(expression, [self._argument(value)])
        if name_of(expression) == "AttributeReference" and expression.nullable():
            return self._case(expression, self._something(expression.dataType()))
        return self._value(expression)

    def _sequence(self, items: list[Any]) -> Any:
        return sequence(self._jvm, items)

    def _with_children(self, tree: Any, below: list[Any]) -> Any:
        return tree.withNewChildren(self._sequence(below))
