"""Decide whether the data files that tasks write can be committed to a Delta table as they are.

A commit of files does not look at their rows. A table with a feature that depends on the rows, such as a
check constraint, is left to deltalake, which implements the feature or refuses the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.lake.storage import import_deltalake
from penstock.tables.delta.schema import DeltaLayout, plain_type

if TYPE_CHECKING:
    from deltalake import DeltaTable

_NTZ = "timestampNtz"
_HARMLESS = frozenset({"comment"})
"""Column metadata that does not affect values."""
_FEATURES = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "identityColumns",
        "invariants",
        _NTZ,
        "v2Checkpoint",
        # deltalake adds it to each table with deletion vectors.
        "variantType",
        "vacuumProtocolCheck",
    }
)
"""Writer features that a commit of files may ignore, unless a property or a column uses them."""


def obstacle(table: DeltaTable, mode: str, layout: DeltaLayout) -> str | None:
    """Return the reason why the rows of an output mode must pass through deltalake; None if there is none."""
    return next(_obstacles(table, mode, layout), None)


def _obstacles(table: DeltaTable, mode: str, layout: DeltaLayout) -> Iterator[str]:
    if table.metadata().partition_columns:
        yield "is partitioned"
    protocol = table.protocol()
    features = frozenset(protocol.writer_features or ())
    unknown = sorted(features - _FEATURES)
    if unknown:
        yield f"has the writer features {', '.join(unknown)}"
    yield from _used_properties(table.metadata().configuration, mode)
    columns = {column["name"]: column for column in json.loads(table.schema().to_json())["fields"]}
    for name, column in columns.items():
        marks = {key for part in _nested(column) for key in part.get("metadata", ())} - _HARMLESS
        if marks:
            yield f"has a column {in_quotes(name)} with {min(marks)}"
        if not column["nullable"]:
            yield f"has a column {in_quotes(name)} that takes no null"
    yield from _other_columns(columns, mode, layout)
    if mode == "append":
        return
    if mode == "complete" and _NTZ not in features and _has_ntz(layout.schema):
        yield f"gets the feature {_NTZ}"
    if mode == "update" and any(pat.is_floating(layout.schema.field(key).type) for key in layout.keys):
        # Arrow and deltalake may disagree on which of them are equal.
        yield "has a key of floating-point numbers"


def _used_properties(properties: Mapping[str, str | None], mode: str) -> Iterator[str]:
    forbidden = {"delta.columnmapping.mode": "none", "delta.enablerowtracking": "false"}
    if mode != "append":
        forbidden |= {"delta.enablechangedatafeed": "false", "delta.appendonly": "false"}
    for name, value in properties.items():
        # Spark ignores the case of property names.
        unless = forbidden.get(name.lower())
        is_used = unless is not None and (value or "").lower() != unless
        if is_used or name.lower().startswith("delta.constraints."):
            yield f"has the property {name}"


def _other_columns(columns: Mapping[str, Any], mode: str, layout: DeltaLayout) -> Iterator[str]:
    """Yield how the columns differ from those of the rows; output mode complete replaces the columns."""
    if mode == "complete":
        return
    rows = json.loads(import_deltalake("deltalake").Schema.from_arrow(layout.schema).to_json())["fields"]
    for column in rows:
        stored = columns.get(column["name"])
        if stored is None or plain_type(column["type"]) != plain_type(stored["type"]):
            yield f"has no column {in_quotes(column['name'])} of the rows' type"
        elif column["type"] != stored["type"] and _takes_no_null(stored["type"]):
            yield f"has a column {in_quotes(column['name'])} with values that take no null"
    if mode == "update" and len(rows) < len(columns):
        # A merge keeps the stored values of the other columns.
        yield "has columns that the rows do not have"


def _nested(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a column or a type in JSON, and everything nested in it, except metadata."""
    if isinstance(value, dict):
        yield value
        for key, part in value.items():
            if key != "metadata":
                yield from _nested(part)
    elif isinstance(value, list):
        for part in value:
            yield from _nested(part)


def _takes_no_null(kind: Any) -> bool:
    flags = ("nullable", "containsNull", "valueContainsNull")
    return any(part.get(flag) is False for part in _nested(kind) for flag in flags)


def _has_ntz(schema: pa.Schema) -> bool:
    return any(_is_ntz(field.type) for field in schema)


def _is_ntz(kind: pa.DataType) -> bool:
    if pat.is_nested(kind):
        return any(_is_ntz(kind.field(n).type) for n in range(kind.num_fields))
    return bool(pat.is_timestamp(kind) and kind.tz is None)
