"""What a change feed promises of its columns, as marks in their metadata: Spark keeps them wherever a column is taken as it is.

So a sink knows a feed's column behind selections and under another name, and a computed one by its having none.
"""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql.types import StructField, StructType

_ROW_ID, _VALUE, _UNCHANGED = "penstock.rowId", "penstock.value", "penstock.unchanged"
_STEP, _STEPS, _SPLIT = "penstock.step", "penstock.steps", "penstock.split"


def with_feed_metadata(
    schema: StructType,
    row_id: Collection[str],
    *,
    unchanged: str | None = None,
    sequence: str | None = None,
    ordered: str | None = None,
    split: bool = False,
) -> StructType:
    """A feed's schema with marks.

    Parameters
    ----------
    row_id
        The columns that tell rows apart; those inside structs are passed over.
    unchanged
        The column with the names of columns whose values a change does not tell.
    sequence
        The column that orders the changes of a row inside a commit.
    ordered
        A column that every selection of change rows keeps, where a commit may have several changes of a row: it is to say that
        ``sequence`` has to be there as well.
    split
        Whether such a commit may come in several micro-batches.
    """
    fields = list(schema)
    if unchanged is not None:
        fields = [
            _with(field, _UNCHANGED, True) if field.name == unchanged else _value(field) for field in fields
        ]
    fields = [_with(field, _ROW_ID, True) if field.name in row_id else field for field in fields]
    fields = [_with(field, _STEP, True) if field.name == sequence else field for field in fields]
    if split:
        fields = [_with(field, _SPLIT, True) if field.name == sequence else field for field in fields]
    if sequence in schema.names:
        fields = [_with(field, _STEPS, sequence) if field.name == ordered else field for field in fields]
    return StructType(fields)


def row_id_columns(schema: StructType) -> list[str]:
    """The names that the row id's columns have by now."""
    return [field.name for field in schema if field.metadata.get(_ROW_ID)]


def unchanged_column(schema: StructType) -> str | None:
    """The name that the column with the names of untold values has by now; None where there is none."""
    return next((field.name for field in schema if field.metadata.get(_UNCHANGED)), None)


def sequence_column(schema: StructType) -> str | None:
    """The name that the column which orders the changes of a row inside a commit has by now; None where there is none."""
    return next((field.name for field in schema if field.metadata.get(_STEP)), None)


def is_split(schema: StructType) -> bool:
    """Whether a commit with several changes of a row may come in several micro-batches."""
    return any(field.metadata.get(_SPLIT) for field in schema)


def required_sequence(schema: StructType) -> str | None:
    """The feed's name of that column where a commit may have several changes of a row; None where it has one at most."""
    return next((str(field.metadata[_STEPS]) for field in schema if _STEPS in field.metadata), None)


def feed_column(field: StructField) -> str | None:
    """The feed's name of a column that is as the feed gives it, where a change may leave its value out."""
    return field.metadata.get(_VALUE)


def _value(field: StructField) -> StructField:
    kind = field.dataType
    if isinstance(kind, StructType):
        # A feed of several tables has a struct for each, and names the columns inside.
        field = StructField(
            field.name, StructType([_value(each) for each in kind]), field.nullable, field.metadata
        )
    return _with(field, _VALUE, field.name)


def _with(field: StructField, mark: str, value: object) -> StructField:
    return StructField(field.name, field.dataType, field.nullable, {**field.metadata, mark: value})
