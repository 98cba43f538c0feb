"""The demo's delay alerts: departures more than an hour late, through each trigger with each guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import penstock as ps
from penstock.demo.flights import FLIGHTS_SCHEMA, INSTANT

DEPARTURES = "departures"
RATE = 300
"""Departures a second that are offered, each an append."""
WARM_UP, MEASURED = 100, 900
"""How many of them, and how many that count."""
LATE_MINUTES = 60
INTERVAL = "100 ms"

_NAMES = ("flight_id", "carrier", "flight", "origin", "dest", "dep_delay")
_CHOSEN = pa.schema([FLIGHTS_SCHEMA.field(name) for name in _NAMES])
DEPARTURES_SCHEMA = pa.schema([*_CHOSEN, pa.field("sent", INSTANT, nullable=False)])
"""A flight that has left, and when its row was about to be appended."""


@dataclass(frozen=True)
class Case:
    """A trigger with a guarantee."""

    trigger: str
    guarantee: str

    @property
    def name(self) -> str:
        """Of the query, and of the queue that it writes to."""
        return f"alerts_{self.trigger}_{self.guarantee}"

    def made(self) -> ps.Trigger:
        """The trigger: micro-batches as fast as they go, or epochs."""
        return (
            ps.Trigger.continuous(INTERVAL) if self.trigger == "continuous" else ps.Trigger.processing_time()
        )


CASES = [
    Case(trigger, guarantee)
    for guarantee in ("exactly_once", "at_least_once")
    for trigger in ("continuous", "micro_batch")
]


def late(departures: Any) -> Any:
    """The transformation, of either trigger."""
    return departures.where(f"dep_delay > {LATE_MINUTES}")


def departures(year: pa.Table) -> pa.Table:
    """As many departures, one after the other, as are offered to a query: where the year has the most alerts among them."""
    left = year.filter(pc.is_valid(year["departed"])).sort_by(
        [("departed", "ascending"), ("flight_id", "ascending")]
    )
    count = min(WARM_UP + MEASURED, left.num_rows)
    alerts = np.concatenate([[0], np.cumsum(left["dep_delay"].to_numpy() > LATE_MINUTES)])
    first = int(np.argmax(alerts[count:] - alerts[: len(alerts) - count]))
    return left.slice(first, count).select(_NAMES).cast(_CHOSEN).combine_chunks()


def quick(url: str) -> str:
    """A SQLite store without a wait for the disk at each commit, which is all that would be measured; another one as it is."""
    return f"{url}?synchronous=normal" if url.startswith("sqlite:") and "?" not in url else url


def durability(url: str) -> str:
    """The kind of store, in a few words."""
    kind = "SQLite" if url.startswith("sqlite:") else "PostgreSQL"
    return f"{kind} (synchronous=normal)" if "synchronous=normal" in quick(url) else kind


def create_queues(store: ps.Store) -> None:
    """The queue of departures, and one of alerts for each case, anew."""
    for name in (DEPARTURES, *[case.name for case in CASES]):
        if name in store.queues():
            store.drop_queue(name, force=True)
        store.create_queue(name, DEPARTURES_SCHEMA, partitions=2)
