"""The images of a row: its columns are read a whole column at a time, with the reasons for refused events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.debezium.columns import ColumnReader, Placeholder, first
from penstock.changes.debezium.declared import Declarations
from penstock.changes.debezium.decoding import Encoding

_BETWEEN = "\0"


@dataclass(frozen=True)
class ExpectedColumns:
    """The expected columns of a row after a change, so that a schema change of the table is noticed."""

    schema: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Columns that it may lack; ``*`` for all."""
    ignored: tuple[str, ...] = ()
    """Further columns that it may have; ``*`` for all."""

    @property
    def matter(self) -> bool:
        return "*" not in self.optional or "*" not in self.ignored

    def reasons(self, names: pa.ListArray, used: pa.Array, reasons: pa.Array) -> pa.Array:
        """Add the reasons of events in a mask whose row has other columns than expected."""
        if not self.matter:
            return reasons
        # Rows of a table mostly have the same columns.
        kinds = pc.binary_join(names, _BETWEEN).dictionary_encode()
        mismatches = pa.array([self._mismatch(text) for text in kinds.dictionary.to_pylist()], pa.string())
        refused = pc.and_(used, mismatches.is_valid().take(kinds.indices)).fill_null(False)
        return first(reasons, _only(mismatches.take(kinds.indices), refused))

    def _mismatch(self, names: str) -> str | None:
        columns = names.split(_BETWEEN)
        absent = [name for name in self.schema if name not in columns and name not in self.optional]
        if absent and "*" not in self.optional:
            return (
                f"after has no column {', '.join(absent)}, which was dropped or renamed, or added later: "
                "remove it from the schema, or name it in optional to read it as NULL"
            )
        more = [name for name in columns if name not in self.schema and name not in self.ignored]
        if more and "*" not in self.ignored:
            return (
                f"after has a column {', '.join(more)} that the schema lacks: add it to the schema, or name "
                "it in ignored"
            )
        return None


@dataclass(frozen=True)
class Reading:
    """Settings for reading the columns of an image."""

    schema: pa.Schema
    """The names, types and nullability of the columns."""
    row_id: tuple[str, ...]
    encodings: Mapping[str, Encoding]
    """By column."""
    unavailable: str | None
    columns: ExpectedColumns

    def image(
        self, name: str, image: pa.StructArray, schemas: pa.Array, used: pa.Array, reasons: pa.Array
    ) -> tuple[list[pa.Array], pa.Array]:
        """Read the columns of the images in a mask; return them, and the reasons with added ones.

        ``name`` is ``before``, of which a table may log only the key, or ``after``. Values come as text, and
        ``schemas`` are those of the events, null where one has none.
        """
        declarations = Declarations.of(schemas, name)
        read: list[pa.Array] = []
        for field, column in zip(self.schema, image.flatten(), strict=True):
            text = _only(column, used)
            values, refused = self._column(text, field, declarations, f"{name}.{field.name}")
            read.append(values)
            reasons = first(reasons, refused)
            if field.name in self.row_id or (name == "after" and not field.nullable):
                missing = pc.and_(used, text.is_null())
                why = f"{name}.{field.name} is missing or null"
                reasons = first(reasons, pc.if_else(missing, why, pa.scalar(None, pa.string())))
        return read, reasons

    def _column(
        self, column: pa.Array, field: pa.Field, declarations: Declarations, where: str
    ) -> tuple[pa.Array, pa.Array | None]:
        placeholder = None if self.unavailable is None else Placeholder(self.unavailable)
        reader = ColumnReader(self.encodings[field.name], placeholder)
        values = reasons = None
        for declared, events in declarations.by_column(field.name):
            part = column if events is None else _only(column, events)
            read, refused = reader.read(part, field.type, declared, where)
            values = read if values is None else pc.coalesce(values, read)
            reasons = first(reasons, refused)
        return values, reasons


def _only(column: pa.Array, mask: pa.Array) -> pa.Array:
    return pc.if_else(mask, column, pa.scalar(None, column.type))
