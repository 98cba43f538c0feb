"""The canonical Arrow form of schemas, which is the form that PySpark uses.

Stored rows, rows of Spark's readers and writers, and appended rows are all converted to it, so no higher
layer has to distinguish between ``string`` and ``large_string``, or between units of timestamps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.spark_json import (
    canonical_spark_struct,
    check_names,
    fields_from_json,
    join,
    json_from_fields,
    spark_metadata,
    unsupported,
)
from penstock.errors import SchemaMismatchError
from penstock.json_text import Json, unreadable_record

_MAX_PRECISION = 38

# Alternatives to types that Spark does not have.
_ALTERNATIVES: dict[pa.DataType, str] = {
    pa.uint8(): "int16",
    pa.uint16(): "int32",
    pa.uint32(): "int64",
    pa.uint64(): "decimal128(20, 0)",
    pa.float16(): "float32",
    pa.month_day_nano_interval(): "duration('us'), or an int32 number of months",
}

_CANONICAL_TYPES: frozenset[pa.DataType] = frozenset(
    {
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.binary(),
        pa.date32(),
        pa.null(),
    }
)


def canonical_schema(schema: pa.Schema | object) -> pa.Schema:
    """Convert a schema to the Arrow form that PySpark uses for the same columns in the time zone UTC.

    Related Arrow types are normalised: strings and binaries of any layout, lists of any layout, dictionaries
    to their values, timestamps and durations to microseconds, all time zones to UTC, times to nanoseconds,
    small decimals to ``decimal128``. Nullability and Spark's column metadata are kept; other metadata is
    dropped.

    A schema is a ``pyarrow.Schema``; a pyspark ``StructType``, or an object whose ``json()`` returns Spark's
    schema JSON; or this JSON as a dict.
    """
    if isinstance(schema, pa.Schema):
        fields = _canonical_fields(list(schema), "")
    else:
        fields = fields_from_json(_struct_json(schema))
    if not fields:
        raise SchemaMismatchError(
            "the schema has no columns: name at least one", condition="SCHEMA_MISMATCH.INVALID_SCHEMA"
        )
    return pa.schema(fields)


def spark_json(schema: pa.Schema) -> str:
    """Return a schema's canonical form in Spark's JSON, for ``StructType.fromJson(json.loads(...))``."""
    value = json_from_fields(list(canonical_schema(schema)))
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def schema_to_bytes(schema: pa.Schema) -> bytes:
    """Return the schema as one Arrow IPC schema message."""
    return bytes(schema.serialize().to_pybytes())


def schema_from_bytes(data: bytes) -> pa.Schema:
    """Parse an Arrow IPC schema message from a store; raise StoreError if it is invalid."""
    with _translating_errors():
        # A store already has the canonical form. This call decodes every name and time zone, which may not be
        # valid UTF-8.
        return canonical_schema(pa.ipc.read_schema(pa.py_buffer(data)))


def fields_from_bytes(data: bytes, key: bytes) -> tuple[list[pa.Field], list[bytes]]:
    """Parse the fields in an Arrow IPC schema message from a store, and their metadata for one key.

    The metadata of a field without the key is empty. Several fields may have the same name.
    """
    with _translating_errors():
        fields = list(pa.ipc.read_schema(pa.py_buffer(data)))
        values = [(field.metadata or {}).get(key, b"") for field in fields]
        return [canonical_schema(pa.schema([field])).field(0) for field in fields], values


@contextmanager
def _translating_errors() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, SchemaMismatchError) as error:
        raise unreadable_record("the schema of a queue", error) from None


def unknown_column(name: str, schema: pa.Schema) -> SchemaMismatchError:
    """Return the error for a column that a schema does not have."""
    columns, hint = ", ".join(schema.names), did_you_mean(name, schema.names)
    return SchemaMismatchError(
        f"there is no column {in_quotes(name)}; the columns are {columns}.{hint}",
        condition="SCHEMA_MISMATCH.UNKNOWN_COLUMN",
        column=name,
    )


def canonical_type(arrow_type: pa.DataType, path: str) -> pa.DataType:
    """Return the canonical form of a type; ``path`` is the column's dotted path, for errors."""
    if arrow_type in _CANONICAL_TYPES:
        return arrow_type
    if pat.is_nested(arrow_type):
        return _canonical_nested(arrow_type, path)
    if pat.is_dictionary(arrow_type):
        return canonical_type(arrow_type.value_type, path)
    if pat.is_decimal(arrow_type):
        return _canonical_decimal(arrow_type, path)
    if pat.is_timestamp(arrow_type):
        return pa.timestamp("us", tz=None if arrow_type.tz is None else "UTC")
    return _canonical_simple(arrow_type, path)


def is_wider(new: pa.DataType, old: pa.DataType, *, key: bool = False) -> bool:
    """Return whether a type can represent all values of another type of its family, and more values.

    This applies to larger integers, floats and decimals. With ``key``, equal values must also have the same
    key hash in both types; the hash of a decimal depends on its scale.
    """
    if pat.is_signed_integer(new) and pat.is_signed_integer(old):
        return bool(new.bit_width > old.bit_width)
    if pat.is_floating(new) and pat.is_floating(old):
        return bool(new.bit_width > old.bit_width)
    if not (pat.is_decimal(new) and pat.is_decimal(old)) or new == old:
        return False
    if new.precision - new.scale < old.precision - old.scale:
        return False
    return bool(new.scale == old.scale if key else new.scale >= old.scale)


def _canonical_simple(arrow_type: pa.DataType, path: str) -> pa.DataType:
    if pat.is_large_string(arrow_type) or pat.is_string_view(arrow_type):
        return pa.string()
    if (
        pat.is_large_binary(arrow_type)
        or pat.is_fixed_size_binary(arrow_type)
        or pat.is_binary_view(arrow_type)
    ):
        return pa.binary()
    if pat.is_date64(arrow_type):
        return pa.date32()
    if pat.is_time(arrow_type):
        return pa.time64("ns")
    if pat.is_duration(arrow_type):
        return pa.duration("us")
    raise unsupported(path, arrow_type, _alternative_to(arrow_type))


def _alternative_to(arrow_type: pa.DataType) -> str:
    if isinstance(arrow_type, pa.BaseExtensionType):
        return f"its storage type, {arrow_type.storage_type}"
    if pat.is_run_end_encoded(arrow_type):
        return f"its value type, {arrow_type.value_type}"
    if pat.is_union(arrow_type):
        return "a struct with one nullable field for each alternative"
    return _ALTERNATIVES.get(arrow_type, "a type that Spark SQL has")


def _canonical_decimal(arrow_type: pa.DataType, path: str) -> pa.DataType:
    precision, scale = arrow_type.precision, arrow_type.scale
    if precision > _MAX_PRECISION:
        raise unsupported(path, arrow_type, f"decimal128(38, {min(scale, _MAX_PRECISION)}) or string")
    if not 0 <= scale <= precision:
        wider = min(_MAX_PRECISION, precision - min(scale, 0))
        raise unsupported(path, arrow_type, f"decimal128({max(wider, scale)}, {max(scale, 0)})")
    return pa.decimal128(precision, scale)


def _canonical_nested(arrow_type: pa.DataType, path: str) -> pa.DataType:
    if pat.is_map(arrow_type):
        key = canonical_type(arrow_type.key_type, join(path, "key"))
        value = canonical_type(arrow_type.item_type, join(path, "value"))
        return pa.map_(
            pa.field("key", key, nullable=False),
            pa.field("value", value, nullable=arrow_type.item_field.nullable),
        )
    if pat.is_struct(arrow_type):
        spark_struct = canonical_spark_struct(arrow_type)
        if spark_struct is not None:
            return spark_struct
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return pa.struct(_canonical_fields(fields, path))
    if pat.is_union(arrow_type) or pat.is_run_end_encoded(arrow_type):
        raise unsupported(path, arrow_type, _alternative_to(arrow_type))
    element = canonical_type(arrow_type.value_type, join(path, "element"))
    return pa.list_(pa.field("element", element, nullable=arrow_type.value_field.nullable))


def _canonical_fields(fields: list[pa.Field], path: str) -> list[pa.Field]:
    check_names([field.name for field in fields], path)
    return [
        pa.field(
            field.name,
            canonical_type(field.type, join(path, field.name)),
            nullable=field.nullable,
            metadata=spark_metadata(field.metadata, join(path, field.name)),
        )
        for field in fields
    ]


def _struct_json(schema: object) -> Json:
    to_json = getattr(schema, "json", None)
    value = json.loads(to_json()) if callable(to_json) else schema
    if isinstance(value, dict) and value.get("type") == "struct" and isinstance(value.get("fields"), list):
        return value
    raise SchemaMismatchError(
        "a schema is a pyarrow.Schema, a pyspark StructType or Spark's schema JSON, "
        f"not {type(schema).__name__}",
        condition="SCHEMA_MISMATCH.INVALID_SCHEMA",
        found=type(schema).__name__,
    )
