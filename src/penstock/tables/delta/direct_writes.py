"""Check whether data files that tasks write can be committed to a Delta table without reading their rows.

A table with a feature that depends on the rows, such as a check constraint, is left to deltalake, which
implements the feature or refuses the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.lake.storage import import_deltalake
from penstock.tables.delta.schema import DeltaLayout, comparable_type

if TYPE_CHECKING:
    from deltalake import DeltaTable

_NTZ_FEATURE = "timestampNtz"
_HARMLESS_METADATA = frozenset({"comment"})
"""Column metadata that does not affect values."""
_IGNORABLE_FEATURES = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "identityColumns",
        "invariants",
        _NTZ_FEATURE,
        "v2Checkpoint",
        # deltalake adds it to each table with deletion vectors.
        "variantType",
        "vacuumProtocolCheck",
    }
)
"""Writer features that a commit of files may ignore, unless a property or a column uses them."""


def obstacle(table: DeltaTable, mode: str, layout: DeltaLayout) -> str | None:
    """Return why rows must pass through deltalake in an output mode; None if they need not."""
    return next(_obstacles(table, mode, layout), None)


def _obstacles(table: DeltaTable, mode: str, layout: DeltaLayout) -> Iterator[str]:
    if table.metadata().partition_columns:
        yield "is partitioned"
    protocol = table.protocol()
    features = frozenset(protocol.writer_features or ())
    unknown = sorted(features - _IGNORABLE_FEATURES)
    if unknown:
        yield f"has the writer features {', '.join(unknown)}"
    yield from _used_properties(table.metadata().configuration, mode)
    columns = {column["name"]: column for column in json.loads(table.schema().to_json())["fields"]}
    for name, column in columns.items():
        metadata_keys = {
            key for part in _walk_json(column) for key in part.get("metadata", ())
        } - _HARMLESS_METADATA
        if metadata_keys:
            yield f"has a column {in_quotes(name)} with {min(metadata_keys)}"
        if not column["nullable"]:
            yield f"has a column {in_quotes(name)} that does not allow nulls"
    yield from _column_differences(columns, mode, layout)
    if mode == "append":
        return
    if mode == "complete" and _NTZ_FEATURE not in features and _has_ntz(layout.schema):
        yield f"gets the feature {_NTZ_FEATURE}"
    if mode == "update" and any(pat.is_floating(layout.schema.field(key).type) for key in layout.keys):
        # Arrow and deltalake may disagree on which floating-point numbers are equal.
        yield "has a key of floating-point numbers"


def _used_properties(properties: Mapping[str, str | None], mode: str) -> Iterator[str]:
    harmless_values = {"delta.columnmapping.mode": "none", "delta.enablerowtracking": "false"}
    if mode != "append":
        harmless_values |= {"delta.enablechangedatafeed": "false", "delta.appendonly": "false"}
    for name, value in properties.items():
        # Spark ignores the case of property names.
        harmless_value = harmless_values.get(name.lower())
        is_used = harmless_value is not None and (value or "").lower() != harmless_value
        if is_used or name.lower().startswith("delta.constraints."):
            yield f"has the property {name}"


def _column_differences(columns: Mapping[str, Any], mode: str, layout: DeltaLayout) -> Iterator[str]:
    """Yield how the columns differ from those of the rows; output mode complete replaces the columns."""
    if mode == "complete":
        return
    row_columns = json.loads(import_deltalake("deltalake").Schema.from_arrow(layout.schema).to_json())[
        "fields"
    ]
    for column in row_columns:
        stored = columns.get(column["name"])
        if stored is None or comparable_type(column["type"]) != comparable_type(stored["type"]):
            yield f"has no column {in_quotes(column['name'])} of the rows' type"
        elif column["type"] != stored["type"] and _has_required_values(stored["type"]):
            yield f"has a column {in_quotes(column['name'])} with values that do not allow nulls"
    if mode == "update" and len(row_columns) < len(columns):
        # A merge keeps the stored values of the other columns.
        yield "has columns that the rows do not have"


def _walk_json(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a column or a type in JSON, and everything nested in it, except metadata."""
    if isinstance(value, dict):
        yield value
        for key, part in value.items():
            if key != "metadata":
                yield from _walk_json(part)
    elif isinstance(value, list):
        for part in value:
            yield from _walk_json(part)


def _has_required_values(kind: Any) -> bool:
    flags = ("nullable", "containsNull", "valueContainsNull")
    return any(part.get(flag) is False for part in _walk_json(kind) for flag in flags)


def _has_ntz(schema: pa.Schema) -> bool:
    return any(_is_ntz(field.type) for field in schema)


def _is_ntz(kind: pa.DataType) -> bool:
    if pat.is_nested(kind):
        return any(_is_ntz(kind.field(n).type) for n in range(kind.num_fields))
    return bool(pat.is_timestamp(kind) and kind.tz is None)
