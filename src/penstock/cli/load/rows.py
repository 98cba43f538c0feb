"""``RowFormat``: the interface of text formats, and the error for rows that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from decimal import Decimal
from typing import Protocol

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.cli.ddl import type_ddl
from penstock.cli.units import counted
from penstock.errors import SchemaMismatchError

_MAX_VALUE_CHARACTERS = 60
_DATE = re.compile(r"\s*(\d{4}-\d\d-\d\d)")
_ZONE = re.compile(r":\d\d(\.\d+)?\s*(Z|[+-]\d\d(:?\d\d)?)\s*$")


class BlockRefused(Exception):
    """A block has rows that do not fit the schema."""


@dataclass(frozen=True)
class Record:
    line: int
    """The 0-based line on which the row starts, from the start of its block."""
    raw: bytes
    prepared: bytes | None
    """The bytes for ``parse_prepared``; None if the row is already known not to fit."""


@dataclass(frozen=True)
class RowProblem:
    reason: str
    column: str | None = None
    value: str | None = None
    line: int = 0
    """The 1-based line of the input on which the row starts."""
    condition: str | None = None
    """The problem's own error condition, if it has one."""

    def __str__(self) -> str:
        code = "" if self.condition is None else f"[{self.condition}] "
        column = "" if self.column is None else f"column {in_quotes(self.column)}"
        value = self.value or ""
        subject = f"{column}: {value}" if column and value else column or value
        return f"line {self.line}: {code}{subject}{' ' if subject else ''}{self.reason}"


class RowsRejected(SchemaMismatchError):
    """Rows do not fit the queue's schema; none of the input was appended.

    ``parameters`` has their ``count``, whether there may be ``more`` that were not counted, and the first of
    them as ``rows``, with line, column, value, reason and condition.
    """

    condition = "ROWS_REJECTED"

    @classmethod
    def of(cls, queue: str, problems: Sequence[RowProblem], count: int, more: bool) -> RowsRejected:
        rows = f"{'at least ' if more else ''}{counted(count, 'row')} of the input"
        shown = f" (the first {len(problems)} of them are above)" if 0 < len(problems) < count else ""
        return cls(
            f"{rows} {'does' if count == 1 else 'do'} not fit queue {queue!r}{shown}; nothing was appended",
            queue=queue,
            count=count,
            more=more,
            rows=[asdict(problem) for problem in problems],
        )

    @property
    def details(self) -> list[str]:
        """A line of text for each of the rows that are shown."""
        return [str(RowProblem(**row)) for row in self.parameters["rows"]]


class RowFormat(Protocol):
    """A text format that reads rows of one schema."""

    def end_of_rows(self, data: bytes) -> int:
        """Return the end of the last complete row in the data; 0 if there is none."""

    def parse(self, data: bytes) -> pa.Table:
        """Parse complete rows to a table; raise BlockRefused if rows must be examined one by one."""

    def parse_prepared(self, data: bytes) -> pa.Table:
        """Parse the ``prepared`` bytes of records."""

    def records(self, data: bytes) -> list[Record]:
        """Return the rows one by one."""

    def explain(self, record: Record) -> RowProblem:
        """Return why a record does not fit, after it was refused when parsed alone."""


def shortened(value: object) -> str:
    """Return a value's JSON, truncated for messages."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 1]}…"


def not_utf8(error: UnicodeDecodeError) -> RowProblem:
    return RowProblem(f"is not UTF-8: byte {error.start + 1} of the row is 0x{error.object[error.start]:02x}")


def wrong_value(field: pa.Field, value: object, error: BaseException) -> RowProblem:
    """Return the problem with the value of a column, which was refused with ``error``."""
    cause = error.__cause__
    if isinstance(cause, SchemaMismatchError):
        # The type is correct at this point, so the value is a null in a field that is not nullable.
        return RowProblem("takes no nulls", str(cause.parameters.get("column", field.name)))
    return RowProblem(
        f"is not a valid {type_ddl(field)}{_hint(field.type, value)}", field.name, shortened(value)
    )


def _hint(kind: pa.DataType, value: object) -> str:
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
