"""``Reconciliation``: the result of comparing a table with its copy."""

from __future__ import annotations

from dataclasses import dataclass

MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"
"""The kinds of differing rows: missing in the copy, only in the copy, or with different values."""
BY_SETTLING, BY_CHECKPOINT = "settled", "checkpoint"


@dataclass(frozen=True)
class DifferingRow:
    """A row that differs between the source and the copy."""

    key: dict[str, object]
    """The values of its key columns."""
    kind: str
    """``missing``, ``extra`` or ``different``."""
    columns: tuple[str, ...] = ()
    """The columns that differ if the kind is ``different``; empty if the copy has the row twice."""


@dataclass(frozen=True)
class DifferingRange:
    """A range of keys with differences.

    If the databases do not sort keys in the same way, a range has only a number, and consists of keys whose
    hashes are close together.
    """

    number: int
    after: dict[str, object] | None
    """The range begins after this key; None if it has no lower bound."""
    upto: dict[str, object] | None
    """The last key of the range; None if it has no upper bound."""
    missing: int
    extra: int
    different: int


@dataclass(frozen=True)
class Reconciliation:
    """The result of :func:`penstock.reconcile`."""

    equal: bool
    """Whether the copy has exactly the rows of the source."""
    rows: int
    """The number of rows of the source that were compared."""
    copy_rows: int
    """The number of rows of the copy."""
    ranges: int
    """The number of ranges that were compared."""
    first_position: int
    """The source's WAL position when the first range was read."""
    position: int
    """The source's WAL position when it was last read. Later changes are not compared."""
    missing: int
    """Rows that the copy lacks."""
    extra: int
    """Rows that only the copy has."""
    different: int
    """Rows with different values."""
    undecided: int
    """Rows that differed and kept changing, or with which the copy did not catch up in time."""
    evidence: str
    """How rows that only lag were excluded: ``settled`` (by waiting) or ``checkpoint``."""
    differing_ranges: tuple[DifferingRange, ...]
    differing_rows: tuple[DifferingRow, ...]
    """The first rows that differ."""
    repaired: int
    """Rows that the repair wrote or deleted."""

    @property
    def differences(self) -> int:
        """The number of rows that differ."""
        return self.missing + self.extra + self.different
