"""The coordinator of one run's epochs: the driver's end of the connections to its tasks.

It also distributes a row limit among the writers. A writer requests as many rows as it is about to write, so
that no task holds a share that another one could use. Epochs are served in order, so rows of a later epoch
never count before those of an earlier one. Rows that a run was granted and has not committed are forfeited
when it ends; the next run starts from what was committed.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.continuous.channel import READER, WRITER, CoordinatorAddress, decode, encode
from penstock.continuous.connectors.protocol import Epoch
from penstock.continuous.driver.epochs import Epochs, by_partition
from penstock.errors import ContinuousFailedError, PenstockError, condition_of
from penstock.json_text import Json
from penstock.redaction import shown
from penstock.spark.driver_connection import Connection
from penstock.spark.driver_endpoint import AuthenticatedListener, DriverNetwork

log = logging.getLogger("penstock.continuous")

_MAX_MESSAGE_BYTES = 16 << 20
"""Far more than needed for the offsets of all partitions or the rows for a console."""


@dataclass(frozen=True)
class Limit:
    """A limit on the rows that a query writes over all its runs."""

    rows: int
    stops: bool = True
    """Whether the query ends at the limit; otherwise it drops further rows."""


@dataclass
class Quota:
    """The rows that a limit leaves for one run; not thread-safe."""

    left: int

    def take(self, wanted: int) -> int:
        """Return how many of the wanted rows may be written, and count them."""
        granted = max(min(wanted, self.left), 0)
        self.left -= granted
        return granted

    @property
    def exhausted(self) -> bool:
        return self.left <= 0


class EpochCoordinator:
    """Server for the readers and writers of a run."""

    def __init__(self, network: DriverNetwork, epochs: Epochs) -> None:
        self.run = str(uuid.uuid4())
        self.epochs = epochs
        self.tasks = epochs.tasks
        self.quota: Quota | None = None
        """The rows that a row limit leaves."""
        self._wants: dict[int, tuple[int, int]] = {}
        """Unanswered requests of writers by task: the epoch and the number of rows."""
        self._changed = threading.Condition()
        self._news = True
        """Whether anything has changed since the driver last asked for a complete epoch."""
        self._lines: dict[tuple[str, int], Connection] = {}
        self._done: set[tuple[str, int]] = set()
        self._failure: Exception | None = None
        self.grown = False
        """Whether a reader reports that the source has more partitions."""
        self.behind = False
        """Whether a reader reports that it is far behind."""
        self._paused: set[int] = set()
        # Last, since a task may connect immediately.
        self._listening = AuthenticatedListener(network, self._serve, "penstock-epochs")
        at = self._listening.address
        self.address = CoordinatorAddress(at.host, at.port, at.secret, at.certificate, self.run)

    # For the driver.

    def await_tasks(self, timeout: float, alive: Callable[[], bool]) -> None:
        wanted = {(role, task) for role in (READER, WRITER) for task in range(self.epochs.tasks)}
        deadline = time.monotonic() + timeout
        with self._changed:
            while wanted - self._lines.keys():
                self._require()
                left = deadline - time.monotonic()
                if left <= 0 or not alive():
                    break
                self._changed.wait(min(left, 0.1))
            missing = wanted - self._lines.keys()
        if missing:
            raise ContinuousFailedError(
                f"{len(missing)} of {len(wanted)} readers and writers of the query did not start"
                + ("" if left > 0 else f" within {timeout:.0f} s")
                + ": check that enough task slots are free, and that executors reach spark.driver.host",
                condition="CONTINUOUS_FAILED.NOT_STARTED",
            )

    def assign(self, epoch: int, groups: Sequence[Mapping[int, int]]) -> None:
        """Send each reader, by task, its partitions with their offsets, and the number of the first epoch."""
        with self._changed:
            self.epochs.next_epoch = epoch
            for task, positions in enumerate(groups):
                self._send(READER, task, encode("start", epoch=epoch, positions=positions))

    def begin(self) -> int | None:
        """End the current epoch if it has rows; return its number."""
        with self._changed:
            self._require()
            number = self.epochs.begin()
            if number is not None:
                self._send_to_readers(encode("epoch", number=number))
        return number

    def pause(self) -> None:
        with self._changed:
            self._send_to_readers(encode("pause"))

    def finish(self) -> None:
        """Let the readers end when they have sent all rows that they have read."""
        with self._changed:
            self._send_to_readers(encode("finish"))

    def complete(self, timeout: float) -> Epoch | None:
        """Return the next epoch to commit; None after ``timeout`` seconds or any other change."""
        with self._changed:
            if not self._news and timeout > 0:
                self._changed.wait(timeout)
            self._news = False
            self._require()
            return self.epochs.complete()

    def committed(self, number: int) -> None:
        with self._changed:
            self.epochs.committed(number)
            self._notify()

    def wake(self) -> None:
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        self._news = True
        self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Whether the readers are paused, and all rows that they have read are committed."""
        with self._changed:
            return len(self._paused) == self.tasks and self.epochs.idle

    @property
    def exhausted(self) -> bool:
        return self.quota is not None and self.quota.exhausted

    def interrupt(self, error: Exception) -> None:
        """End the run with an error, whatever its tasks are doing."""
        with self._changed:
            self._fail(error)
        self.close()

    def close(self) -> None:
        self._listening.close()
        with self._changed:
            for line in self._lines.values():
                line.shut_down()

    # Messages from the tasks.

    def _require(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send_to_readers(self, message: bytes) -> None:
        for task in range(self.tasks):
            if (READER, task) not in self._done:
                self._send(READER, task, message)

    def _send(self, role: str, task: int, message: bytes) -> None:
        try:
            self._lines[role, task].send_bytes(message)
        except OSError:
            self._fail(_broken(role, task))

    def _serve(self, line: Connection) -> None:
        with line:
            who = self._identify(line)
            if who is None:
                return
            try:
                while self.receive(*who, decode(line.recv_bytes(_MAX_MESSAGE_BYTES))):
                    pass
            except Exception as error:
                # The connection has broken, or carried an invalid message.
                role, task = who
                log.debug(
                    "the connection of %s %d is closed: %s",
                    *who,
                    shown(error),
                    extra={"action": "line_closed", "role": role, "task": task, "error": condition_of(error)},
                )
                with self._changed:
                    if who not in self._done and not self._listening.closed:
                        self._fail(_broken(role, task))
                    self._notify()

    def _identify(self, line: Connection) -> tuple[str, int] | None:
        """Return the role and task of a connection; None if it belongs to another run."""
        try:
            hello = decode(line.recv_bytes(_MAX_MESSAGE_BYTES))
        except (OSError, EOFError, ValueError):
            return None
        who = (str(hello.get("role")), int(hello.get("task", -1)))
        with self._changed:
            if self._listening.closed or hello["kind"] != "hello" or hello.get("run") != self.run:
                return None
            if who in self._lines:
                self._fail(
                    ContinuousFailedError(
                        f"Spark has started {who[0]} {who[1]} of the query a second time, for example after "
                        "losing an executor: the run begins again after the last committed epoch",
                        condition="CONTINUOUS_FAILED.STARTED_TWICE",
                    )
                )
                return None
            self._lines[who] = line
            self._notify()
        return who

    def receive(self, role: str, task: int, message: Json) -> bool:
        """Handle a message; return False after the last one."""
        kind = message["kind"]
        with self._changed:
            try:
                if kind == "sent":
                    self.epochs.sent(task)
                elif kind == "read":
                    offsets, last_times = (
                        by_partition(message["offsets"]),
                        by_partition(message["last_times"]),
                    )
                    self.epochs.read(
                        task, message["number"], offsets, message["rows"], message["times"], last_times
                    )
                elif kind == "wrote":
                    self.epochs.wrote(
                        task, message["number"], message["attempts"], message["rows"], message["written"]
                    )
                elif kind == "grown":
                    self.grown = True
                elif kind == "want":
                    self._wants[task] = message["number"], message["rows"]
                elif kind == "behind":
                    self.behind = True
                elif kind == "paused":
                    self._paused.add(task)
                elif kind == "failed":
                    self._fail(ContinuousFailedError(str(message["error"])))
                elif kind == "done":
                    self._done.add((role, task))
                self._grant()
            except PenstockError as error:
                self._fail(error)
            self._notify()
        return bool(kind != "done")

    def _grant(self) -> None:
        """Answer the writers of the first epoch.

        Rows granted to a later epoch would be missing from this one if it were the last to be committed.
        """
        if self.quota is None:
            return
        for task, (epoch, rows) in list(self._wants.items()):
            if epoch <= self.epochs.first or self.quota.exhausted:
                del self._wants[task]
                self._send(WRITER, task, encode("granted", rows=self.quota.take(rows)))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._notify()


def _broken(role: str, task: int) -> ContinuousFailedError:
    return ContinuousFailedError(
        f"the {role} of task {task} has disconnected", condition="CONTINUOUS_FAILED.TASK_LOST", task=task
    )
