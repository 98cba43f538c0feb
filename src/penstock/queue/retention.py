"""How much of a queue is kept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from penstock.arguments import require
from penstock.errors import InvalidInput
from penstock.store.records.catalog import RetentionLimits

_AGES_END = timedelta(microseconds=2**63)


@dataclass(frozen=True)
class Retention:
    """Bounds on each partition of a queue; whichever is reached first lets the oldest rows go.

    Rows that a vital consumer has not safely processed stay in any case. Without a bound everything stays.

    Parameters
    ----------
    rows
        Rows to keep; 0 drops a row as soon as every vital consumer is done with it.
    age
        How long to keep rows, from their append.
    bytes
        Compressed bytes to keep, in whole segments.
    """

    rows: int | None = None
    age: timedelta | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                raise InvalidInput(f"retention {name} is a whole number from 0 to 2**63 - 1, not {value!r}")
        if self.age is not None and (
            not isinstance(self.age, timedelta) or not timedelta(0) <= self.age < _AGES_END
        ):
            raise InvalidInput(f"retention age is a timedelta from 0 to 290000 years, not {self.age!r}")

    @classmethod
    def of(cls, limits: RetentionLimits) -> Retention:
        age = None if limits.age is None else timedelta(microseconds=limits.age)
        return cls(limits.rows, age, limits.bytes)


def limits_of(retention: Retention) -> RetentionLimits:
    """The bounds as the store keeps them.

    Raises
    ------
    InvalidInput
        When it is no retention.
    """
    require("retention", retention, Retention, "a ps.Retention, such as ps.Retention(rows=1_000_000)")
    age = None if retention.age is None else retention.age // timedelta(microseconds=1)
    return RetentionLimits(retention.rows, age, retention.bytes)
