"""With any interleaving of messages, no epoch is committed out of order, twice, partly or empty."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.continuous.connectors.protocol import Epoch
from penstock.continuous.driver.epochs import Epochs
from penstock.errors import ContinuousFailedError


@dataclass
class Task:
    """Reader and writer of a task, their connections to the driver, and the messages in flight."""

    number: int
    position: int = 0
    rows: int = 0
    requested_epochs: deque[int] = field(default_factory=deque)
    """Epochs that the reader has been asked to end but has not ended."""
    stream: deque[tuple[str, int]] = field(default_factory=deque)
    """Rows and markers between the reader and the writer."""
    from_reader: deque[tuple[str, int, int, int]] = field(default_factory=deque)
    from_writer: deque[tuple[int, int]] = field(default_factory=deque)
    written: int = 0

    def send(self) -> None:
        if not self.rows:
            self.from_reader.append(("sent", 0, 0, 0))
        self.rows += 1
        self.position += 1
        self.stream.append(("row", self.position))

    def end_epoch(self) -> None:
        if self.requested_epochs:
            number = self.requested_epochs.popleft()
            self.from_reader.append(("read", number, self.position, self.rows))
            if self.rows:
                self.stream.append(("marker", number))
                self.rows = 0

    def write(self) -> None:
        if self.stream:
            kind, number = self.stream.popleft()
            if kind == "row":
                self.written += 1
            else:
                self.from_writer.append((number, self.written))
                self.written = 0

    def report(self, epochs: Epochs) -> None:
        if self.from_reader:
            kind, number, position, rows = self.from_reader.popleft()
            if kind == "sent":
                epochs.sent(self.number)
            else:
                epochs.read(self.number, number, {self.number: position}, rows)

    def acknowledge(self, epochs: Epochs) -> None:
        if self.from_writer:
            number, rows = self.from_writer.popleft()
            epochs.wrote(self.number, number, {f"attempt {self.number}": rows}, rows)


STEPS = ("send", "end_epoch", "write", "report", "acknowledge", "begin", "commit")


def commit(epochs: Epochs, committed: list[Epoch]) -> None:
    epoch = epochs.next_complete()
    if epoch is not None:
        committed.append(epoch)
        epochs.committed(epoch.number)


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 3),
    first=st.integers(0, 5),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2)), max_size=120),
)
def test_epochs_are_committed_in_order_once_and_whole(
    count: int, first: int, steps: list[tuple[str, int]]
) -> None:
    tasks = [Task(number) for number in range(count)]
    epochs, committed = Epochs(count, first, 1000), list[Epoch]()

    def step(name: str, task: Task) -> None:
        if name == "begin":
            number = epochs.begin()
            for other in tasks if number is not None else ():
                other.requested_epochs.append(number)
        elif name == "commit":
            commit(epochs, committed)
        elif name in ("report", "acknowledge"):
            getattr(task, name)(epochs)
        else:
            getattr(task, name)()

    for name, task_index in steps:
        step(name, tasks[task_index % count])
        assert [epoch.number for epoch in committed] == list(range(first, first + len(committed)))
    # Run every task to its end: all rows that were sent are committed, and no empty epoch.
    for _ in range(10 * (len(steps) + 10)):
        for task in tasks:
            for name in ("end_epoch", "write", "report", "acknowledge", "begin", "commit"):
                step(name, task)
    assert epochs.idle
    assert all(epoch.rows_in == epoch.rows_out > 0 for epoch in committed)
    assert sum(epoch.rows_in for epoch in committed) == sum(task.position for task in tasks)
    if committed:
        assert committed[-1].offsets == {task.number: task.position for task in tasks}
    for earlier, later in pairwise(committed):
        moved = sum(later.offsets.values()) - sum(earlier.offsets.values())
        assert moved == later.rows_in, (
            "the rows of an epoch are those between the previous offsets and its own"
        )


def begin_epoch(tasks: int = 2) -> Epochs:
    epochs = Epochs(tasks, 7, 3)
    epochs.sent(0)
    assert epochs.begin() == 7
    return epochs


def test_an_epoch_begins_only_when_rows_were_sent() -> None:
    epochs = Epochs(2, 0, 3)
    assert epochs.begin() is None
    epochs.sent(1)
    assert epochs.begin() == 0
    epochs.sent(1)
    assert epochs.begin() is None, "no reader has ended the previous epoch"


def test_rows_sent_before_a_readers_marker_begin_no_second_epoch() -> None:
    epochs = begin_epoch()
    epochs.sent(1)
    epochs.read(0, 7, {0: 5}, 5)
    epochs.read(1, 7, {1: 2}, 2)
    assert epochs.begin() is None


def test_an_epoch_does_not_wait_for_the_writer_of_a_task_without_rows() -> None:
    epochs = begin_epoch()
    epochs.read(1, 7, {1: 0}, 0)
    epochs.wrote(0, 7, {"a": 1}, 3)
    assert epochs.next_complete() is None
    epochs.read(0, 7, {0: 4}, 4)
    assert epochs.next_complete() == Epoch(7, {0: 4, 1: 0}, {"a": 1}, 4, 3)


def test_an_impossible_message_ends_the_run() -> None:
    invalid_messages = [
        lambda epochs: epochs.read(0, 8, {}, 0),
        lambda epochs: epochs.wrote(0, 6, {}, 0),
        lambda epochs: epochs.read(2, 7, {}, 0),
        lambda epochs: epochs.sent(-1),
        lambda epochs: [epochs.read(0, 7, {0: 1}, 1) for _ in range(2)],
        lambda epochs: [epochs.wrote(0, 7, {}, 1) for _ in range(2)],
        lambda epochs: (epochs.read(0, 7, {0: 0}, 0), epochs.wrote(0, 7, {}, 0)),
        lambda epochs: epochs.committed(8),
    ]
    for send_message in invalid_messages:
        with pytest.raises(ContinuousFailedError) as caught:
            send_message(begin_epoch())
        assert caught.value.condition == "CONTINUOUS_FAILED.PROTOCOL"


def test_too_many_open_epochs_are_an_error() -> None:
    epochs = Epochs(1, 0, 2)
    for number in range(2):
        epochs.sent(0)
        assert epochs.begin() == number
        epochs.read(0, number, {0: number + 1}, 1)
    epochs.sent(0)
    with pytest.raises(ContinuousFailedError) as caught:
        epochs.begin()
    assert caught.value.condition == "CONTINUOUS_FAILED.EPOCH_BACKLOG"
