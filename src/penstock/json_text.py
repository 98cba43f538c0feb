"""Types for JSON, and a parser for JSON of other programs."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
"""A JSON object whose shape no type describes: check a value where it is read. Where the shape is fixed,
use a dataclass or a ``TypedDict``."""

JsonValue: TypeAlias = Json | list[Any] | str | int | float | bool | None
"""Any JSON value."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text, or raise ValueError; the caller checks the kind of the value."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json_object(text: str | bytes) -> Json:
    """Parse a JSON text that holds one object, or raise ValueError."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value
