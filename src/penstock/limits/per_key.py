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
from penstock.errors import InvalidInputError, InvalidOptionError
from penstock.instants import interval_micros
from penstock.limits.per_key_tasks import PACKED, CountInState, FirstRowsOfBatch, KeyColumns, PackRows
from penstock.limits.rows import check_rows
from penstock.spark.schemas import is_case_sensitive, to_struct
from penstock.spark.shuffle_batches import PLACE, SCHEMA, unpack

_STATE = StructType([StructField("seen", BinaryType())])


@dataclass(frozen=True)
class KeyLimit:
    """A limit on the rows of each key, as a transformation.

    Parameters
    ----------
    rows
        How many rows of each key pass.
    per
        The columns of the key.
    forget_ms
        Milliseconds after a key's last row after which its count is dropped; never when None.
    """

    rows: int
    per: tuple[str, ...]
    forget_ms: int | None = None

    @classmethod
    def of(cls, rows: int, per: Sequence[str], ttl: str | None) -> KeyLimit:
        """Check and convert the arguments of ``stream.limit`` and ``first_rows``.

        Raises
        ------
        InvalidInputError
        """
        check_rows(rows)
        names = column_names("per", per)
        if not names or len(set(names)) != len(names):
            raise InvalidInputError(
                f"per names one or more columns, each once, not {in_quotes(per)}", parameter="per"
            )
        return cls(rows, names, _milliseconds(ttl))

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Return the first rows of each key."""
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
                known, hint = ", ".join(frame.columns[:20]), did_you_mean(name, frame.columns)
                raise InvalidInputError(
                    f"per names the column {in_quotes(name)}, which does not exist.{hint} The columns are "
                    f"{known}",
                    column=name,
                )
            places.append(names.index(wanted))
        fields = StructType([frame.schema.fields[place] for place in places])
        check_key(canonical_schema(fields), fields.names)
        return KeyColumns(tuple(places))


def first_rows(df: DataFrame, n: int, *, per: Sequence[str], ttl: str | None = None) -> DataFrame:
    """Return the first rows of each key, of a batch or a stream; the same rows for both if each key is in
    one partition.

    The order of rows is that of the input's partitions, and of the rows in each partition; in a stream,
    earlier micro-batches are first. A stream keeps the count of each key in Spark's state store, and needs
    output mode append.

    Parameters
    ----------
    df
        Static or streaming.
    n
        How many rows of each key pass.
    per
        The key columns: numbers, strings, binary values, booleans, dates or times. Null is a key like any
        other.
    ttl
        In a stream, how long after a key's last row its count is dropped, such as ``"1 hour"``, by the
        clock of the micro-batches; its next row then counts as the first. None keeps counts for ever. A
        batch ignores it.

    Raises
    ------
    InvalidInputError
        When a column does not exist, or an argument has the wrong type.
    UnsupportedTypeError
        When a key column has a type without a hash.
    """
    require("df", df, DataFrame, "a DataFrame")
    return KeyLimit.of(n, per, ttl)(df)


def _milliseconds(text: object) -> int | None:
    if text is None:
        return None
    micros = interval_micros(text) if isinstance(text, str) else None
    if not micros or micros < 1_000:
        raise InvalidOptionError(
            f"ttl is text such as '1 hour' or '500 ms', at least one millisecond, not {in_quotes(text)}",
            option="ttl",
        )
    return micros // 1_000
