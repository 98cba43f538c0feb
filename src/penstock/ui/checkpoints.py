"""Checkpoints on the monitor page; their files are read every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.instants import micros_of
from penstock.redaction import sentence
from penstock.spark.checkpoint import redact_location
from penstock.state.showing import CheckpointState, show
from penstock.ui.reading import iso

_INTERVAL_SECONDS = 10.0
"""The files may be on slow storage, so they are read less often than the store."""
_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True)
class Checkpoint:
    """The state of a checkpoint, and its location without secrets."""

    location: str
    state: CheckpointState

    @property
    def written_at(self) -> int | None:
        """The time when a batch was last planned or committed, in microseconds since 1970."""
        batches = [batch for batch in (self.state.committed, self.state.planned) if batch is not None]
        moments = [moment for batch in batches for moment in (batch.planned_at, batch.committed_at)]
        return max((micros_of(moment) for moment in moments if moment is not None), default=None)

    @property
    def watermark(self) -> str | None:
        moment = self.state.watermark
        return None if moment is None else iso(micros_of(moment))

    @property
    def state_bytes(self) -> int | None:
        """The bytes of all state files; None if the query keeps no state."""
        operators = self.state.operators
        return sum(operator.bytes for operator in operators) if operators else None

    @property
    def source(self) -> str | None:
        """The queues that the last batch reads."""
        last = self.state.planned or self.state.committed
        queues = [source.queue for source in last.sources] if last is not None else []
        return ", ".join(f"queue {queue.queue!r}" for queue in queues if queue is not None) or None


class Checkpoints:
    def __init__(self, locations: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._locations, self._clock = tuple(locations), clock
        self._next_update = clock()
        self.readable: list[Checkpoint] = []
        self.notes: list[str] = []

    def update(self) -> None:
        """Read all checkpoints, unless they were read within the last interval."""
        if not self._locations or self._clock() < self._next_update:
            return
        readable, notes = [], []
        for location in self._locations:
            shown_location = redact_location(location)
            try:
                state = show(None, location)
            except (PenstockError, ImportError, OSError, ValueError) as error:
                problems = [error.message if isinstance(error, PenstockError) else str(error)]
            except Exception as error:
                # Other programs may have written anything there.
                problems = [f"it cannot be read ({type(error).__name__})"]
            else:
                readable.append(Checkpoint(shown_location, state))
                problems = list(state.unknown[:1]) if state.query_id is None else []
            notes += [
                sentence(f"checkpoint {shown_location}: {problem}", _MESSAGE_CHARACTERS)
                for problem in problems
            ]
        self.readable, self.notes = readable, notes
        self._next_update = self._clock() + _INTERVAL_SECONDS
