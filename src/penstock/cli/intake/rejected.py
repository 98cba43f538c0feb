"""The error for input with rows that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cli.intake.rows import Complaint
from penstock.cli.units import counted
from penstock.errors import SchemaMismatch


@dataclass(frozen=True)
class BadRow:
    """A row that does not fit, and the 1-based line on which it starts."""

    line: int
    complaint: Complaint

    def __str__(self) -> str:
        return f"line {self.line}: {self.complaint}"


class RowsRejected(SchemaMismatch):
    """Rows do not fit the queue's schema; none of the input was appended.

    ``parameters`` has their ``count``, whether there are ``more`` that were not looked for, and the first of them as
    ``rows`` with line, column, value and reason.
    """

    condition = "ROWS_REJECTED"

    def __init__(self, queue: str, bad: Sequence[BadRow], count: int, more: bool) -> None:
        found = f"at least {counted(count, 'row')}" if more else counted(count, "row")
        shown = f" (the first {len(bad)} are above)" if 0 < len(bad) < count else ""
        super().__init__(
            f"{found} of the input {'does' if found == '1 row' else 'do'} not fit queue {queue!r}{shown}; "
            "nothing was appended",
            queue=queue,
            count=count,
            more=more,
            rows=[
                {
                    "line": row.line,
                    "column": row.complaint.column,
                    "value": row.complaint.value,
                    "reason": row.complaint.reason,
                }
                for row in bad
            ],
        )
        self.details = [str(row) for row in bad]

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("it is shown where it is raised")
