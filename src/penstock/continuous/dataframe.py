"""The DataFrame for transforms of a continuous query, which hides the engine's metadata columns."""

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

_ROW_METHODS = (
    "alias", "drop", "dropna", "fillna", "filter", "replace", "select", "selectExpr", "to", "toDF", "where",
    "withColumn", "withColumnRenamed", "withColumns", "withColumnsRenamed", "withMetadata",
)  # fmt: skip
"""Methods that return a frame; the plan shows their columns and expressions."""
_SCHEMA_ATTRIBUTES = ("colRegex", "columns", "dtypes", "explain", "printSchema", "schema")
"""Attributes that come from the DataFrame without the metadata columns."""
_HIDDEN_FIELDS = (StructField(KIND, ByteType()), StructField(EPOCH, LongType()))


class ContinuousFrame:
    """Replacement for ``pyspark.sql.DataFrame`` that refuses unsupported operations by name.

    `begin_frame` and the methods of a frame return frames. Spark executes `full_frame`, never the frame
    itself.
    """

    def __init__(
        self, rewriter: HiddenColumnRewriter, user_frame: DataFrame, pairs: tuple[PlanPair, ...]
    ) -> None:
        self._rewriter = rewriter
        self._user_frame = user_frame
        self._pairs = pairs

    @property
    def full_frame(self) -> DataFrame:
        """The DataFrame that Spark executes: the user's columns, then the metadata columns."""
        return self._rewriter.full_frame(self._pairs[0])

    @property
    def sparkSession(self) -> SparkSession:
        return self._rewriter.spark

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
        return apply_transform(self, lambda frame: func(frame, *args, **kwargs))

    def mapInArrow(
        self,
        func: Function[pa.RecordBatch],
        schema: StructType | str,
        barrier: bool = False,
        profile: ResourceProfile | None = None,
    ) -> ContinuousFrame:
        """Apply a function to record batches; it is called again after each pause and each epoch."""
        user_frame = self._user_frame.mapInArrow(func, schema)
        wrapped = wrap_arrow_function(func, user_frame.schema)
        return self._apply_function(
            user_frame, self.full_frame.mapInArrow(wrapped, _full_schema(user_frame.schema)), profile
        )

    def mapInPandas(
        self,
        func: Function[pd.DataFrame],
        schema: StructType | str,
        barrier: bool = False,
        profile: ResourceProfile | None = None,
    ) -> ContinuousFrame:
        """Apply a function to pandas DataFrames; it is called again after each pause and each epoch."""
        user_frame = self._user_frame.mapInPandas(func, schema)
        rows, wrapped = (
            self._rewriter.without_nulls(self._pairs[0]),
            wrap_pandas_function(func, user_frame.schema),
        )
        return self._apply_function(
            user_frame, rows.mapInPandas(wrapped, _full_schema(user_frame.schema)), profile
        )

    def _apply_function(
        self, user_frame: DataFrame, full_frame: DataFrame, profile: ResourceProfile | None
    ) -> ContinuousFrame:
        if profile is not None:
            # All stages of a continuous query run in the same tasks.
            raise unsupported_error("resource profile")
        _refuse_hidden_names(user_frame.columns)
        pair = self._rewriter.extend_function(user_frame, full_frame)
        return ContinuousFrame(self._rewriter, user_frame, (pair, *self._pairs))

    def _extend(self, user_frame: DataFrame) -> ContinuousFrame:
        _refuse_hidden_names(user_frame.columns)
        pair = self._rewriter.extend(user_frame, self._pairs)
        return ContinuousFrame(self._rewriter, user_frame, (pair, *self._pairs))

    def __getattr__(self, name: str) -> Any:
        if name in _SCHEMA_ATTRIBUTES:
            return getattr(self._user_frame, name)
        if name in _ROW_METHODS:
            return lambda *args, **kwargs: self._extend(getattr(self._user_frame, name)(*args, **kwargs))
        if name in PROPERTIES:
            raise unsupported_method_error(name)
        if not name.startswith("_"):
            if is_dataframe_attribute(name):
                return _refusal_of(name)
            if name in self._user_frame.columns:
                return self._user_frame[name]
        raise PySparkAttributeError(
            errorClass="ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": name}
        )

    def __getitem__(
        self, item: int | str | Column | list[Column | str] | tuple[Column | str, ...]
    ) -> Column | ContinuousFrame:
        selected: Column | DataFrame = self._user_frame[item]
        return selected if isinstance(selected, Column) else self._extend(selected)

    def __dir__(self) -> list[str]:
        return dir(self._user_frame)

    def __repr__(self) -> str:
        return f"Continuous{self._user_frame!r}"


def _full_schema(schema: StructType) -> StructType:
    """Return a function's schema with the metadata columns, and without the metadata of its fields."""
    return StructType([*(StructField(field.name, field.dataType) for field in schema), *_HIDDEN_FIELDS])


def _refusal_of(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise (
            unsupported_error(OPERATORS_OF_METHODS[name])
            if name in OPERATORS_OF_METHODS
            else unsupported_method_error(name)
        )

    return refuse


def begin_frame(full_frame: DataFrame) -> ContinuousFrame:
    """Return the frame for a reader, whose last two columns are the metadata columns."""
    _refuse_hidden_names(full_frame.columns[:-2])
    rewriter = HiddenColumnRewriter(full_frame.sparkSession, check_operator)
    pair = rewriter.start(full_frame)
    return ContinuousFrame(rewriter, rewriter.user_frame(pair), (pair,))


def apply_transform(
    frame: ContinuousFrame, function: Callable[[ContinuousFrame], ContinuousFrame]
) -> ContinuousFrame:
    """Apply a user's transform to a frame; return the result."""
    result = function(frame)
    if not isinstance(result, ContinuousFrame) or result._pairs[-1] is not frame._pairs[-1]:
        raise ContinuousRefusedError(
            "a transform of a continuous query must return a DataFrame derived from its argument, but this "
            f"one returned {type(result).__name__}: return the DataFrame, or {OTHER_TRIGGER}",
            condition="CONTINUOUS_REFUSED.OTHER_FRAME",
            given=type(result).__name__,
        )
    return result


def _refuse_hidden_names(columns: list[str]) -> None:
    for name in columns:
        # Spark ignores case.
        if name.lower() in (KIND, EPOCH):
            raise ContinuousRefusedError(
                f"a column of a continuous query cannot be called {name}, because the engine uses that name "
                "for a metadata column: rename it",
                condition="CONTINUOUS_REFUSED.COLUMN_NAME",
                column=name,
            )
