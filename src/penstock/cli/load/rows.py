"""What every text format can do with a block of bytes, and what is said of a row that does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.cli.ddl import type_ddl
from penstock.errors import SchemaMismatch

SHOWN_CHARACTERS = 60
_DATE = re.compile(r"\s*(\d{4}-\d\d-\d\d)")
_ZONE = re.compile(r":\d\d(\.\d+)?\s*(Z|[+-]\d\d(:?\d\d)?)\s*$")


class Refused(Exception):
    """The bytes hold something that does not fit, somewhere."""


@dataclass(frozen=True)
class Record:
    """The text of one row."""

    line: int
    """The 0-based line on which it starts, from the start of its block."""
    raw: bytes
    ready: bytes | None
    """As ``parse`` takes it; None when it is known already that it does not fit."""


@dataclass(frozen=True)
class Complaint:
    """Why a row does not fit."""

    reason: str
    column: str | None = None
    value: str | None = None

    def __str__(self) -> str:
        where = "" if self.column is None else f"column {in_quotes(self.column)}: "
        return where + ("" if self.value is None else f"{self.value} ") + self.reason


class RowFormat(Protocol):
    """A text format, with the queue's schema in mind."""

    def cut(self, data: bytes) -> int:
        """The end of the last whole row in the data; 0 when there is none."""

    def parse(self, data: bytes) -> pa.Table:
        """Whole rows as a table of the queue's schema.

        Raises
        ------
        Refused
            A row does not fit, or the format cannot tell without looking at each row.
        """

    def parse_ready(self, data: bytes) -> pa.Table:
        """As ``parse``, for the ``ready`` bytes of some records."""

    def records(self, data: bytes) -> list[Record]:
        """The rows one by one."""

    def explain(self, record: Record) -> Complaint:
        """Why this one does not fit; it was refused when it was parsed alone."""


def shortened(value: Any) -> str:
    """Return a value's JSON, cut to what fits a line."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


def not_utf8(error: UnicodeDecodeError) -> Complaint:
    return Complaint(f"is not UTF-8: byte {error.start + 1} of the row is 0x{error.object[error.start]:02x}")


def wrong_value(field: pa.Field, value: Any, error: BaseException) -> Complaint:
    """Return the complaint about one column's value, which ``error`` refused."""
    cause = error.__cause__
    if isinstance(cause, SchemaMismatch):
        # Its type is right by now, so that it is a null in a place that takes none.
        return Complaint("takes no nulls", str(cause.parameters.get("column", field.name)))
    return Complaint(f"is no {type_ddl(field)}{_hint(field.type, value)}", field.name, shortened(value))


def _hint(kind: pa.DataType, value: Any) -> str:
    if pat.is_timestamp(kind):
        return _timestamp_hint(kind, value if isinstance(value, str) else "")
    if pat.is_binary(kind):
        return "; it is written in base64"
    return "; it is written in whole microseconds" if pat.is_duration(kind) else ""


def _timestamp_hint(kind: pa.DataType, text: str) -> str:
    dated = _DATE.match(text)
    if dated and not _is_date(dated[1]):
        return f"; there is no day {dated[1]}"
    if kind.tz is None:
        return "; it takes no zone"
    if _ZONE.search(text):
        return "; it is written as in 2024-01-31T12:00:00.123456Z"
    return "; it needs a zone, as in 2024-01-31T12:00:00Z"


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def infinite_rows(table: pa.Table) -> list[int]:
    """Return the rows with an infinity in a column: where the text does not say so, it was a number too large."""
    rows: set[int] = set()
    for column in table.columns:
        if pat.is_floating(column.type):
            rows.update(pc.indices_nonzero(pc.is_inf(column)).to_pylist())
    return sorted(rows)
