"""The error for input with rows that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cli.load.rows import Complaint
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

    ``parameters`` has their ``count``, whether there may be ``more`` that were not looked for, and the first of them as
    ``rows`` with line, column, value and reason.
    """

    condition = "ROWS_REJECTED"

    @property
    def details(self) -> list[str]:
        """A line of text for each of the rows that are shown."""
        return [
            str(BadRow(row["line"], Complaint(row["reason"], row["column"], row["value"])))
            for row in self.parameters["rows"]
        ]


def rows_rejected(queue: str, bad: Sequence[BadRow], count: int, more: bool) -> RowsRejected:
    """Return the error.

    Parameters
    ----------
    bad
        The rows to show.
    count
        How many there are.
    more
        Whether that is the number at which the search ended.
    """
    found = (
        f"{'at least ' if more else ''}{counted(count, 'row')} of the input {'does' if count == 1 else 'do'}"
    )
    shown = f" (the first {len(bad)} of them are above)" if 0 < len(bad) < count else ""
    return RowsRejected(
        f"{found} not fit queue {queue!r}{shown}; nothing was appended",
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
