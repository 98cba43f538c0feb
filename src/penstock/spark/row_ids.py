"""Columns by which a change feed tells rows apart, marked such that their mark goes where they go, also under another name."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql.types import StructField, StructType

_MARK = "penstock.rowId"


def marked(schema: StructType, row_id: Collection[str]) -> StructType:
    """The schema with a mark at the columns of a row id; Spark keeps a column's metadata wherever it is taken as it is.

    Parameters
    ----------
    row_id
        Names of columns; those inside structs are passed over.
    """
    return StructType([_marked(field) if field.name in row_id else field for field in schema])


def row_id_of(schema: StructType) -> list[str]:
    """The names that the marked columns have by now."""
    return [field.name for field in schema if field.metadata.get(_MARK)]


def _marked(field: StructField) -> StructField:
    return StructField(field.name, field.dataType, field.nullable, {**field.metadata, _MARK: True})
