"""``Reconciliation``: the result of a comparison of a table with its copy."""

from __future__ import annotations

from dataclasses import dataclass

MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"
"""What a row of the copy may be: not there; there, but not in the source; or with other values."""
BY_SETTLING, BY_CHECKPOINT = "settled", "checkpoint"


@dataclass(frozen=True)
class DifferingRow:
    """A row of the copy that is not as in the source."""

    key: dict[str, object]
    """The values of its key columns."""
    kind: str
    """``missing``, ``extra`` or ``different``."""
    columns: tuple[str, ...] = ()
    """Of one that is different, the columns that differ; empty if the copy has the row twice."""


@dataclass(frozen=True)
class DifferingRange:
    """A range of keys with differences.

    A range whose database sorts keys by a language has a number only: its keys have hashes close together.
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
    """Whether the copy had every row of the source, and no others."""
    rows: int
    """The rows of the source that were compared."""
    copy_rows: int
    """The rows of the copy."""
    ranges: int
    """The ranges that were compared, one after the other."""
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
    """Rows that differed and kept changing, or that the copy had not caught up with in time."""
    evidence: str
    """How rows that only lag were left out: ``settled``, by waiting; or ``checkpoint``, by the position of
    the query that fills the copy.
    """
    differing_ranges: tuple[DifferingRange, ...]
    differing_rows: tuple[DifferingRow, ...]
    """The first rows that differ."""
    repaired: int
    """Rows that the repair wrote or deleted."""

    @property
    def differences(self) -> int:
        """The number of rows that differ."""
        return self.missing + self.extra + self.different
