"""Rows that were taken from a stream: a list, an Arrow table, a DataFrame of pandas or Spark, and a table on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.types import StructType

from penstock.taking.shown import Sheet

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Taken(Sequence[Row]):
    """Rows of a stream; a list of them in every respect, and ``print`` and notebooks show a table.

    Parameters
    ----------
    schema
        Of the DataFrame.
    asked
        How many rows were asked for.
    complete
        False where the time was over before there were so many.
    seconds
        How long it took.
    seen
        Of how many rows they are a sample; None where they are the first ones.
    """

    schema: StructType
    asked: int
    complete: bool
    seconds: float
    seen: int | None
    _table: pa.Table
    _spark: SparkSession
    _time_zone: str

    @classmethod
    def of(
        cls,
        df: DataFrame,
        tables: Sequence[pa.Table],
        asked: int,
        seconds: float,
        *,
        complete: bool,
        seen: int | None = None,
    ) -> Taken:
        """The rows of tables with the columns of a DataFrame."""
        spark = df.sparkSession
        table = pa.concat_tables(tables) if tables else spark.createDataFrame([], df.schema).toArrow()
        zone = str(spark.conf.get("spark.sql.session.timeZone"))
        return cls(df.schema, asked, complete, seconds, seen, table, spark, zone)

    @cached_property
    def _rows(self) -> list[Row]:
        found: list[Row] = ArrowTableToRowsConversion.convert(self._table, self.schema)
        return found

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        return self._rows[place]

    def __eq__(self, other: object) -> bool:
        return self._rows == list(other) if isinstance(other, Taken | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # as of a list

    def to_arrow(self) -> pa.Table:
        """The rows as PySpark's ``toArrow`` gives them."""
        return self._table

    def frame(self) -> DataFrame:
        """The rows as a Spark DataFrame at rest."""
        return self._spark.createDataFrame(self._table, self.schema)

    def toPandas(self) -> pd.DataFrame:
        """The rows as PySpark's ``toPandas`` gives them."""
        return self.frame().toPandas()

    @property
    def note(self) -> str:
        """What is to be said of them, in a line."""
        rows = f"{len(self):,} row{'' if len(self) == 1 else 's'}"
        if not self.complete:
            return f"{rows} of {self.asked:,}: no more came within {self.seconds:.3g} s"
        return rows if self.seen is None else f"{rows}, a sample of {self.seen:,}"

    def __str__(self) -> str:
        return self._sheet().text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._sheet().html()

    def _sheet(self) -> Sheet:
        return Sheet.of(self._table, self.note, self._time_zone)
