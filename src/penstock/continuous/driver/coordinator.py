"""The coordinator of one run's epochs: the driver's end of the connections to its tasks.

It also distributes a row limit among the writers. A writer requests only the rows that it is about to write,
so no task holds a share that another task could use. Requests are granted in the order of epochs, so rows of
a later epoch never count before rows of an earlier one. Rows that were granted and not committed are released
when the run ends: the next run starts from what was committed.
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
from penstock.redaction import redacted_message
from penstock.spark.driver_connection import Connection
from penstock.spark.driver_endpoint import AuthenticatedListener, DriverNetwork

log = logging.getLogger("penstock.continuous")

_MAX_MESSAGE_BYTES = 16 << 20
"""Far more than the offsets of all partitions, or the rows for a console, need."""


@dataclass(frozen=True)
class Limit:
    """A limit on the rows that a query writes over all its runs."""

    rows: int
    stops: bool = True
    """Whether the query ends at the limit; otherwise it continues and drops further rows."""


@dataclass
class Quota:
    """The rows that one run may still write; not thread-safe."""

    rows_left: int

    def take(self, requested: int) -> int:
        """Return how many of the requested rows may be written, and count them."""
        granted = max(min(requested, self.rows_left), 0)
        self.rows_left -= granted
        return granted

    @property
    def exhausted(self) -> bool:
        return self.rows_left <= 0


class EpochCoordinator:
    """Server for the readers and writers of a run."""

    def __init__(self, network: DriverNetwork, epochs: Epochs) -> None:
        self.run = str(uuid.uuid4())
        self.epochs = epochs
        self.tasks = epochs.tasks
        self.quota: Quota | None = None
        """The rows that the run may still write, if there is a limit."""
        self._row_requests: dict[int, tuple[int, int]] = {}
        """Unanswered requests of writers, by task: the epoch and the number of rows."""
        self._changed = threading.Condition()
        self._has_changes = True
        """Whether anything has changed since the last call of ``next_complete``."""
        self._connections: dict[tuple[str, int], Connection] = {}
        self._finished_tasks: set[tuple[str, int]] = set()
        self._failure: Exception | None = None
        self.has_new_partitions = False
        """Whether a reader has reported that the source has new partitions."""
        self.far_behind = False
        """Whether a reader has reported that it is far behind."""
        self._paused: set[int] = set()
        # Comes last, because a task may connect immediately.
        self._listener = AuthenticatedListener(network, self._serve, "penstock-epochs")
        address = self._listener.address
        self.address = CoordinatorAddress(
            address.host, address.port, address.secret, address.certificate, self.run
        )

    # Called by the driver.

    def await_tasks(self, timeout: float, is_job_alive: Callable[[], bool]) -> None:
        expected = {(role, task) for role in (READER, WRITER) for task in range(self.epochs.tasks)}
        deadline = time.monotonic() + timeout
        with self._changed:
            while expected - self._connections.keys():
                self._raise_failure()
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0 or not is_job_alive():
                    break
                self._changed.wait(min(seconds_left, 0.1))
            missing = expected - self._connections.keys()
        if missing:
            raise ContinuousFailedError(
                f"{len(missing)} of {len(expected)} readers and writers of the query did not start"
                + ("" if seconds_left > 0 else f" within {timeout:.0f} s")
                + ": check that enough task slots are free, and that executors reach spark.driver.host",
                condition="CONTINUOUS_FAILED.NOT_STARTED",
            )

    def assign(self, epoch: int, groups: Sequence[Mapping[int, int]]) -> None:
        """Send each task's reader its partitions with their offsets, and the number of the first epoch."""
        with self._changed:
            self.epochs.next_epoch = epoch
            for task, positions in enumerate(groups):
                self._send(READER, task, encode("start", epoch=epoch, positions=positions))

    def begin(self) -> int | None:
        """End the current epoch if it has rows; return its number."""
        with self._changed:
            self._raise_failure()
            number = self.epochs.begin()
            if number is not None:
                self._send_to_readers(encode("epoch", number=number))
        return number

    def pause(self) -> None:
        with self._changed:
            self._send_to_readers(encode("pause"))

    def finish(self) -> None:
        """Let each reader end when it has sent all rows that it has read."""
        with self._changed:
            self._send_to_readers(encode("finish"))

    def next_complete(self, timeout: float) -> Epoch | None:
        """Return the next epoch to commit; None after ``timeout`` seconds or any other change."""
        with self._changed:
            if not self._has_changes and timeout > 0:
                self._changed.wait(timeout)
            self._has_changes = False
            self._raise_failure()
            return self.epochs.next_complete()

    def committed(self, number: int) -> None:
        with self._changed:
            self.epochs.committed(number)
            self._notify()

    def wake(self) -> None:
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        self._has_changes = True
        self._changed.notify_all()

    @property
    def is_drained(self) -> bool:
        """Whether the readers are paused and all rows that they have read are committed."""
        with self._changed:
            return len(self._paused) == self.tasks and self.epochs.idle

    @property
    def exhausted(self) -> bool:
        return self.quota is not None and self.quota.exhausted

    def interrupt(self, error: Exception) -> None:
        """End the run with an error, without waiting for its tasks."""
        with self._changed:
            self._fail(error)
        self.close()

    def close(self) -> None:
        self._listener.close()
        with self._changed:
            for connection in self._connections.values():
                connection.shut_down()

    # Messages from tasks.

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send_to_readers(self, message: bytes) -> None:
        for task in range(self.tasks):
            if (READER, task) not in self._finished_tasks:
                self._send(READER, task, message)

    def _send(self, role: str, task: int, message: bytes) -> None:
        try:
            self._connections[role, task].send_bytes(message)
        except OSError:
            self._fail(_disconnected_error(role, task))

    def _serve(self, connection: Connection) -> None:
        with connection:
            sender = self._identify(connection)
            if sender is None:
                return
            try:
                while self.receive(*sender, decode(connection.recv_bytes(_MAX_MESSAGE_BYTES))):
                    pass
            except Exception as error:
                # The connection broke, or a message was invalid.
                role, task = sender
                log.debug(
                    "the connection of %s %d was closed: %s",
                    *sender,
                    redacted_message(error),
                    extra={"action": "line_closed", "role": role, "task": task, "error": condition_of(error)},
                )
                with self._changed:
                    if sender not in self._finished_tasks and not self._listener.closed:
                        self._fail(_disconnected_error(role, task))
                    self._notify()

    def _identify(self, connection: Connection) -> tuple[str, int] | None:
        """Return the role and task of a connection; None if it belongs to another run."""
        try:
            hello = decode(connection.recv_bytes(_MAX_MESSAGE_BYTES))
        except (OSError, EOFError, ValueError):
            return None
        sender = (str(hello.get("role")), int(hello.get("task", -1)))
        with self._changed:
            if self._listener.closed or hello["kind"] != "hello" or hello.get("run") != self.run:
                return None
            if sender in self._connections:
                self._fail(
                    ContinuousFailedError(
                        f"Spark has started {sender[0]} {sender[1]} of the query a second time, for example "
                        "after the loss of an executor: the run restarts after the last committed epoch",
                        condition="CONTINUOUS_FAILED.STARTED_TWICE",
                    )
                )
                return None
            self._connections[sender] = connection
            self._notify()
        return sender

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
                    self.has_new_partitions = True
                elif kind == "want":
                    self._row_requests[task] = message["number"], message["rows"]
                elif kind == "behind":
                    self.far_behind = True
                elif kind == "paused":
                    self._paused.add(task)
                elif kind == "failed":
                    self._fail(ContinuousFailedError(str(message["error"])))
                elif kind == "done":
                    self._finished_tasks.add((role, task))
                self._grant_rows()
            except PenstockError as error:
                self._fail(error)
            self._notify()
        return bool(kind != "done")

    def _grant_rows(self) -> None:
        """Answer the requests for rows of the first open epoch.

        Rows that were granted to a later epoch would be missing in this one, which is committed first.
        """
        if self.quota is None:
            return
        for task, (epoch, rows) in list(self._row_requests.items()):
            if epoch <= self.epochs.first_open or self.quota.exhausted:
                del self._row_requests[task]
                self._send(WRITER, task, encode("granted", rows=self.quota.take(rows)))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._notify()


def _disconnected_error(role: str, task: int) -> ContinuousFailedError:
    return ContinuousFailedError(
        f"the {role} of task {task} has disconnected", condition="CONTINUOUS_FAILED.TASK_LOST", task=task
    )
