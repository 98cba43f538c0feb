"""Conversion of Spark's schema JSON (as from ``StructType.json()``) to Arrow fields and back, without Spark.

The mapping is the one of PySpark 4.3's Arrow conversion in the time zone UTC. Three of Spark's types are
structs with field metadata in Arrow: variant, geometry and geography.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.errors import SchemaMismatchError, UnsupportedTypeError
from penstock.json_text import Json, parse_json

_METADATA_KEY = b"SPARK::metadata::json"
_COLLATIONS_KEY = "__COLLATIONS"
_MIXED_SRID = -1

Part = TypeVar("Part")


def join(path: str, name: str) -> str:
    """Return the dotted path of a name below a path."""
    return f"{path}.{name}" if path else name


def unsupported(path: str, found: object, instead: str) -> UnsupportedTypeError:
    """Return the error for a type that cannot be stored."""
    return UnsupportedTypeError(
        f"column {in_quotes(path)} has the type {found}, which Spark cannot take through Arrow: "
        f"use {instead}",
        column=path,
        found=str(found),
    )


def check_names(names: Sequence[str], path: str) -> None:
    """Refuse empty names and names that differ only in case."""
    where = f"struct {in_quotes(path)}" if path else "schema"
    seen: dict[str, tuple[int, str]] = {}
    for position, name in enumerate(names):
        if not name:
            raise SchemaMismatchError(
                f"column {position} of the {where} has an empty name: name it",
                condition="SCHEMA_MISMATCH.INVALID_SCHEMA",
                column=join(path, name),
            )
        first, earlier = seen.setdefault(name.lower(), (position, name))
        if first != position:
            raise SchemaMismatchError(
                f"the {where} has the columns {in_quotes(earlier)} and {in_quotes(name)}, which are the same "
                "name to Spark: rename one",
                condition="SCHEMA_MISMATCH.DUPLICATE_COLUMN",
                column=join(path, name),
            )


def spark_metadata(metadata: Mapping[bytes, bytes] | None, path: str) -> dict[bytes, bytes] | None:
    """Return Spark's part of a field's Arrow metadata, with sorted keys."""
    if not metadata or _METADATA_KEY not in metadata:
        return None
    try:
        value = parse_json(metadata[_METADATA_KEY])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SchemaMismatchError(
            f"the metadata {_METADATA_KEY.decode()!r} of column {in_quotes(path)} is not a JSON object: "
            "correct or drop it",
            condition="SCHEMA_MISMATCH.INVALID_SCHEMA",
            column=path,
        )
    return _metadata_to_arrow(value)


def _metadata_to_arrow(value: Json | None) -> dict[bytes, bytes] | None:
    """Return Spark's column metadata in the form that PySpark writes to Arrow fields, with sorted keys."""
    without_collations = {key: item for key, item in (value or {}).items() if key != _COLLATIONS_KEY}
    return (
        {_METADATA_KEY: json.dumps(without_collations, sort_keys=True).encode()}
        if without_collations
        else None
    )


def _variant_type() -> pa.DataType:
    """Return the struct of Spark's variant."""
    return pa.struct(
        [
            pa.field("value", pa.binary(), nullable=False),
            pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
        ]
    )


def _spatial_type(kind: str, srid: int) -> pa.DataType:
    """Return the struct of Spark's geometry or geography in a spatial reference system."""
    return pa.struct(
        [
            pa.field("srid", pa.int32(), nullable=False),
            pa.field(
                "wkb",
                pa.binary(),
                nullable=False,
                metadata={kind.encode(): b"true", b"srid": str(srid).encode()},
            ),
        ]
    )


def spark_struct_kind(arrow_type: pa.DataType) -> tuple[str, int] | None:
    """Return the Spark type that a struct stands for; None for any other struct.

    The result is ``variant``, ``geometry`` or ``geography``, with the spatial reference system or -1.
    """
    metadata_by_name = {field.name: field.metadata or {} for field in arrow_type}
    if metadata_by_name.get("metadata", {}).get(b"variant") == b"true" and "value" in metadata_by_name:
        return "variant", _MIXED_SRID
    wkb = metadata_by_name.get("wkb", {})
    for kind in ("geometry", "geography"):
        if wkb.get(kind.encode()) == b"true" and "srid" in metadata_by_name:
            return kind, int(wkb.get(b"srid", b"-1"))
    return None


def canonical_spark_struct(arrow_type: pa.DataType) -> pa.DataType | None:
    """Return the canonical struct of a variant, geometry or geography; None for any other struct."""
    spark_kind = spark_struct_kind(arrow_type)
    if spark_kind is None:
        return None
    kind, srid = spark_kind
    return _variant_type() if kind == "variant" else _spatial_type(kind, srid)


_SIMPLE_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "decimal": pa.decimal128(10, 0),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
    "variant": _variant_type(),
}
# Spark 4.3 knows these reference systems and no others.
_SRID_OF = {"SRID:0": 0, "EPSG:3857": 3857, "OGC:CRS84": 4326}
_CRS_OF = {srid: crs for crs, srid in _SRID_OF.items()} | {_MIXED_SRID: "SRID:ANY"}

_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
_SPATIAL = re.compile(r"(geometry|geography)(?:\(\s*(\w+:-?\w+)?\s*,?\s*(\w+)?\s*\))?")
_PARAMETERISED: tuple[tuple[re.Pattern[str], pa.DataType], ...] = (
    (re.compile(r"time\(\s*\d+\s*\)"), pa.time64("ns")),
    (re.compile(r"interval (day|hour|minute|second)( to (day|hour|minute|second))?"), pa.duration("us")),
    (re.compile(r"string\s+collate\s+\w+"), pa.string()),
)
_ALTERNATIVES = (
    ("char(", "string"),
    ("varchar(", "string"),
    ("interval year", "an integer number of months"),
    ("interval month", "an integer number of months"),
    ("interval", "a day-time interval, or an integer number of months"),
)


def fields_from_json(struct: Json, path: str = "") -> list[pa.Field]:
    """Return the Arrow fields of a struct in Spark's parsed JSON.

    ``path`` is the dotted path of the struct, empty at the top level.
    """
    entries = [_field_json(entry, path) for entry in _required_part(struct, "fields", list, path)]
    check_names([entry["name"] for entry in entries], path)
    return [
        pa.field(
            entry["name"],
            _type_from_json(entry["type"], join(path, entry["name"])),
            nullable=entry.get("nullable", True),
            metadata=_metadata_to_arrow(entry.get("metadata")),
        )
        for entry in entries
    ]


def _required_part(value: Json, name: str, kind: type[Part], path: str) -> Part:
    part = value.get(name)
    if isinstance(part, kind):
        return part
    raise SchemaMismatchError(
        f"{in_quotes(value)} is not a type of Spark's schema JSON, because its {name} is missing or wrong: "
        "write what StructType.json() returns",
        condition="SCHEMA_MISMATCH.INVALID_SCHEMA",
        column=path,
    )


def _field_json(entry: object, path: str) -> Json:
    if isinstance(entry, dict) and isinstance(entry.get("name"), str) and "type" in entry:
        return entry
    raise SchemaMismatchError(
        f"{in_quotes(entry)} is not a field of Spark's schema JSON: give it a name and a type",
        condition="SCHEMA_MISMATCH.INVALID_SCHEMA",
        column=path,
    )


def _type_from_json(value: object, path: str) -> pa.DataType:
    if isinstance(value, str):
        return _simple_from_json(value, path)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("struct", "array", "map", "udt"):
        raise unsupported(path, value, "a type that Spark SQL has")
    if kind == "struct":
        return pa.struct(fields_from_json(value, path))
    if kind == "array":
        element = _nested_type(value, "elementType", join(path, "element"), path)
        return pa.list_(
            pa.field("element", element, nullable=_required_part(value, "containsNull", bool, path))
        )
    if kind == "map":
        key = pa.field("key", _nested_type(value, "keyType", join(path, "key"), path), nullable=False)
        item = _nested_type(value, "valueType", join(path, "value"), path)
        nullable = _required_part(value, "valueContainsNull", bool, path)
        return pa.map_(key, pa.field("value", item, nullable=nullable))
    return _nested_type(value, "sqlType", path, path)


def _nested_type(value: Json, name: str, nested_path: str, path: str) -> pa.DataType:
    return _type_from_json(
        _required_part(value, name, str if isinstance(value.get(name), str) else dict, path), nested_path
    )


def _simple_from_json(name: str, path: str) -> pa.DataType:
    simple = _SIMPLE_TYPES.get(name)
    if simple is not None:
        return simple
    decimal = _DECIMAL.fullmatch(name)
    if decimal:
        return _decimal(int(decimal[1]), int(decimal[2]), name, path)
    for pattern, arrow_type in _PARAMETERISED:
        if pattern.fullmatch(name):
            return arrow_type
    spatial = _SPATIAL.fullmatch(name)
    if spatial:
        return _spatial(spatial[1], spatial[2] or "OGC:CRS84", path)
    instead = (better for prefix, better in _ALTERNATIVES if name.startswith(prefix))
    raise unsupported(path, name, next(instead, "a type that Spark SQL has"))


def _decimal(precision: int, scale: int, name: str, path: str) -> pa.DataType:
    if 1 <= precision <= 38 and 0 <= scale <= precision:
        return pa.decimal128(precision, scale)
    raise unsupported(path, name, "a decimal of 1 to 38 digits with a scale from 0 to that")


def _spatial(kind: str, crs: str, path: str) -> pa.DataType:
    if crs.upper() == _CRS_OF[_MIXED_SRID]:
        return _spatial_type(kind, _MIXED_SRID)
    if crs not in _SRID_OF:
        raise unsupported(path, f"{kind}({crs})", f"one of the reference systems {', '.join(_SRID_OF)}")
    return _spatial_type(kind, _SRID_OF[crs])


def json_from_fields(fields: list[pa.Field]) -> Json:
    """Return a struct of canonical Arrow fields in Spark's JSON, parsed."""
    return {"type": "struct", "fields": [_field_to_json(field) for field in fields]}


def _field_to_json(field: pa.Field) -> Json:
    metadata = (field.metadata or {}).get(_METADATA_KEY)
    return {
        "name": field.name,
        "type": _type_to_json(field.type),
        "nullable": field.nullable,
        "metadata": parse_json(metadata) if metadata else {},
    }


def _type_to_json(arrow_type: pa.DataType) -> str | Json:
    for name, simple in _SIMPLE_TYPES.items():
        if name != "decimal" and not pat.is_struct(arrow_type) and arrow_type.equals(simple):
            return name
    if pat.is_decimal(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if pat.is_time(arrow_type):
        return "time(6)"
    if pat.is_duration(arrow_type):
        return "interval day to second"
    return _nested_to_json(arrow_type)


def _nested_to_json(arrow_type: pa.DataType) -> str | Json:
    if pat.is_map(arrow_type):
        return {
            "type": "map",
            "keyType": _type_to_json(arrow_type.key_type),
            "valueType": _type_to_json(arrow_type.item_type),
            "valueContainsNull": arrow_type.item_field.nullable,
        }
    if pat.is_list(arrow_type):
        return {
            "type": "array",
            "elementType": _type_to_json(arrow_type.value_type),
            "containsNull": arrow_type.value_field.nullable,
        }
    spark_kind = spark_struct_kind(arrow_type)
    if spark_kind is None:
        return json_from_fields(list(arrow_type))
    kind, srid = spark_kind
    if kind == "variant":
        return kind
    return f"geometry({_CRS_OF[srid]})" if kind == "geometry" else f"geography({_CRS_OF[srid]}, SPHERICAL)"
