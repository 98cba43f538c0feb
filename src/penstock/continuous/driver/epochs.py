"""The epochs of one run: the pure logic, without sockets, threads or clocks.

An epoch begins when a reader has sent rows since the last one. Each reader that has sent rows sends a marker
after its rows, so a writer that reaches the marker has all rows of its task. An epoch is complete when every
reader has reported its offsets, and each writer that gets a marker has reported what it wrote. Complete
epochs are committed in order. (Compare Spark's EpochCoordinator, and Chandy and Lamport's "Distributed
Snapshots", 1985, with nothing in flight between tasks.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.continuous.connectors.protocol import Epoch, Times
from penstock.errors import ContinuousFailedError
from penstock.json_text import Json


def by_partition(values: Mapping[str, int]) -> dict[int, int]:
    """Return values by partition number; the keys of JSON objects are strings."""
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
    def from_reports(cls, read: Json, wrote: Json) -> TaskPart:
        """Return the part that a task's reader and writer have reported."""
        part = cls()
        last_times = by_partition(read["last_times"])
        part.read(by_partition(read["offsets"]), read["rows"], read["times"], last_times)
        part.wrote(wrote["attempts"], wrote["rows"], wrote["written"])
        return part

    def times(self) -> Iterator[Times]:
        """Yield the times of rows; a row is written by the first write after it was read."""
        for created, read, rows in self.read_times:
            index = bisect_left(self.written, read)
            if index < len(self.written):
                yield Times(created, read, self.written[index], rows)

    @property
    def complete(self) -> bool:
        return self.offsets is not None and (self.rows_in == 0 or self.attempts is not None)


def epoch_of(number: int, parts: Collection[TaskPart]) -> Epoch:
    """Return the epoch that consists of these complete parts."""
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
    """The epochs in flight of a run, with the reports of its tasks; not thread-safe."""

    tasks: int
    next_epoch: int
    max_in_flight: int
    """The maximum number of epochs in flight."""
    _sent: set[int] = field(default_factory=set)
    _open: dict[int, dict[int, TaskPart]] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether all rows that readers have sent are committed."""
        return not self._open and not self._sent

    @property
    def first_open(self) -> int:
        """The first incomplete epoch, which may still get rows."""
        unfinished = (
            number
            for number, parts in self._open.items()
            if not all(part.complete for part in parts.values())
        )
        return min(unfinished, default=self.next_epoch)

    def sent(self, task: int) -> None:
        """Record that a reader has sent the first rows since its last marker."""
        self._require_task(task)
        self._sent.add(task)

    def begin(self) -> int | None:
        """Begin an epoch; return its number.

        None if there are no new rows, or readers have not ended the last epoch yet.
        """
        if not self._sent or any(
            part.offsets is None for parts in self._open.values() for part in parts.values()
        ):
            return None
        if len(self._open) >= self.max_in_flight:
            raise ContinuousFailedError(
                f"{len(self._open)} epochs are in flight, and none of them can be committed yet: the writers "
                "are slower than the readers. Use a longer interval, or a faster sink",
                condition="CONTINUOUS_FAILED.EPOCH_BACKLOG",
                backlog=self.max_in_flight,
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
        """Record that a reader has ended an epoch at these offsets, with a marker if the epoch has rows."""
        part = self._part(task, number)
        if part.offsets is not None:
            raise _protocol_error(f"task {task} has reported its offsets of epoch {number} twice")
        part.read(offsets, rows, times, last_times or {})
        # The reader's last "sent" was about rows of this epoch.
        self._sent.discard(task)

    def wrote(self, task: int, number: int, attempts: Json, rows: int, written: Sequence[int] = ()) -> None:
        """Record that a writer has written all rows up to an epoch's marker."""
        part = self._part(task, number)
        if part.attempts is not None:
            raise _protocol_error(f"task {task} has written epoch {number} twice")
        if part.offsets is not None and not part.rows_in:
            raise _protocol_error(
                f"task {task} has written epoch {number} without having read any rows of it"
            )
        part.wrote(attempts, rows, written)

    def next_complete(self) -> Epoch | None:
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
            raise _protocol_error(f"epoch {number} is not the next one to commit")
        del self._open[number]

    def _require_task(self, task: int) -> None:
        if not 0 <= task < self.tasks:
            raise _protocol_error(f"there is no task {task}")

    def _part(self, task: int, number: int) -> TaskPart:
        self._require_task(task)
        if number not in self._open:
            raise _protocol_error(f"task {task} reports epoch {number}, which is not in flight")
        return self._open[number][task]


def _protocol_error(problem: str) -> ContinuousFailedError:
    return ContinuousFailedError(
        f"the tasks and the driver of the query disagree: {problem}. The query restarts after its last "
        "committed epoch",
        condition="CONTINUOUS_FAILED.PROTOCOL",
    )
