"""The first rows of each key, of a stream or of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import BinaryType, StructField, StructType

from penstock.arguments import column_names, did_you_mean, in_quotes, require
from penstock.arrow.key_hash import check_key
from penstock.arrow.schema import canonical_schema
from penstock.errors import InvalidInput, InvalidOption
from penstock.instants import interval_micros
from penstock.limits.per_key_tasks import PACKED, CountInState, FirstRowsOfBatch, KeyColumns, PackRows
from penstock.limits.rows import check_rows
from penstock.spark.schemas import is_case_sensitive, to_struct
from penstock.spark.shuffle_batches import PLACE, SCHEMA, unpack

_STATE = StructType([StructField("seen", BinaryType())])


@dataclass(frozen=True)
class KeyLimit:
    """A limit for each key, as a transformation.

    Parameters
    ----------
    rows
        How many rows of each key pass.
    per
        The columns of the key.
    forget_ms
        Milliseconds after the last row of a key at which it is forgotten; never when None.
    """

    rows: int
    per: tuple[str, ...]
    forget_ms: int | None = None

    @classmethod
    def of(cls, rows: int, per: Sequence[str], forget_after: str | None) -> KeyLimit:
        """From what a caller gives.

        Raises
        ------
        InvalidInput
        """
        check_rows(rows)
        names = column_names("per", per)
        if not names or len(set(names)) != len(names):
            raise InvalidInput(
                f"per names one or more columns, each once, not {in_quotes(per)}", parameter="per"
            )
        return cls(rows, names, _milliseconds(forget_after))

    def __call__(self, frame: DataFrame) -> DataFrame:
        """The first rows of each key."""
        key = self._key(frame)
        packed = frame.mapInArrow(PackRows(key, self.rows), to_struct(PACKED))
        if not frame.isStreaming:
            return packed.repartition(PLACE).mapInArrow(FirstRowsOfBatch(key, self.rows), frame.schema)
        counted = packed.groupBy(PLACE).applyInPandasWithState(
            CountInState(key, self.rows, self.forget_ms),
            to_struct(SCHEMA),
            _STATE,
            "append",
            GroupStateTimeout.NoTimeout,
        )
        return counted.mapInArrow(unpack, frame.schema)

    def _key(self, frame: DataFrame) -> KeyColumns:
        exact = is_case_sensitive(frame.sparkSession)
        names = [name if exact else name.lower() for name in frame.columns]
        places = []
        for name in self.per:
            wanted = name if exact else name.lower()
            if wanted not in names:
                raise InvalidInput(
                    f"per names the column {in_quotes(name)}, which is not there.{did_you_mean(name, frame.columns)} The columns "
                    f"are {', '.join(frame.columns[:20])}",
                    column=name,
                )
            places.append(names.index(wanted))
        fields = StructType([frame.schema.fields[place] for place in places])
        check_key(canonical_schema(fields), fields.names)
        return KeyColumns(tuple(places))


def first_rows(df: DataFrame, n: int, *, per: Sequence[str], forget_after: str | None = None) -> DataFrame:
    """The first rows of each key, of a batch or of a stream; both give the same rows where all of a key are in one partition.

    Rows are in the order of the input's partitions, and in each partition in its order; on a stream those of earlier micro-batches
    come first. There the count of each key is kept in Spark's state store, and the output mode is append.

    Parameters
    ----------
    df
        Static or streaming.
    n
        How many rows of each key.
    per
        The columns of the key: numbers, strings, binary values, booleans, dates or times. Nulls are a key like any other.
    forget_after
        On a stream, how long after its last row a key is forgotten, such as ``"1 hour"``, by the clock of the micro-batches; its next row
        is the first one then. For ever when None. In a batch all rows come at once.

    Raises
    ------
    InvalidInput
        When a column is not there, or an argument is of another kind.
    UnsupportedType
        When a column of the key is of another type.
    """
    require("df", df, DataFrame, "a DataFrame")
    return KeyLimit.of(n, per, forget_after)(df)


def _milliseconds(text: object) -> int | None:
    if text is None:
        return None
    micros = interval_micros(text) if isinstance(text, str) else None
    if not micros or micros < 1_000:
        raise InvalidOption(
            f"forget_after is text such as '1 hour' or '500 ms', of a millisecond at least, not {in_quotes(text)}",
            option="forget_after",
        )
    return micros // 1_000
