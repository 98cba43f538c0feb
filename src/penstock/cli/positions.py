"""Where a consumer starts or goes, in words."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from penstock.arguments import in_quotes
from penstock.errors import InvalidPosition

FORMS = (
    "earliest, latest, a time such as 2024-01-31T12:00:00Z, or row indexes by partition such as '{\"0\": 5}'"
)


def parse_position(text: str) -> str | datetime | dict[int, int]:
    """Return a position as the consumers' API takes it.

    Raises
    ------
    InvalidPosition
        It is none of the four forms, or a time without a zone.
    """
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    if text.lstrip().startswith("{"):
        return _indexes(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidPosition(f"a position is {FORMS}; not {in_quotes(text)}", value=text) from None
    if time.tzinfo is None:
        zoned = time.isoformat()
        raise InvalidPosition(
            f"{in_quotes(text)} has no time zone: write {zoned}Z or {zoned}+02:00", value=text
        )
    return time


def _indexes(text: str) -> dict[int, int]:
    try:
        found: Any = json.loads(text)
        indexes = {int(partition): index for partition, index in found.items()}
    except (ValueError, RecursionError):
        indexes = {-1: -1}
    if not indexes or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in indexes.values()):
        raise InvalidPosition(
            f'row indexes by partition look like \'{{"0": 5, "1": 7}}\', not {in_quotes(text)}', value=text
        )
    return indexes
