"""Promises of a change feed about its columns, kept in the columns' metadata.

Spark keeps the metadata of a column through selections and renames, and a computed column has none. So a sink
recognizes the feed's columns under any name.
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
    """Add a feed's promises to the metadata of its schema.

    Parameters
    ----------
    row_id
        The columns that identify rows; those inside structs are ignored.
    unchanged
        The column with the names of the columns that have unchanged TOAST values.
    sequence
        The column that orders the changes of a row inside a commit.
    ordered
        A column that every selection of change rows keeps, if a commit may have several changes of a row: its
        metadata says that ``sequence`` is required as well.
    split
        Whether such a commit may span several micro-batches.
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
    """Return the current names of the columns that identify rows."""
    return [field.name for field in schema if field.metadata.get(_ROW_ID)]


def unchanged_column(schema: StructType) -> str | None:
    """Return the current name of the column that lists unchanged TOAST values, if there is one."""
    return next((field.name for field in schema if field.metadata.get(_UNCHANGED)), None)


def sequence_column(schema: StructType) -> str | None:
    """Return the current name of the column that orders a row's changes inside a commit, if any."""
    return next((field.name for field in schema if field.metadata.get(_STEP)), None)


def is_split(schema: StructType) -> bool:
    """Return whether a commit with several changes of a row may span several micro-batches."""
    return any(field.metadata.get(_SPLIT) for field in schema)


def required_sequence(schema: StructType) -> str | None:
    """Return the feed's name of the sequence column if a commit may have several changes of a row."""
    return next((str(field.metadata[_STEPS]) for field in schema if _STEPS in field.metadata), None)


def feed_column(field: StructField) -> str | None:
    """Return the feed's name of an uncomputed column in which a change may have an unchanged TOAST value."""
    return field.metadata.get(_VALUE)


def _value(field: StructField) -> StructField:
    kind = field.dataType
    if isinstance(kind, StructType):
        # A feed of several tables has a struct for each table, and lists the columns inside.
        field = StructField(
            field.name, StructType([_value(inner) for inner in kind]), field.nullable, field.metadata
        )
    return _with(field, _VALUE, field.name)


def _with(field: StructField, key: str, value: object) -> StructField:
    return StructField(field.name, field.dataType, field.nullable, {**field.metadata, key: value})
