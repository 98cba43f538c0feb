"""One run of a continuous query: a Spark job, and the lines to its tasks.

A run may be made while the one before it is still at work: its tasks are told where they begin when they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.continuous.coordinator import EpochCoordinator
from penstock.continuous.ends import Positions
from penstock.continuous.epochs import Epochs
from penstock.continuous.writer import Sink


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

    def coordinator(self, epochs: Epochs) -> EpochCoordinator: ...

    def job(
        self, coordinator: EpochCoordinator, tasks: int, sink: Sink, *, hurried: bool, limited: bool
    ) -> Job: ...


@dataclass
class Run:
    """A run whose job is planned, and perhaps started."""

    coordinator: EpochCoordinator
    job: Job
    sink: Sink
    """What its tasks write to."""
    hurried: bool
    """Whether it is for many rows rather than for early ones."""

    @classmethod
    def made(
        cls, engine: Engine, tasks: int, sink: Sink, backlog: int, *, hurried: bool, limited: bool
    ) -> Run:
        """With a coordinator of its own."""
        coordinator = engine.coordinator(Epochs(tasks, 0, backlog))
        return cls(
            coordinator,
            engine.job(coordinator, tasks, sink, hurried=hurried, limited=limited),
            sink,
            hurried,
        )

    @property
    def tasks(self) -> int:
        return self.coordinator.tasks

    @property
    def off_pace(self) -> bool:
        """Whether one reader is far behind, or, in a run that is for that, all have caught up."""
        return self.coordinator.off_pace >= (self.tasks if self.hurried else 1)

    def end(self, timeout: float) -> None:
        """Whatever its tasks do."""
        self.job.cancel()
        self.coordinator.close()
        self.job.join(timeout)


def grouped(positions: Positions, tasks: int) -> Sequence[Positions]:
    """Partitions by task."""
    partitions = sorted(positions)
    return [{p: positions[p] for p in partitions[task::tasks]} for task in range(tasks)]
