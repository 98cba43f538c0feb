"""The order of epochs in one run: the logic alone, without sockets, threads or time.

An epoch begins when some reader has sent rows since the last one. Each reader that has sent rows ends the
epoch with a marker in its stream of rows, and a writer that reaches the marker has all of these rows. An
epoch is complete when every reader has reported its offsets, and the writer of every marker has reported what
it wrote. Complete epochs are committed in order. (Compare Chandy and Lamport's "Distributed Snapshots", 1985,
with nothing in flight between the tasks, and Spark's EpochCoordinator.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.continuous.connectors.protocol import Epoch, Times
from penstock.errors import ContinuousFailedError
from penstock.json_text import Json


def by_partition(values: Mapping[str, int]) -> dict[int, int]:
    """Return a task's report by partition; in JSON, the partition numbers are strings."""
    return {int(partition): int(value) for partition, value in values.items()}


@dataclass
class TaskPart:
    """A task's part of an epoch."""

    offsets: dict[int, int] | None = None
    rows_in: int = 0
    attempts: Json | None = None
    rows_out: int = 0
    read_times: Sequence[Sequence[int]] = ()
    last_times: dict[int, int] = field(default_factory=dict)
    written: Sequence[int] = ()

    def read(
        self,
        offsets: Mapping[int, int],
        rows: int,
        times: Sequence[Sequence[int]],
        last_times: Mapping[int, int],
    ) -> None:
        self.offsets, self.rows_in, self.read_times = dict(offsets), rows, times
        self.last_times = dict(last_times)

    def wrote(self, attempts: Json, rows: int, written: Sequence[int]) -> None:
        self.attempts, self.rows_out, self.written = dict(attempts), rows, written

    @classmethod
    def of(cls, read: Json, wrote: Json) -> TaskPart:
        """Return the part described by the reports of a task's reader and writer."""
        part = cls()
        last_times = by_partition(read["last_times"])
        part.read(by_partition(read["offsets"]), read["rows"], read["times"], last_times)
        part.wrote(wrote["attempts"], wrote["rows"], wrote["written"])
        return part

    def times(self) -> Iterator[Times]:
        """Yield the times of rows; each row was written by the writer's next write after it was read."""
        for made, read, rows in self.read_times:
            place = bisect_left(self.written, read)
            if place < len(self.written):
                yield Times(made, read, self.written[place], rows)

    @property
    def complete(self) -> bool:
        return self.offsets is not None and (self.rows_in == 0 or self.attempts is not None)


def epoch_of(number: int, parts: Collection[TaskPart]) -> Epoch:
    """Return the epoch that consists of complete parts."""
    return Epoch(
        number,
        {partition: end for part in parts for partition, end in (part.offsets or {}).items()},
        {attempt: count for part in parts for attempt, count in (part.attempts or {}).items()},
        sum(part.rows_in for part in parts),
        sum(part.rows_out for part in parts),
        tuple(times for part in parts for times in part.times()),
        {partition: time for part in parts for partition, time in part.last_times.items()},
    )


@dataclass
class Epochs:
    """The reports of the tasks of a run, which are numbered from 0; not thread-safe."""

    tasks: int
    next_epoch: int
    backlog: int
    """How many epochs may be in flight."""
    _sent: set[int] = field(default_factory=set)
    _open: dict[int, dict[int, TaskPart]] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether all rows that readers have sent are committed."""
        return not self._open and not self._sent

    @property
    def first(self) -> int:
        """The first epoch that may still get rows; all before it are complete."""
        unfinished = (n for n, parts in self._open.items() if not all(p.complete for p in parts.values()))
        return min(unfinished, default=self.next_epoch)

    def sent(self, task: int) -> None:
        """Record that a reader has sent the first rows since its last marker."""
        self._known(task)
        self._sent.add(task)

    def begin(self) -> int | None:
        """Begin an epoch and return its number; None without rows, or while the last one is being read."""
        if not self._sent or any(
            part.offsets is None for parts in self._open.values() for part in parts.values()
        ):
            return None
        if len(self._open) >= self.backlog:
            raise ContinuousFailedError(
                f"{len(self._open)} epochs are in flight and none of them can be committed yet: the writers "
                "are slower than the readers. Use a longer interval, or a faster sink",
                condition="CONTINUOUS_FAILED.EPOCH_BACKLOG",
                backlog=self.backlog,
            )
        number = self.next_epoch
        self.next_epoch += 1
        self._open[number] = {task: TaskPart() for task in range(self.tasks)}
        self._sent.clear()
        return number

    def read(
        self,
        task: int,
        number: int,
        offsets: Mapping[int, int],
        rows: int,
        times: Sequence[Sequence[int]] = (),
        last_times: Mapping[int, int] | None = None,
    ) -> None:
        """Record that a reader ended an epoch at these offsets; it has sent a marker if it has sent rows."""
        part = self._part(task, number)
        if part.offsets is not None:
            raise _broken(f"task {task} has reported its offsets of epoch {number} twice")
        part.read(offsets, rows, times, last_times or {})
        # Its earlier "sent" was for rows of this epoch.
        self._sent.discard(task)

    def wrote(self, task: int, number: int, attempts: Json, rows: int, written: Sequence[int] = ()) -> None:
        """Record that a writer has reached the marker of an epoch and written all rows before it."""
        part = self._part(task, number)
        if part.attempts is not None:
            raise _broken(f"task {task} has written epoch {number} twice")
        if part.offsets is not None and not part.rows_in:
            raise _broken(f"task {task} has written an epoch {number} for which it has read nothing")
        part.wrote(attempts, rows, written)

    def complete(self) -> Epoch | None:
        """Return the next epoch to commit; None while it is not complete."""
        if not self._open:
            return None
        number = min(self._open)
        parts = self._open[number].values()
        if not all(part.complete for part in parts):
            return None
        return epoch_of(number, parts)

    def committed(self, number: int) -> None:
        if not self._open or number != min(self._open):
            raise _broken(f"epoch {number} is not the next one to commit")
        del self._open[number]

    def _known(self, task: int) -> None:
        if not 0 <= task < self.tasks:
            raise _broken(f"there is no task {task}")

    def _part(self, task: int, number: int) -> TaskPart:
        self._known(task)
        if number not in self._open:
            raise _broken(f"task {task} reports epoch {number}, which is not in flight")
        return self._open[number][task]


def _broken(what: str) -> ContinuousFailedError:
    return ContinuousFailedError(
        f"the tasks and the driver of the query disagree: {what}. The query restarts after its last "
        "committed epoch",
        condition="CONTINUOUS_FAILED.PROTOCOL",
    )
