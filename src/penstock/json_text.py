"""Types for JSON, and parsers for JSON that other programs may have written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

from penstock.errors import StoreError

Json: TypeAlias = dict[str, Any]
"""A JSON object of unknown shape, whose values must be checked where they are read. For a fixed shape, use a
dataclass or a ``TypedDict``."""

JsonValue: TypeAlias = Json | list[Any] | str | int | float | bool | None
"""Any JSON value."""


MOST_CHARACTERS = 4 << 20
"""The maximum length of a record, several times the length of the plan of a queue with the most partitions.
Parsed JSON takes more than twenty times as many bytes."""


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


def parse_record(text: str, what: str, kind: type = object) -> Any:
    """Parse the JSON of a record in a store, or raise StoreError, since other programs may have changed it.

    Parameters
    ----------
    what
        The record, as in "the plan of consumer 'bill'".
    kind
        The required type of the value, if any.
    """
    try:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters")
        value = parse_json(text)
        if not isinstance(value, kind):
            raise ValueError(f"it is a JSON {type(value).__name__}")
        return value
    except ValueError as error:
        raise unreadable_record(what, error) from None


def unreadable_record(what: str, why: Exception) -> StoreError:
    """Return the error for a record of a store that Penstock did not write."""
    return StoreError(
        f"the store cannot be read: {what} is not what Penstock writes ({why}). It is damaged, or was "
        "changed by another program: restore the store from a backup",
        condition="STORE_ERROR.UNREADABLE_RECORD",
        record=what,
    )


def require_numbered(rows: Iterable[int], what: str) -> None:
    """Refuse records of a store for partitions other than 0, 1, 2 and so on, without a gap."""
    for expected, number in enumerate(rows):
        if number != expected:
            raise unreadable_record(what, ValueError(f"partition {expected} is missing"))
