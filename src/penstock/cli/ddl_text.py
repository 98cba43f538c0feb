"""A schema as people read it: Spark's DDL. The way back from ``ddl.parse_ddl``."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa

from penstock.arrow.schema import spark_json

_WORDS = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "time(6)": "time"}
_PLAIN = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def schema_ddl(schema: pa.Schema) -> list[str]:
    """Return one line of DDL for each column.

    DDL has no words for elements or values of nested types that take no nulls, so that these are not shown.
    """
    return [_field(field, " ") for field in json.loads(spark_json(schema))["fields"]]


def type_ddl(field: pa.Field) -> str:
    """Return the type of one column."""
    return _type(json.loads(spark_json(pa.schema([field])))["fields"][0]["type"])


def _field(field: dict[str, Any], between: str) -> str:
    name = field["name"]
    shown = name if _PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"
    comment = field["metadata"].get("comment")
    return (
        f"{shown}{between}{_type(field['type'])}"
        + ("" if field["nullable"] else " not null")
        + (f" comment {_text(comment)}" if isinstance(comment, str) else "")
    )


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _type(value: Any) -> str:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if value["type"] == "array":
        return f"array<{_type(value['elementType'])}>"
    if value["type"] == "map":
        return f"map<{_type(value['keyType'])}, {_type(value['valueType'])}>"
    return f"struct<{', '.join(_field(field, ': ') for field in value['fields'])}>"
