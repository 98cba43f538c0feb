"""What the demo found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.demo.feed import Summary
from penstock.demo.latency import Latency
from penstock.demo.proof import Count, Proof
from penstock.limits import LimitProgress


@dataclass(frozen=True)
class DemoResult:
    """All that the report tells.

    Parameters
    ----------
    feed
        What was written.
    killed
        The changes that were on the board when the job was killed.
    seconds
        From the start of the first job, before the first commit, to the last row.
    resumed
        Whether an earlier run had done a part of it.
    store
        The kind of store.
    latencies
        Of the delay alerts, by trigger and guarantee.
    cancelled, limit
        The first cancelled flights, and how far the limit of their query has come, by its checkpoint.
    """

    proofs: list[Proof]
    count: Count
    feed: Summary
    killed: int | None
    seconds: float
    resumed: bool
    store: str
    plot: Path
    preview: str
    preview_picture: Path
    latencies: list[Latency]
    latency_plot: Path
    cancelled: pa.Table
    limit: LimitProgress

    @property
    def holds(self) -> bool:
        """Whether every row arrived exactly once."""
        return all(proof.holds for proof in self.proofs)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {
            "holds": self.holds,
            "outputs": [asdict(proof) for proof in self.proofs],
            "rows": self.count.rows,
            "carryovers": self.count.carryovers,
            "updates": self.count.updates,
            "last_day": self.count.day,
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "plot": str(self.plot),
            "latencies": [each.to_dict() for each in self.latencies],
            "latency_plot": str(self.latency_plot),
            "first_cancelled": self.limit.to_dict(),
        }
