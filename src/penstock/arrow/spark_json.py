"""What the two directions of the schema mapping share: names, column metadata and Spark's marked structs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.errors import SchemaMismatch, UnsupportedType

METADATA_KEY = b"SPARK::metadata::json"
COLLATIONS_KEY = "__COLLATIONS"
MIXED_SRID = -1


def join(path: str, name: str) -> str:
    """Return the dotted path of a name below a path."""
    return f"{path}.{name}" if path else name


def unsupported(path: str, found: object, instead: str) -> UnsupportedType:
    """Return the error for a type that cannot be stored."""
    return UnsupportedType(
        f"Column {in_quotes(path)} has the type {found}, which Spark cannot take through Arrow; use {instead}.",
        column=path,
        found=str(found),
    )


def check_names(names: Sequence[str], path: str) -> None:
    """Refuse empty names and names that differ in case alone.

    Raises
    ------
    SchemaMismatch
        A name is empty, or two names are the same to Spark.
    """
    where = f"struct {in_quotes(path)}" if path else "schema"
    seen: dict[str, str] = {}
    for position, name in enumerate(names):
        if not name:
            raise SchemaMismatch(
                f"Column {position} of the {where} has an empty name; name it.", column=join(path, name)
            )
        earlier = seen.setdefault(name.lower(), name)
        if earlier is not name or names.index(name) != position:
            raise SchemaMismatch(
                f"The {where} has the columns {in_quotes(earlier)} and {in_quotes(name)}, which are one name to Spark; "
                "rename one.",
                column=join(path, name),
            )


def spark_metadata(metadata: Mapping[bytes, bytes] | None, path: str) -> dict[bytes, bytes] | None:
    """Return the part of a field's Arrow metadata that is Spark's, in one form.

    Raises
    ------
    SchemaMismatch
        Spark's part is not a JSON object.
    """
    if not metadata or METADATA_KEY not in metadata:
        return None
    try:
        value = json.loads(metadata[METADATA_KEY])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SchemaMismatch(
            f"The metadata {METADATA_KEY.decode()!r} of column {in_quotes(path)} is not a JSON object; mend or drop it.",
            column=path,
        )
    return metadata_to_arrow(value)


def metadata_to_arrow(value: Mapping[str, Any] | None) -> dict[bytes, bytes] | None:
    """Return Spark's column metadata as PySpark writes it into an Arrow field, with sorted keys."""
    kept = {key: item for key, item in (value or {}).items() if key != COLLATIONS_KEY}
    return {METADATA_KEY: json.dumps(kept, sort_keys=True).encode()} if kept else None


def variant_type() -> pa.DataType:
    """Return the struct that stands for Spark's variant."""
    return pa.struct(
        [
            pa.field("value", pa.binary(), nullable=False),
            pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
        ]
    )


def spatial_type(kind: str, srid: int) -> pa.DataType:
    """Return the struct that stands for Spark's geometry or geography of a spatial reference system."""
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


def mark_of(arrow_type: pa.DataType) -> tuple[str, int] | None:
    """Return (``variant``, ``geometry`` or ``geography``; its reference system or -1), or None for a plain struct."""
    marks = {field.name: field.metadata or {} for field in arrow_type}
    if marks.get("metadata", {}).get(b"variant") == b"true" and "value" in marks:
        return "variant", MIXED_SRID
    wkb = marks.get("wkb", {})
    for kind in ("geometry", "geography"):
        if wkb.get(kind.encode()) == b"true" and "srid" in marks:
            return kind, int(wkb.get(b"srid", b"-1"))
    return None


def shape_of(arrow_type: pa.DataType) -> pa.DataType | None:
    """Return the canonical struct of a marked struct, or None for a plain one."""
    mark = mark_of(arrow_type)
    if mark is None:
        return None
    kind, srid = mark
    return variant_type() if kind == "variant" else spatial_type(kind, srid)


# ---- sparkjson: Spark's schema JSON to Arrow fields and back, without Spark.
#
# The JSON is what ``StructType.json()`` gives. The mapping is the one of PySpark 4.3's Arrow conversion with the time zone UTC.

_PLAIN: dict[str, pa.DataType] = {
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
    "variant": variant_type(),
}
# Spark 4.3 knows these reference systems and no others.
_SRID_OF = {"SRID:0": 0, "EPSG:3857": 3857, "OGC:CRS84": 4326}
_CRS_OF = {srid: crs for crs, srid in _SRID_OF.items()} | {MIXED_SRID: "SRID:ANY"}

_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
_TYPE = (str, dict)
_SPATIAL = re.compile(r"(geometry|geography)(?:\(\s*(\w+:-?\w+)?\s*,?\s*(\w+)?\s*\))?")
_PARAMETERISED: tuple[tuple[re.Pattern[str], pa.DataType], ...] = (
    (re.compile(r"time\(\s*\d+\s*\)"), pa.time64("ns")),
    (re.compile(r"interval (day|hour|minute|second)( to (day|hour|minute|second))?"), pa.duration("us")),
    (re.compile(r"string\s+collate\s+\w+"), pa.string()),
)
_INSTEAD = (
    ("char(", "string"),
    ("varchar(", "string"),
    ("interval year", "an integer number of months"),
    ("interval month", "an integer number of months"),
    ("interval", "a day-time interval, or an integer number of months"),
)


def fields_from_json(struct: dict[str, Any], path: str = "") -> list[pa.Field]:
    """Return the Arrow fields of a struct in Spark's JSON.

    Parameters
    ----------
    struct
        The parsed JSON, ``{"type": "struct", "fields": [...]}``.
    path
        The dotted path of the struct; empty at the top.

    Raises
    ------
    UnsupportedType
        A field has a type without an Arrow form.
    SchemaMismatch
        A name is empty or doubled, or the JSON is not Spark's.
    """
    entries = [_field_json(entry, path) for entry in _part(struct, "fields", (list,), path)]
    check_names([entry["name"] for entry in entries], path)
    return [
        pa.field(
            entry["name"],
            type_from_json(entry["type"], join(path, entry["name"])),
            nullable=entry.get("nullable", True),
            metadata=metadata_to_arrow(entry.get("metadata")),
        )
        for entry in entries
    ]


def _part(value: dict[str, Any], name: str, kinds: tuple[type, ...], path: str) -> Any:
    found = value.get(name)
    if isinstance(found, kinds):
        return found
    raise SchemaMismatch(
        f"{in_quotes(value)} is no type of Spark's schema JSON; its {name} is missing or wrong.", column=path
    )


def _field_json(entry: Any, path: str) -> dict[str, Any]:
    if isinstance(entry, dict) and isinstance(entry.get("name"), str) and "type" in entry:
        return entry
    raise SchemaMismatch(
        f"{in_quotes(entry)} is no field of Spark's schema JSON; it needs a name and a type.", column=path
    )


def type_from_json(value: Any, path: str) -> pa.DataType:
    """Return the Arrow type of one type in Spark's JSON; ``path`` is the column's dotted path, for the error."""
    if isinstance(value, str):
        return _simple_from_json(value, path)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "struct":
        return pa.struct(fields_from_json(value, path))
    if kind == "array":
        element = type_from_json(_part(value, "elementType", _TYPE, path), join(path, "element"))
        return pa.list_(pa.field("element", element, nullable=_part(value, "containsNull", (bool,), path)))
    if kind == "map":
        key = pa.field(
            "key",
            type_from_json(_part(value, "keyType", _TYPE, path), join(path, "key")),
            nullable=False,
        )
        item = type_from_json(_part(value, "valueType", _TYPE, path), join(path, "value"))
        nullable = _part(value, "valueContainsNull", (bool,), path)
        return pa.map_(key, pa.field("value", item, nullable=nullable))
    if kind == "udt":
        return type_from_json(_part(value, "sqlType", _TYPE, path), path)
    raise unsupported(path, value, "a type that Spark SQL has")


def _simple_from_json(name: str, path: str) -> pa.DataType:
    plain = _PLAIN.get(name)
    if plain is not None:
        return plain
    decimal = _DECIMAL.fullmatch(name)
    if decimal:
        return _decimal(int(decimal[1]), int(decimal[2]), name, path)
    for pattern, arrow_type in _PARAMETERISED:
        if pattern.fullmatch(name):
            return arrow_type
    spatial = _SPATIAL.fullmatch(name)
    if spatial:
        return _spatial(spatial[1], spatial[2] or "OGC:CRS84", path)
    instead = (better for prefix, better in _INSTEAD if name.startswith(prefix))
    raise unsupported(path, name, next(instead, "a type that Spark SQL has"))


def _decimal(precision: int, scale: int, name: str, path: str) -> pa.DataType:
    if 1 <= precision <= 38 and 0 <= scale <= precision:
        return pa.decimal128(precision, scale)
    raise unsupported(path, name, "a decimal of 1 to 38 digits with a scale from 0 to that")


def _spatial(kind: str, crs: str, path: str) -> pa.DataType:
    if crs.upper() == _CRS_OF[MIXED_SRID]:
        return spatial_type(kind, MIXED_SRID)
    if crs not in _SRID_OF:
        raise unsupported(path, f"{kind}({crs})", f"one of the reference systems {', '.join(_SRID_OF)}")
    return spatial_type(kind, _SRID_OF[crs])


def json_from_fields(fields: list[pa.Field]) -> dict[str, Any]:
    """Return a struct of canonical Arrow fields in Spark's JSON, parsed."""
    return {"type": "struct", "fields": [_field_to_json(field) for field in fields]}


def _field_to_json(field: pa.Field) -> dict[str, Any]:
    kept = (field.metadata or {}).get(METADATA_KEY)
    return {
        "name": field.name,
        "type": _type_to_json(field.type),
        "nullable": field.nullable,
        "metadata": json.loads(kept) if kept else {},
    }


def _type_to_json(arrow_type: pa.DataType) -> Any:
    for name, plain in _PLAIN.items():
        if name != "decimal" and not pat.is_struct(arrow_type) and arrow_type.equals(plain):
            return name
    if pat.is_decimal(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if pat.is_time(arrow_type):
        return "time(6)"
    if pat.is_duration(arrow_type):
        return "interval day to second"
    return _nested_to_json(arrow_type)


def _nested_to_json(arrow_type: pa.DataType) -> Any:
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
    mark = mark_of(arrow_type)
    if mark is None:
        return json_from_fields(list(arrow_type))
    kind, srid = mark
    if kind == "variant":
        return kind
    return f"geometry({_CRS_OF[srid]})" if kind == "geometry" else f"geography({_CRS_OF[srid]}, SPHERICAL)"
