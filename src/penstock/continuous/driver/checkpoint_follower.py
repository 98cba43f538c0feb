"""Write the checkpoint a moment after the commits, for a query whose sink keeps its offsets too.

The sink's transaction is then the only durable step of an epoch. What the checkpoint lacks after a crash, the
next driver finds in the sink (``checkpoint_log.catch_up``).
"""

from __future__ import annotations

import threading
import time
from collections import deque

from penstock.continuous.driver.checkpoint_log import CheckpointLog, log_epoch, log_offset
from penstock.json_text import JsonValue

FOLLOW_SECONDS = 0.1
"""Seconds between two logged epochs; epochs in between are skipped."""


class CheckpointFollower:
    """Logs the newest epoch in the sink, in a separate thread.

    The offset of the epoch before is logged too, since Spark resumes from two consecutive offsets.
    """

    def __init__(self, logs: CheckpointLog, retain: int) -> None:
        self._logs, self._retain = logs, retain
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, JsonValue]] = deque(maxlen=2)
        """The last epochs that are not logged yet."""
        self._writing = self._hurried = self._ended = False
        self.failure: Exception | None = None
        self._logged: tuple[int, JsonValue] | None = None
        self.thread: threading.Thread | None = None

    def add(self, number: int, offset: JsonValue) -> None:
        """Queue an epoch that the sink has committed for logging; raise the error of an earlier one."""
        with self._changed:
            self._raise_failure()
            self._waiting.append((number, offset))
            self._changed.notify_all()
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="checkpoint follower", daemon=True)
                self.thread.start()

    @property
    def logged(self) -> tuple[int, JsonValue] | None:
        """The last epoch that was logged, and its offset; for any thread."""
        with self._changed:
            return self._logged

    def newest(self) -> tuple[int, JsonValue] | None:
        """Return the last epoch that was logged, and its offset; raise the error of a later one, once."""
        with self._changed:
            self._raise_failure()
            return self._logged

    def flush(self) -> None:
        """Wait until everything is logged; raise any error."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._waiting or self._writing))
            self._hurried = False
            self._raise_failure()

    def end(self) -> None:
        """Log everything, and end the thread."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        wrote_at = time.monotonic() - FOLLOW_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                left = wrote_at + FOLLOW_SECONDS - time.monotonic()
                self._changed.wait_for(lambda: self._hurried or self._ended, max(left, 0.0))
                if not self._waiting:
                    return
                epochs = list(self._waiting)
                self._waiting.clear()
                self._writing = True
            wrote_at = time.monotonic()
            failure = self._log(epochs)
            with self._changed:
                self._writing, self.failure = False, failure or self.failure
                if failure is None:
                    self._logged = epochs[-1]
                self._changed.notify_all()

    def _log(self, epochs: list[tuple[int, JsonValue]]) -> Exception | None:
        """Log epochs, only the last of which gets a commit; return the error, if any."""
        try:
            for number, offset in epochs[:-1]:
                log_offset(self._logs, number, offset)
            number, offset = epochs[-1]
            log_epoch(self._logs, number, offset)
            self._logs.prune(number, self._retain)
        except Exception as error:
            return error
        return None
