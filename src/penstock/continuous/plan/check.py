"""Check of a continuous query's whole plan against the supported operators, and its Python stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.continuous.plan.allowed import PHYSICAL, check_operator, unsupported
from penstock.errors import ContinuousRefused
from penstock.spark.internals.catalyst import ARROW, PANDAS, PYTHON, Operator, analysed_plan, executed_plan
from penstock.spark.internals.requirements import parse_version
from penstock.spark.session import PIPELINED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAP_IN_ARROW, MAP_IN_PANDAS = "mapInArrow", "mapInPandas"
ARROW_UDF, PANDAS_UDF, PYTHON_UDF, PICKLED_UDF = "Arrow UDF", "pandas UDF", "Python UDF", "pickled UDF"
_STAGES = {"MapInArrow": MAP_IN_ARROW, "MapInPandas": MAP_IN_PANDAS, "BatchEvalPython": PICKLED_UDF}
_UDFS = {ARROW: ARROW_UDF, PANDAS: PANDAS_UDF, PYTHON: PYTHON_UDF}
_SLOW = {
    PANDAS_UDF: "A pandas UDF holds each row back for tens of milliseconds; an Arrow UDF for a few.",
    PICKLED_UDF: "A pickled Python UDF holds each row back for most of a second; an Arrow UDF for a few "
    "milliseconds.",
}
MANY_ROWS, FEW_ROWS = 8192, 64
"""Rows of a batch for Python (``spark.sql.execution.arrow.maxRecordsPerBatch``): for throughput, and for
latency."""


@dataclass(frozen=True)
class CheckedPlan:
    """The plan that Spark runs between a continuous query's reader and its writer."""

    python_stages: tuple[str, ...]
    """The stages that send rows through a Python worker of their own, in order: mapInArrow, mapInPandas,
    Arrow UDF, pandas UDF, Python UDF (row by row, in Arrow batches), pickled UDF. UDFs that Spark runs
    together are one stage."""

    def filler_rows(self, batch: int) -> int:
        """Return how many rows push the ones before them through all stages and into the writer.

        Parameters
        ----------
        batch
            The rows of a batch for Python.
        """
        # The JVM asks for one more row before it closes a batch, and another one pushes the last bytes out.
        return batch * (1 + len(self.python_stages)) + 2

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the latency of this plan for the user."""
        return tuple(_SLOW[stage] for stage in dict.fromkeys(self.python_stages) if stage in _SLOW)

    def require_pipelined(self, pipelined: bool, version: str) -> None:
        """Refuse Python stages if Spark would run them one by one, each waiting for the end of its input.

        Parameters
        ----------
        pipelined
            Whether the session has ``spark.python.udf.pipelined.enabled``.
        version
            Spark's; before 4.3 it has no such setting.

        Raises
        ------
        ContinuousRefused
        """
        old = parse_version(version) < (4, 3)
        if self.python_stages and (old or not pipelined):
            stages = ", ".join(dict.fromkeys(self.python_stages))
            fix = f"make it with ps.session(pipelined=True), or set {PIPELINED}=true when it starts"
            raise ContinuousRefused(
                f"The query has Python stages ({stages}), and this session holds rows back in such stages: "
                + (f"Spark {version} always does, use Spark 4.3." if old else f"{fix}."),
                condition="CONTINUOUS_REFUSED.NOT_PIPELINED",
                stages=self.python_stages,
            )


def check_plan(carried: DataFrame) -> CheckedPlan:
    """Check all operators of a continuous query, metadata columns included, against the list.

    Parameters
    ----------
    carried
        A DataFrame that begins with the reader: a ``mapInArrow`` over a range.

    Raises
    ------
    ContinuousRefused
        An operator of the analysed or of the physical plan is not on the list.
    """
    for operator in _operators(analysed_plan(carried)):
        if operator.name != "Range":
            check_operator(operator)
    stages: list[str] = []
    for operator in _operators(executed_plan(carried)):
        # The name of generated code ends with a number.
        name = operator.name.partition(" ")[0]
        if name not in PHYSICAL:
            raise unsupported(name)
        if name == "ArrowEvalPython":
            stages.append(_UDFS[operator.udf_kind()])
        elif name in _STAGES:
            stages.append(_STAGES[name])
    # The last is the reader.
    return CheckedPlan(tuple(reversed(stages[:-1])))


def _operators(operator: Operator) -> Iterator[Operator]:
    """Yield the operators of a plan without branches, from the top."""
    below = [operator]
    while below:
        if len(below) > 1:
            raise unsupported(operator.name)
        (operator,) = below
        yield operator
        below = operator.children()
