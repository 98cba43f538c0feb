"""Triggers of a pipeline."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.errors import InvalidOption
from penstock.instants import interval_micros

_INTERVAL = re.compile(r"\s*\d+(\.\d+)?\s*[a-z]+\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Trigger:
    """When a query runs; create one with the class methods."""

    kind: str
    interval: str | None = None

    @classmethod
    def processing_time(cls, interval: str = "0 seconds") -> Trigger:
        """Run a micro-batch at every interval; without one, each follows the last at once.

        Parameters
        ----------
        interval
            Such as ``"10 seconds"``.
        """
        if not isinstance(interval, str) or not _INTERVAL.fullmatch(interval):
            raise InvalidOption(f"an interval is text such as '10 seconds', not {interval!r}")
        return cls("processing_time", interval)

    @classmethod
    def available_now(cls) -> Trigger:
        """Process all rows that are there when the query starts, in one or more micro-batches, then end."""
        return cls("available_now")

    @classmethod
    def continuous(cls, interval: str = "1 second") -> Trigger:
        """Run row by row in one long Spark job, with latencies of milliseconds.

        An epoch is committed at every interval.         For transformations that work on one row at a time,
        from a queue or a rate source.

        Parameters
        ----------
        interval
            The length of an epoch, such as ``"100 ms"``.
        """
        micros = interval_micros(interval) if isinstance(interval, str) else None
        if not micros:
            raise InvalidOption(f"an interval is text such as '100 ms' or '1 second', not {interval!r}")
        return cls("continuous", interval)

    @property
    def seconds(self) -> float:
        """The interval in seconds."""
        return (interval_micros(self.interval or "") or 0) / 1_000_000

    def arguments(self) -> dict[str, str | bool]:
        """Return the arguments of Spark's ``DataStreamWriter.trigger``."""
        if self.kind == "available_now":
            return {"availableNow": True}
        return {"continuous" if self.kind == "continuous" else "processingTime": str(self.interval)}
