"""What the two directions of the schema mapping share: names, column metadata and Spark's marked structs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import SchemaMismatch, UnsupportedType
from penstock.names import in_quotes

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
