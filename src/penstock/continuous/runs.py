"""One run of a continuous query: a Spark job, and the lines to its tasks.

A run may be made, and started, while the one before it is still at work: its tasks wait to be told where to begin.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.continuous.coordinator import EpochCoordinator
from penstock.continuous.ends import Positions
from penstock.continuous.epochs import Epochs
from penstock.continuous.writer import Sink

_PATIENCE = 2.0
"""Seconds in which tasks beside those of another run are there, or have no room."""


class Job(Protocol):
    """The Spark job of one run."""

    def start(self) -> None: ...

    def alive(self) -> bool: ...

    def join(self, timeout: float) -> bool: ...

    def cancel(self) -> None: ...

    def failure(self) -> Exception | None: ...


class Engine(Protocol):
    """What makes the coordinator and the job of a run; Spark's, but in tests of the protocol."""

    def tasks(self, partitions: int) -> int:
        """How many tasks read so many partitions."""

    def has_room(self, tasks: int) -> bool:
        """Whether as many tasks again can be started beside them."""

    def coordinator(self, epochs: Epochs) -> EpochCoordinator: ...

    def job(
        self, coordinator: EpochCoordinator, tasks: int, sink: Sink, *, hurried: bool, limited: bool
    ) -> Job: ...


@dataclass
class Run:
    """A run that is made, and perhaps started."""

    coordinator: EpochCoordinator
    job: Job
    hurried: bool
    """Whether it is for many rows rather than for early ones."""
    _started: float | None = field(default=None, init=False)

    @classmethod
    def made(
        cls, engine: Engine, tasks: int, sink: Sink, backlog: int, *, hurried: bool, limited: bool
    ) -> Run:
        """With a coordinator and a planned job of its own."""
        coordinator = engine.coordinator(Epochs(tasks, 0, backlog))
        return cls(
            coordinator,
            engine.job(coordinator, tasks, sink, hurried=hurried, limited=limited),
            hurried,
        )

    @property
    def tasks(self) -> int:
        return self.coordinator.tasks

    @property
    def off_pace(self) -> bool:
        """Whether one reader is far behind, or, in a run that is for that, all have caught up."""
        return self.coordinator.off_pace >= (self.tasks if self.hurried else 1)

    @property
    def is_waiting(self) -> bool:
        """Whether it was started and its tasks wait for their beginning, or do not come while others have their slots."""
        return self._started is None or (
            self.coordinator.complete_tasks or time.monotonic() > self._started + _PATIENCE
        )

    def start(self) -> None:
        """Start its tasks, if that was not done before."""
        if self._started is None:
            self._started = time.monotonic()
            self.job.start()

    def end(self, timeout: float) -> None:
        """Whatever its tasks do."""
        self.job.cancel()
        self.coordinator.close()
        if self._started is not None:
            self.job.join(timeout)


def grouped(positions: Positions, tasks: int) -> Sequence[Positions]:
    """Partitions by task."""
    partitions = sorted(positions)
    return [{p: positions[p] for p in partitions[task::tasks]} for task in range(tasks)]
