"""The DataFrame that a continuous query's transforms get; it hides the engine's metadata columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec

from pyspark.errors import PySparkAttributeError
from pyspark.sql import Column
from pyspark.sql.types import ByteType, LongType, StructField, StructType

from penstock.continuous.channel import EPOCH, KIND
from penstock.continuous.plan_check import (
    OPERATORS_OF_METHODS,
    OTHER_TRIGGER,
    PROPERTIES,
    check_operator,
    unsupported_error,
    unsupported_method_error,
)
from penstock.continuous.user_functions import Function, wrap_arrow_function, wrap_pandas_function
from penstock.errors import ContinuousRefusedError
from penstock.spark.internals.hidden_columns import HiddenColumnRewriter, PlanPair
from penstock.spark.internals.sessions import is_dataframe_attribute, na_functions

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, DataFrameNaFunctions, SparkSession

P = ParamSpec("P")

_MAP_LIKE = (
    "alias", "drop", "dropna", "fillna", "filter", "replace", "select", "selectExpr", "to", "toDF", "where",
    "withColumn", "withColumnRenamed", "withColumns", "withColumnsRenamed", "withMetadata",
)  # fmt: skip
"""Methods that return another frame; the plan shows their columns and expressions."""
_READ_ONLY = ("colRegex", "columns", "dtypes", "explain", "printSchema", "schema")
"""Attributes of the frame without the metadata columns."""
_HIDDEN_FIELDS = (StructField(KIND, ByteType()), StructField(EPOCH, LongType()))


class ContinuousFrame:
    """Replacement for ``pyspark.sql.DataFrame`` that refuses unsupported operations by name.

    Frames come from `begin_frame` and from operations on another frame. Spark executes `carried`, never the
    frame itself.
    """

    def __init__(self, carrier: HiddenColumnRewriter, plain: DataFrame, known: tuple[PlanPair, ...]) -> None:
        self._carrier = carrier
        self._plain = plain
        self._known = known

    @property
    def carried(self) -> DataFrame:
        """The DataFrame for Spark to run: the user's columns, then the metadata columns."""
        return self._carrier.carried(self._known[0])

    @property
    def sparkSession(self) -> SparkSession:
        return self._carrier.spark

    @property
    def isStreaming(self) -> bool:
        return True

    @property
    def na(self) -> DataFrameNaFunctions:
        return na_functions(self)

    def transform(
        self,
        func: Callable[Concatenate[ContinuousFrame, P], ContinuousFrame],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ContinuousFrame:
        return transformed(self, lambda frame: func(frame, *args, **kwargs))

    def mapInArrow(
        self,
        func: Function[pa.RecordBatch],
        schema: StructType | str,
        barrier: bool = False,
        profile: ResourceProfile | None = None,
    ) -> ContinuousFrame:
        """Apply a function to record batches, again after each pause in the stream and each epoch."""
        plain = self._plain.mapInArrow(func, schema)
        wrapped = wrap_arrow_function(func, plain.schema)
        return self._mapped(plain, self.carried.mapInArrow(wrapped, _carried(plain.schema)), profile)

    def mapInPandas(
        self,
        func: Function[pd.DataFrame],
        schema: StructType | str,
        barrier: bool = False,
        profile: ResourceProfile | None = None,
    ) -> ContinuousFrame:
        """Apply a function to pandas DataFrames, again after each pause in the stream and each epoch."""
        plain = self._plain.mapInPandas(func, schema)
        rows, wrapped = self._carrier.without_nulls(self._known[0]), wrap_pandas_function(func, plain.schema)
        return self._mapped(plain, rows.mapInPandas(wrapped, _carried(plain.schema)), profile)

    def _mapped(
        self, plain: DataFrame, carried: DataFrame, profile: ResourceProfile | None
    ) -> ContinuousFrame:
        if profile is not None:
            # The whole plan of a continuous query runs in the same tasks.
            raise unsupported_error("resource profile")
        _refuse_hidden_names(plain.columns)
        made = self._carrier.carry_function(plain, carried)
        return ContinuousFrame(self._carrier, plain, (made, *self._known))

    def _derived(self, plain: DataFrame) -> ContinuousFrame:
        _refuse_hidden_names(plain.columns)
        made = self._carrier.carry(plain, self._known)
        return ContinuousFrame(self._carrier, plain, (made, *self._known))

    def __getattr__(self, name: str) -> Any:
        if name in _READ_ONLY:
            return getattr(self._plain, name)
        if name in _MAP_LIKE:
            return lambda *args, **kwargs: self._derived(getattr(self._plain, name)(*args, **kwargs))
        if name in PROPERTIES:
            raise unsupported_method_error(name)
        if not name.startswith("_"):
            if is_dataframe_attribute(name):
                return _refusing(name)
            if name in self._plain.columns:
                return self._plain[name]
        raise PySparkAttributeError(
            errorClass="ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": name}
        )

    def __getitem__(
        self, item: int | str | Column | list[Column | str] | tuple[Column | str, ...]
    ) -> Column | ContinuousFrame:
        selected: Column | DataFrame = self._plain[item]
        return selected if isinstance(selected, Column) else self._derived(selected)

    def __dir__(self) -> list[str]:
        return dir(self._plain)

    def __repr__(self) -> str:
        return f"Continuous{self._plain!r}"


def _carried(schema: StructType) -> StructType:
    """Return a function's schema with the metadata columns added and its fields' metadata removed."""
    return StructType([*(StructField(field.name, field.dataType) for field in schema), *_HIDDEN_FIELDS])


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise (
            unsupported_error(OPERATORS_OF_METHODS[name])
            if name in OPERATORS_OF_METHODS
            else unsupported_method_error(name)
        )

    return refuse


def begin_frame(carried: DataFrame) -> ContinuousFrame:
    """Return the frame over a continuous query's reader: the source's columns, then the metadata columns."""
    _refuse_hidden_names(carried.columns[:-2])
    carrier = HiddenColumnRewriter(carried.sparkSession, check_operator)
    begin = carrier.begin(carried)
    return ContinuousFrame(carrier, carrier.plain(begin), (begin,))


def transformed(
    frame: ContinuousFrame, function: Callable[[ContinuousFrame], ContinuousFrame]
) -> ContinuousFrame:
    """Apply a user's transform to a frame, and return the result."""
    made = function(frame)
    if not isinstance(made, ContinuousFrame) or made._known[-1] is not frame._known[-1]:
        raise ContinuousRefusedError(
            "a transform of a continuous query must return a DataFrame derived from the one that it got, but "
            f"this one returned {type(made).__name__}: return the DataFrame, or {OTHER_TRIGGER}",
            condition="CONTINUOUS_REFUSED.OTHER_FRAME",
            given=type(made).__name__,
        )
    return made


def _refuse_hidden_names(columns: list[str]) -> None:
    for name in columns:
        # Spark ignores case.
        if name.lower() in (KIND, EPOCH):
            raise ContinuousRefusedError(
                f"a column of a continuous query cannot be called {name}, because the engine has a metadata "
                "column of that name: rename it",
                condition="CONTINUOUS_REFUSED.COLUMN_NAME",
                column=name,
            )
