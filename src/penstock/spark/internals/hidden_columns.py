"""Plans of a continuous query with hidden columns, beside the plans that the user sees (classic sessions,
Spark 4.2 and 4.3).

Each operation is done on the user's columns alone, so that names, stars, types and errors are Spark's own.
The operators that it adds to the analysed plan are then rebuilt over the carried plan, with the same
attributes plus the hidden columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.spark.internals.catalyst import (
    Operator,
    analysed,
    children,
    node_name,
    to_dataframe,
    to_list,
    to_seq,
    with_children,
)
from penstock.spark.internals.guards import FunctionWrapper, Guards


@dataclass(frozen=True)
class PlanPair:
    """A JVM plan of the user's columns, and the same plan with the hidden columns."""

    plain: Any
    carried: Any
    kind: Any
    """The hidden attribute of the carried plan with the kind of a row."""
    epoch: Any
    """The hidden attribute with the row's epoch."""


class HiddenColumnRewriter:
    """Rebuilds a session's plans with the hidden columns as the last two: the kind of a row, and its epoch.

    Parameters
    ----------
    check
        Called with each operator of the user; raises an error for unsupported ones.
    wrap
        Wraps users' Python functions, so that they are called with real rows only.
    """

    def __init__(self, spark: SparkSession, check: Callable[[Operator], None], wrap: FunctionWrapper) -> None:
        java: Any = spark
        self.spark = spark
        self._jvm = java._jvm
        self._plans = self._jvm.org.apache.spark.sql.catalyst.plans.logical
        self._check, self._wrap = check, wrap
        self._to_seq = partial(to_seq, self._jvm)

    def begin(self, carried: DataFrame) -> PlanPair:
        """Start from a DataFrame whose last two columns are hidden.

        The user's columns become a relation of their own, which Spark's messages may show.
        """
        plan = analysed(carried)
        *own, kind, epoch = to_list(plan.output())
        nothing = self._jvm.scala.Option.empty()
        empty = self._plans.LocalRelation(self._to_seq(own), self._to_seq([]), False, nothing)
        return PlanPair(empty, plan, kind, epoch)

    def plain(self, pair: PlanPair) -> DataFrame:
        """Return the DataFrame of the user's columns."""
        return to_dataframe(self.spark, pair.plain)

    def carried(self, pair: PlanPair) -> DataFrame:
        """Return the DataFrame with the hidden columns."""
        return to_dataframe(self.spark, pair.carried)

    def carry(self, plain: DataFrame, known: tuple[PlanPair, ...]) -> PlanPair:
        """Rebuild the operators that an operation added to a plan.

        Parameters
        ----------
        plain
            The user's columns after the operation.
        known
            The pairs built so far, the newest first. Spark may change the operators between the newest and
            the first, as it does for a filter on a column that a select left out.
        """
        return self._rebuilt(analysed(plain), known)

    def carry_function(self, plain: DataFrame, carried: DataFrame) -> PlanPair:
        """Give a function over whole rows in the carried plan the output attributes of the user's function.

        Parameters
        ----------
        plain
            The DataFrame of `mapInArrow` or `mapInPandas` with the user's function.
        carried
            The same operation over the carried DataFrame.
        """
        node, output = analysed(carried), to_list(analysed(carried).output())
        own = [attribute.withNullability(True) for attribute in to_list(analysed(plain).output())]
        # The function, the output, the child, whether it is a barrier, and the resource profile.
        parts = [node.productElement(index) for index in range(node.productArity())]
        parts[1] = self._to_seq([*own, *output[-2:]])
        rebuilt = getattr(self._plans, node_name(node))(*parts)
        return PlanPair(analysed(plain), rebuilt, output[-2], output[-1])

    def without_nulls(self, pair: PlanPair) -> DataFrame:
        """Return the carried DataFrame without nulls in markers and fillers.

        One null would turn the integers of a whole pandas batch into floats.
        """
        guards = self._guards(pair)
        columns = [guards.without_null(attribute) for attribute in to_list(pair.plain.output())]
        projected = self._to_seq([*columns, pair.kind, pair.epoch])
        return to_dataframe(self.spark, self._plans.Project(projected, pair.carried))

    def _rebuilt(self, plan: Any, known: tuple[PlanPair, ...]) -> PlanPair:
        for pair in known:
            if plan.fastEquals(pair.plain):
                return pair
        self._check(Operator(plan, self._jvm))
        below = self._rebuilt(children(plan)[0], known)
        rebuild = {"Project": self._project, "Filter": self._filter, "Generate": self._generate}
        rebuilt = rebuild.get(node_name(plan), self._unchanged)(plan, below)
        return PlanPair(plan, rebuilt, below.kind, below.epoch)

    def _project(self, plan: Any, below: PlanPair) -> Any:
        guards = self._guards(below)
        columns = [guards.column(column) for column in to_list(plan.projectList())]
        return self._plans.Project(self._to_seq([*columns, below.kind, below.epoch]), below.carried)

    def _filter(self, plan: Any, below: PlanPair) -> Any:
        return self._plans.Filter(self._guards(below).condition(plan.condition()), below.carried)

    def _generate(self, plan: Any, below: PlanPair) -> Any:
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

    def _unchanged(self, plan: Any, below: PlanPair) -> Any:
        return with_children(self._jvm, plan, [below.carried])

    def _guards(self, pair: PlanPair) -> Guards:
        return Guards(self.spark, pair.kind, self._wrap)
