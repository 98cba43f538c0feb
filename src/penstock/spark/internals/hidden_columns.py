"""Carries hidden columns through operations that Spark has resolved without them (classic sessions, Spark 4.2 and 4.3).

Each operation is done on the user's columns alone, so that names, stars, types and errors are Spark's own. The operators that it
adds to the analysed plan are then rebuilt over the carried plan, with the same attributes and the hidden columns beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.spark.internals.catalyst import (
    Operator,
    analysed,
    children,
    frame_of,
    listed,
    name_of,
    sequence,
)
from penstock.spark.internals.guards import Guards, Shield


@dataclass(frozen=True)
class PlanPair:
    """A plan of the user's columns, and the same with the hidden ones; all of them the JVM's."""

    plain: Any
    carried: Any
    kind: Any
    """The hidden attributes in the carried plan."""
    epoch: Any


class HiddenColumnRewriter:
    """Rebuilds the plans of one session with the hidden columns: the last two, the kind of a row and its epoch.

    Parameters
    ----------
    check
        Called with each operator of the user's; it raises for those that are not to be carried.
    shield
        Makes the form of users' Python functions that sees real rows alone.
    """

    def __init__(self, spark: SparkSession, check: Callable[[Operator], None], shield: Shield) -> None:
        java: Any = spark
        self.spark = spark
        self._jvm = java._jvm
        self._plans = self._jvm.org.apache.spark.sql.catalyst.plans.logical
        self._check, self._shield = check, shield

    def begin(self, carried: DataFrame) -> PlanPair:
        """The beginning of a query: the user's columns as a relation of their own, which Spark's messages may show."""
        plan = analysed(carried)
        *own, kind, epoch = listed(plan.output())
        nothing = self._jvm.scala.Option.empty()
        empty = self._plans.LocalRelation(self._sequence(own), self._sequence([]), False, nothing)
        return PlanPair(empty, plan, kind, epoch)

    def plain(self, known: PlanPair) -> DataFrame:
        """The DataFrame of the user's columns."""
        return frame_of(self.spark, known.plain)

    def carried(self, known: PlanPair) -> DataFrame:
        """The DataFrame with the hidden columns."""
        return frame_of(self.spark, known.carried)

    def carry(self, plain: DataFrame, known: tuple[PlanPair, ...]) -> PlanPair:
        """Rebuild what an operation added to a plan.

        Parameters
        ----------
        plain
            The user's columns after the operation.
        known
            What is carried already, the newest first. Spark may change what lies between the newest of them and the first, as it does
            for a filter on a column that a select left out.
        """
        return self._rebuilt(analysed(plain), known)

    def carry_function(self, plain: DataFrame, carried: DataFrame) -> PlanPair:
        """Put the attributes of a user's function over whole rows in place of those of the function that stands for it.

        Parameters
        ----------
        plain
            The DataFrame of `mapInArrow` or `mapInPandas` with the user's function.
        carried
            The same operation over the carried frame.
        """
        node, output = analysed(carried), listed(analysed(carried).output())
        own = [attribute.withNullability(True) for attribute in listed(analysed(plain).output())]
        # The function, the output, the child, whether it is a barrier, and the resource profile.
        parts = [node.productElement(place) for place in range(node.productArity())]
        parts[1] = self._sequence([*own, *output[-2:]])
        made = getattr(self._plans, name_of(node))(*parts)
        return PlanPair(analysed(plain), made, output[-2], output[-1])

    def without_nulls(self, known: PlanPair) -> DataFrame:
        """The carried DataFrame with no null in a marker or a filler.

        One null would turn the integers of a whole pandas batch into floats.
        """
        guards = self._guards(known)
        columns = [guards.without_null(attribute) for attribute in listed(known.plain.output())]
        given = self._sequence([*columns, known.kind, known.epoch])
        return frame_of(self.spark, self._plans.Project(given, known.carried))

    def _rebuilt(self, plan: Any, known: tuple[PlanPair, ...]) -> PlanPair:
        for each in known:
            if plan.fastEquals(each.plain):
                return each
        self._check(Operator(plan, self._jvm))
        below = self._rebuilt(children(plan)[0], known)
        make = {"Project": self._project, "Filter": self._filter, "Generate": self._generate}
        made = make.get(name_of(plan), self._same)(plan, below)
        return PlanPair(plan, made, below.kind, below.epoch)

    def _project(self, plan: Any, below: PlanPair) -> Any:
        guards = self._guards(below)
        columns = [guards.column(column) for column in listed(plan.projectList())]
        return self._plans.Project(self._sequence([*columns, below.kind, below.epoch]), below.carried)

    def _filter(self, plan: Any, below: PlanPair) -> Any:
        return self._plans.Filter(self._guards(below).condition(plan.condition()), below.carried)

    def _generate(self, plan: Any, below: PlanPair) -> Any:
        # A marker's element is null.
        output = [attribute.withNullability(True) for attribute in listed(plan.generatorOutput())]
        return self._plans.Generate(
            self._guards(below).generator(plan.generator()),
            plan.unrequiredChildIndex(),
            plan.outer(),
            plan.qualifier(),
            self._sequence(output),
            below.carried,
        )

    def _same(self, plan: Any, below: PlanPair) -> Any:
        return plan.withNewChildren(self._sequence([below.carried]))

    def _guards(self, known: PlanPair) -> Guards:
        return Guards(self.spark, known.kind, self._shield)

    def _sequence(self, items: list[Any]) -> Any:
        return sequence(self._jvm, items)
