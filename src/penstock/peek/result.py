"""The result of ``take`` and ``take_sample``: rows as a sequence, an Arrow table, a DataFrame, text or
HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, overload

import pyarrow as pa
import pyarrow.types as pat
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.types import StructType

from penstock.arguments import truncated
from penstock.arrow.row_text import align_columns, rows_as_text

if TYPE_CHECKING:
    import pandas as pd


SHOWN_ROWS = 50
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class TextTable:
    """The first rows of a table, as cells of text."""

    schema: pa.Schema
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    """Lines below the table."""

    @classmethod
    def of(cls, table: pa.Table, note: str, time_zone: str) -> TextTable:
        """Format a table, with its instants in the given time zone."""
        more = table.num_rows - SHOWN_ROWS
        shown = _in_zone(table.slice(0, SHOWN_ROWS), time_zone)
        return cls(
            shown.schema,
            tuple(_cell(name if name.isprintable() else repr(name)[1:-1]) for name in shown.column_names),
            tuple(tuple(map(_cell, line)) for line in rows_as_text(shown)),
            (f"… {more:,} more", note) if more > 0 else (note,),
        )

    def text(self) -> str:
        """Return the table as text, in aligned columns."""
        rule = ["-" * max(map(len, column)) for column in zip(self.heads, *self.lines, strict=True)]
        right = [place for place, field in enumerate(self.schema) if _is_number(field.type)]
        shown = align_columns([self.heads, rule, *self.lines], right, margin="")
        return "\n".join([*shown, *(f"({note})" for note in self.notes)])

    def html(self) -> str:
        """Return the table as HTML; a column's type is the tooltip of its name."""
        sides = ["right" if _is_number(field.type) else "left" for field in self.schema]
        heads = "".join(
            f'<th title="{escape(str(field.type))}" style="text-align: {side}">{escape(head)}</th>'
            for field, side, head in zip(self.schema, sides, self.heads, strict=True)
        )
        body = ""
        for line in self.lines:
            cells = zip(line, sides, strict=True)
            shown = (f'<td style="text-align: {side}">{escape(cell)}</td>' for cell, side in cells)
            body += f"<tr>{''.join(shown)}</tr>"
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<div><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"


def _cell(text: str) -> str:
    return truncated(text, SHOWN_CHARACTERS)


def _in_zone(table: pa.Table, time_zone: str) -> pa.Table:
    """Convert instants to a time zone, or keep their own if Arrow does not know it."""
    fields = [field.with_type(_zoned(field.type, time_zone)) for field in table.schema]
    try:
        local = table.cast(pa.schema(fields))
        # Arrow looks up a time zone only when it converts a value.
        list(rows_as_text(local))
    except (pa.ArrowException, KeyError, ValueError):
        return table
    return local


def _zoned(kind: pa.DataType, time_zone: str) -> pa.DataType:
    if pat.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, time_zone)
    if pat.is_struct(kind):
        return pa.struct([field.with_type(_zoned(field.type, time_zone)) for field in kind])
    if pat.is_list(kind):
        return pa.list_(kind.value_field.with_type(_zoned(kind.value_type, time_zone)))
    return kind


def _is_number(kind: pa.DataType) -> bool:
    return bool(pat.is_integer(kind) or pat.is_floating(kind) or pat.is_decimal(kind))


@dataclass(frozen=True, eq=False, repr=False)
class TakeResult(Sequence[Row]):
    """Rows of a stream, as a sequence of Rows. ``print`` and notebooks show them as a table.

    Parameters
    ----------
    schema
        The schema of the DataFrame.
    asked
        The requested number of rows.
    complete
        False if the timeout passed before there were that many rows.
    seconds
        How long it took, in seconds.
    seen
        The number of rows that the sample was drawn from; None for the first rows.
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
    ) -> TakeResult:
        """Return the result of a DataFrame, from tables with its columns. If it has no columns, the tables
        may have others.
        """
        spark = df.sparkSession
        table = pa.concat_tables(tables) if tables else spark.createDataFrame([], df.schema).toArrow()
        table = table if df.columns else table.select([])
        zone = str(spark.conf.get("spark.sql.session.timeZone"))
        return cls(df.schema, asked, complete, seconds, seen, table, spark, zone)

    @cached_property
    def _rows(self) -> list[Row]:
        rows: list[Row] = ArrowTableToRowsConversion.convert(self._table, self.schema)
        return rows

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        return self._rows[place]

    def __eq__(self, other: object) -> bool:
        return self._rows == list(other) if isinstance(other, TakeResult | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # as of a list

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table, as PySpark's ``toArrow`` does."""
        return self._table

    def to_df(self) -> DataFrame:
        """Return a static Spark DataFrame."""
        return self._spark.createDataFrame(self._table, self.schema)

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas DataFrame, as PySpark's ``toPandas`` does."""
        return self.to_df().toPandas()

    @property
    def note(self) -> str:
        """One line with the number of rows, and whether these are all rows or a sample."""
        rows = f"{len(self):,} row{'' if len(self) == 1 else 's'}"
        if not self.complete:
            return f"{rows} of {self.asked:,}: there were no more within {self.seconds:.3g} s"
        return rows if self.seen is None else f"{rows}, a sample of {self.seen:,}"

    def __repr__(self) -> str:
        return self._text_table().text()

    def _repr_html_(self) -> str:
        return self._text_table().html()

    def _text_table(self) -> TextTable:
        return TextTable.of(self._table, self.note, self._time_zone)
