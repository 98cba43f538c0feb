"""Checkpoints that the page was given: what their files tell, looked at now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from penstock.errors import PenstockError
from penstock.instants import micros_of
from penstock.redaction import sentence
from penstock.spark.checkpoint import redact_location
from penstock.state.showing import CheckpointState, show
from penstock.ui.reading import iso

EVERY_SECONDS = 10.0
"""Between two looks: the files may be far away."""
_MESSAGE = 500


@dataclass(frozen=True)
class Found:
    """What a checkpoint holds."""

    shown: str
    """Its place, without secrets."""
    state: CheckpointState

    @property
    def written_at(self) -> int | None:
        """When a batch was last planned or committed, in microseconds since 1970."""
        batches = [batch for batch in (self.state.committed, self.state.planned) if batch is not None]
        moments = [moment for batch in batches for moment in (batch.planned_at, batch.committed_at)]
        return max((micros_of(_aware(moment)) for moment in moments if moment is not None), default=None)

    @property
    def watermark(self) -> str | None:
        """The one that the next batch runs with."""
        moment = self.state.watermark
        return None if moment is None else iso(micros_of(_aware(moment)))

    @property
    def state_bytes(self) -> int | None:
        """Bytes of all state files; None where the query keeps no state."""
        operators = self.state.operators
        return sum(operator.bytes for operator in operators) if operators else None


class Checkpoints:
    """The checkpoints at some locations.

    Parameters
    ----------
    clock
        Seconds, from anywhere.
    """

    def __init__(self, locations: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._locations, self._clock = tuple(locations), clock
        self._next = clock()
        self.found: list[Found] = []
        self.notes: list[str] = []

    def look(self) -> None:
        """Look at all of them, unless that was a moment ago."""
        if not self._locations or self._clock() < self._next:
            return
        found, notes = [], []
        for location in self._locations:
            try:
                state = show(None, location)
            except (PenstockError, ImportError, OSError, ValueError) as error:
                message = error.message if isinstance(error, PenstockError) else str(error)
                notes.append(sentence(f"checkpoint {redact_location(location)}: {message}", _MESSAGE))
            else:
                found.append(Found(redact_location(location), state))
                notes.extend(_untold(location, state))
        self.found, self.notes = found, notes
        self._next = self._clock() + EVERY_SECONDS


def _untold(location: str, state: CheckpointState) -> list[str]:
    if state.query_id is not None:
        return []
    return [sentence(f"checkpoint {redact_location(location)}: {why}", _MESSAGE) for why in state.unknown[:1]]


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def entry(found: Found) -> dict[str, Any]:
    """A query of which the checkpoint alone is known."""
    state = found.state
    last = state.planned or state.committed
    return {
        "id": state.query_id or found.shown,
        "engine": state.engine,
        "batch": state.last_planned,
        "rows_in": None if last is None else last.rows,
        "watermark": found.watermark,
        "state_bytes": found.state_bytes,
        "checkpoint": found.shown,
        "source": _sources(state),
        "updated_at": iso(found.written_at),
    }


def _sources(state: CheckpointState) -> str | None:
    last = state.planned or state.committed
    queues = [source.queue for source in last.sources] if last is not None else []
    names = [f"queue {queue.queue!r}" for queue in queues if queue is not None]
    return ", ".join(names) or None
