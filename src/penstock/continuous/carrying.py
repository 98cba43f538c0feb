"""Carries the hidden columns through operations that Spark has resolved without them.

Each operation is done on the user's columns alone, so that names, stars, types and errors are Spark's own. The operators that it
adds to the analysed plan are then rebuilt over the carried plan, with the same attributes and the hidden columns beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.continuous.allowed import check_node, children, listed
from penstock.continuous.guards import Guards


@dataclass(frozen=True)
class Carried:
    """A plan of the user's columns, and the same with the hidden ones."""

    plain: Any
    """Spark's analysed plan."""
    carried: Any
    kind: Any
    """The hidden attributes in the carried plan."""
    epoch: Any


def analysed(frame: Any) -> Any:
    """The analysed plan of a classic DataFrame."""
    return frame._jdf.queryExecution().analyzed()


def frame_of(spark: Any, plan: Any) -> Any:
    """The DataFrame of a plan."""
    from pyspark.sql import DataFrame

    return DataFrame(
        spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan), spark
    )


def begun(carried: Any) -> Carried:
    """The beginning of a query: the user's columns as a relation of their own, which Spark's messages may show.

    Parameters
    ----------
    carried
        A DataFrame whose last two columns are the hidden ones.
    """
    jvm, plan = carried.sparkSession._jvm, analysed(carried)
    *own, kind, epoch = listed(plan.output())
    relation = jvm.org.apache.spark.sql.catalyst.plans.logical.LocalRelation
    sequence = jvm.PythonUtils.toSeq
    empty = relation(sequence(own), sequence([]), False, jvm.scala.Option.empty())
    return Carried(empty, plan, kind, epoch)


def carry(spark: Any, plain: Any, known: tuple[Carried, ...]) -> Carried:
    """Rebuild what an operation added to a plan.

    Parameters
    ----------
    spark
        The session.
    plain
        The analysed plan of the user's columns after the operation.
    known
        What is carried already; Spark may change what lies between the newest of them and the first, as it does for a filter on a
        column that a select left out.

    Raises
    ------
    ContinuousRefused
        The operation is not for continuous queries.
    """
    return _Rebuilding(spark, known).rebuilt(plain)


class _Rebuilding:
    def __init__(self, spark: Any, known: tuple[Carried, ...]) -> None:
        self._spark = spark
        self._jvm = spark._jvm
        self._plans = spark._jvm.org.apache.spark.sql.catalyst.plans.logical
        self._known = known

    def rebuilt(self, plan: Any) -> Carried:
        for each in self._known:
            if plan.fastEquals(each.plain):
                return each
        check_node(plan, self._jvm)
        below = self.rebuilt(children(plan)[0])
        make = {"Project": self._project, "Filter": self._filter, "Generate": self._generate}
        made = make.get(str(plan.nodeName()), self._same)
        carried = made(plan, below, Guards(self._spark, below.kind))
        return Carried(plan, carried, below.kind, below.epoch)

    def _project(self, plan: Any, below: Carried, guards: Guards) -> Any:
        columns = [guards.column(column) for column in listed(plan.projectList())]
        return self._plans.Project(self._sequence([*columns, below.kind, below.epoch]), below.carried)

    def _filter(self, plan: Any, below: Carried, guards: Guards) -> Any:
        return self._plans.Filter(guards.condition(plan.condition()), below.carried)

    def _generate(self, plan: Any, below: Carried, guards: Guards) -> Any:
        # A marker's element is null.
        output = [attribute.withNullability(True) for attribute in listed(plan.generatorOutput())]
        return self._plans.Generate(
            guards.generator(plan.generator()),
            plan.unrequiredChildIndex(),
            plan.outer(),
            plan.qualifier(),
            self._sequence(output),
            below.carried,
        )

    def _same(self, plan: Any, below: Carried, guards: Guards) -> Any:
        return plan.withNewChildren(self._sequence([below.carried]))

    def _sequence(self, items: list[Any]) -> Any:
        return self._jvm.PythonUtils.toSeq(items)


def carry_function(spark: Any, plain: Any, carried: Any) -> Carried:
    """Put the attributes of a user's function over whole rows in place of those of the function that stands for it.

    Parameters
    ----------
    spark
        The session.
    plain
        The DataFrame of `mapInArrow` or `mapInPandas` with the user's function.
    carried
        The same operation over the carried frame.
    """
    node, output = analysed(carried), listed(analysed(carried).output())
    own = [attribute.withNullability(True) for attribute in listed(analysed(plain).output())]
    make = getattr(spark._jvm.org.apache.spark.sql.catalyst.plans.logical, str(node.nodeName()))
    # The function, the output, the child, whether it is a barrier, and the resource profile.
    parts = [node.productElement(place) for place in range(node.productArity())]
    parts[1] = spark._jvm.PythonUtils.toSeq([*own, *output[-2:]])
    return Carried(analysed(plain), make(*parts), output[-2], output[-1])


def without_nulls(spark: Any, known: Carried) -> Any:
    """The carried DataFrame with no null in a marker or a filler.

    One null would turn the integers of a whole pandas batch into floats.
    """
    guards = Guards(spark, known.kind)
    columns = [guards.without_null(attribute) for attribute in listed(known.plain.output())]
    make = spark._jvm.org.apache.spark.sql.catalyst.plans.logical.Project
    given = spark._jvm.PythonUtils.toSeq([*columns, known.kind, known.epoch])
    return frame_of(spark, make(given, known.carried))
