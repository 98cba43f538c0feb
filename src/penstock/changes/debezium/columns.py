"""Vectorized reading of row images (``before`` and ``after``), and the reasons for refused events."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, reduce
from hashlib import md5
from typing import TypeAlias
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from penstock.changes.debezium.declared import Declarations, Declared, part_of
from penstock.changes.debezium.decoding import COUNTS, Encoding, decode_column, decoder, where_mask

_SHOWN_CHARACTERS = 50
_SEPARATOR = "\0"
ReadColumn: TypeAlias = tuple[pa.Array, pa.Array | None]
"""The values of a column, and the reasons for refused values; None if no value is refused."""


def is_supported(kind: pa.DataType) -> bool:
    numbers = pat.is_boolean, pat.is_integer, pat.is_floating, pat.is_decimal
    others = pat.is_string, pat.is_binary, pat.is_date, pat.is_timestamp
    if pat.is_nested(kind):
        return all(is_supported(kind.field(place).type) for place in range(kind.num_fields))
    return any(is_kind(kind) for is_kind in (*numbers, *others))


def text_type(kind: DataType) -> DataType:
    """Return the type that values are first parsed into: each type that is not nested becomes text."""
    if isinstance(kind, ArrayType):
        return ArrayType(text_type(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(StringType(), text_type(kind.valueType))
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, text_type(field.dataType)) for field in kind])
    return StringType()


@dataclass(frozen=True)
class Placeholder:
    """The placeholder that Debezium's PostgreSQL connector sends for an unchanged TOAST value."""

    text: str

    @cached_property
    def texts(self) -> pa.Array:
        """The placeholder encoded as text, bytes, an hstore in JSON, and an element of ``uuid[]``."""
        data = self.text.encode()
        of_map = json.dumps({self.text: self.text}, separators=(",", ":"))
        uuid = UUID(bytes=md5(data, usedforsecurity=False).digest(), version=3)
        return pa.array([self.text, base64.b64encode(data).decode(), data.hex(), of_map, str(uuid)])

    def lists(self, scale: int) -> pa.Array:
        """Return the placeholder encoded as arrays of integers, floats and decimals, one for each byte."""
        data = self.text.encode()
        forms = [
            map(str, data),
            (f"{byte}.0" for byte in data),
            (base64.b64encode(bytes([byte])).decode() for byte in data),
            (str(Decimal(byte).scaleb(-scale)) for byte in data),
        ]
        return pa.array([",".join(form) for form in forms])


@dataclass(frozen=True)
class ColumnReader:
    """Reader for the values of a column that was parsed into the type of :func:`text_type`."""

    encoding: Encoding
    placeholder: Placeholder | None

    def read(self, column: pa.Array, kind: pa.DataType, declared: Declared | None, where: str) -> ReadColumn:
        if pat.is_map(kind):
            return self._map(column, kind, declared, where)
        if pat.is_list(kind):
            return self._list(column, kind, declared, where)
        if pat.is_struct(kind):
            return self._struct(column, kind, declared, where)
        return self._value(column, kind, declared, where)

    def _value(
        self, column: pa.Array, kind: pa.DataType, declared: Declared | None, where: str
    ) -> ReadColumn:
        decode = decoder(kind, declared, self.encoding)
        values = pa.nulls(len(column), kind) if decode is None else decode_column(column, decode, kind)
        mask = None if self.placeholder is None else pc.is_in(column, self.placeholder.texts)
        reasons = self._unavailable(mask, where)
        unread = pc.and_(column.is_valid(), values.is_null())
        if pc.any(unread).as_py():
            shown = pc.utf8_slice_codeunits(column, 0, _SHOWN_CHARACTERS)
            cause = self._cause(kind, declared)
            why = f"{where} cannot be read as {sql_name(kind)}{cause}: "
            reasons = add_reasons(reasons, where_mask(pc.binary_join_element_wise(why, shown, ""), unread))
        return values, reasons

    def _cause(self, kind: pa.DataType, declared: Declared | None) -> str:
        local = pat.is_timestamp(kind) and kind.tz is not None and not self.encoding.counts_instants
        if local and (declared is None or declared.form in COUNTS):
            return (
                ", which has to be text with a zone (a count is a local time: read it as timestamp_ntz, or "
                "name the column in timestamps)"
            )
        return "" if declared is None else f", and its event declares it as {declared}"

    def _unavailable(self, mask: pa.Array | None, where: str) -> pa.Array | None:
        if mask is None or not pc.any(mask).as_py():
            return None
        why = "is an unchanged TOAST value, which was not sent: ALTER TABLE … REPLICA IDENTITY FULL sends it"
        return where_mask(f"{where} {why}", mask)

    def _list(self, column: pa.Array, kind: pa.DataType, declared: Declared | None, where: str) -> ReadColumn:
        items = part_of(declared, "items")
        inner, reasons = self.read(column.flatten(), kind.value_type, items, f"{where}[]")
        values = pa.ListArray.from_arrays(_offsets(column), inner, kind, mask=column.is_null())
        whole = self._unavailable(self._is_list_placeholder(column, kind.value_type, items), where)
        return values, add_reasons(whole, _reasons_of_lists(reasons, column))

    def _is_list_placeholder(
        self, column: pa.Array, item: pa.DataType, declared: Declared | None
    ) -> pa.Array | None:
        if self.placeholder is None or pat.is_nested(item):
            return None
        scale = item.scale if pat.is_decimal(item) else 0
        forms = self.placeholder.lists(scale if declared is None else declared.scale)
        # Join only arrays that have the length of the placeholder.
        long = pc.equal(pc.list_value_length(column), len(self.placeholder.text.encode()))
        if not pc.any(long).as_py():
            return None
        return pc.is_in(pc.binary_join(where_mask(column, long), ","), forms)

    def _map(self, column: pa.Array, kind: pa.DataType, declared: Declared | None, where: str) -> ReadColumn:
        entries = column.cast(pa.list_(pa.struct([("key", pa.string()), ("value", column.type.item_type)])))
        flat = entries.flatten()
        types = part_of(declared, "keys"), part_of(declared, "values")
        keys, of_keys = self.read(flat.field(0), kind.key_type, types[0], f"{where} key")
        items, of_items = self.read(flat.field(1), kind.item_type, types[1], f"{where}[]")
        values = pa.MapArray.from_arrays(_offsets(entries), keys, items, kind, mask=column.is_null())
        return values, _reasons_of_lists(add_reasons(of_keys, of_items), entries)

    def _struct(
        self, column: pa.Array, kind: pa.DataType, declared: Declared | None, where: str
    ) -> ReadColumn:
        read = [
            self.read(part, field.type, part_of(declared, field.name), f"{where}.{field.name}")
            for field, part in zip(kind, column.flatten(), strict=True)
        ]
        parts = [part for part, _ in read]
        values = pa.StructArray.from_arrays(parts, fields=list(kind), mask=column.is_null())
        return values, reduce(add_reasons, (reasons for _, reasons in read), None)


def add_reasons(reasons: pa.Array | None, more: pa.Array | None) -> pa.Array | None:
    """Add reasons for the events that have none yet."""
    if reasons is None or more is None:
        return more if reasons is None else reasons
    return pc.coalesce(reasons, more)


def _offsets(column: pa.Array) -> pa.Array:
    """Return the list offsets into the flattened values."""
    sizes = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    return pa.array(np.r_[0, np.cumsum(sizes)], pa.int32())


def _reasons_of_lists(reasons: pa.Array | None, column: pa.Array) -> pa.Array | None:
    """Return the first reason among the elements of each list."""
    if reasons is None:
        return None
    refused = np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False))
    parents = pc.list_parent_indices(column).take(pa.array(refused)).to_numpy()
    lists, places = np.unique(parents, return_index=True)
    first_refused = np.full(len(column), -1)
    first_refused[lists] = refused[places]
    return reasons.take(pa.array(first_refused, mask=first_refused < 0))


def sql_name(kind: pa.DataType) -> str:
    """Return the SQL name of a type."""
    names = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean"}
    if pat.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pat.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return names.get(str(kind), str(kind).removesuffix("32[day]"))


@dataclass(frozen=True)
class ExpectedColumns:
    """The columns that ``after`` is expected to have, for detecting schema changes of the table."""

    schema: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Columns that may be missing; ``*`` for all."""
    ignored: tuple[str, ...] = ()
    """Additional columns that are allowed; ``*`` for all."""

    @property
    def are_checked(self) -> bool:
        return "*" not in self.optional or "*" not in self.ignored

    def reasons(self, names: pa.ListArray, used: pa.Array, reasons: pa.Array) -> pa.Array:
        """Add reasons for the events in the mask ``used`` whose columns are not those expected."""
        if not self.are_checked:
            return reasons
        # Most rows of a table have the same columns.
        kinds = pc.binary_join(names, _SEPARATOR).dictionary_encode()
        mismatches = pa.array([self._mismatch(text) for text in kinds.dictionary.to_pylist()], pa.string())
        refused = pc.and_(used, mismatches.is_valid().take(kinds.indices)).fill_null(False)
        return add_reasons(reasons, where_mask(mismatches.take(kinds.indices), refused))

    def _mismatch(self, names: str) -> str | None:
        columns = names.split(_SEPARATOR)
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
class ImageReader:
    """Reader for the columns of row images."""

    schema: pa.Schema
    """Names, types and nullability of the columns."""
    row_id: tuple[str, ...]
    encodings: Mapping[str, Encoding]
    """Encodings by column."""
    unavailable: str | None
    columns: ExpectedColumns

    def read_image(
        self, name: str, image: pa.StructArray, schemas: pa.Array, used: pa.Array, reasons: pa.Array
    ) -> tuple[list[pa.Array], pa.Array]:
        """Read the columns of the images in the mask ``used``; return them, and all reasons so far.

        ``name`` is ``before``, for which a table may log only the key, or ``after``. The values of ``image``
        are text. ``schemas`` has the schema of each event, or null.
        """
        declarations = Declarations.of(schemas, name)
        read: list[pa.Array] = []
        for field, column in zip(self.schema, image.flatten(), strict=True):
            text = where_mask(column, used)
            values, refused = self._column(text, field, declarations, f"{name}.{field.name}")
            read.append(values)
            reasons = add_reasons(reasons, refused)
            if field.name in self.row_id or (name == "after" and not field.nullable):
                missing = pc.and_(used, text.is_null())
                reasons = add_reasons(reasons, where_mask(f"{name}.{field.name} is missing or null", missing))
        return read, reasons

    def _column(
        self, column: pa.Array, field: pa.Field, declarations: Declarations, where: str
    ) -> tuple[pa.Array, pa.Array | None]:
        placeholder = None if self.unavailable is None else Placeholder(self.unavailable)
        reader = ColumnReader(self.encodings[field.name], placeholder)
        values = reasons = None
        for declared, events in declarations.by_column(field.name):
            part = column if events is None else where_mask(column, events)
            read, refused = reader.read(part, field.type, declared, where)
            values = read if values is None else pc.coalesce(values, read)
            reasons = add_reasons(reasons, refused)
        return values, reasons
