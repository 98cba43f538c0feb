"""Delayed writes of the checkpoint, for a query whose sink also records its offsets.

The sink's transaction is then the only durable step of an epoch. After a crash, the next driver finds in the
sink what the checkpoint lacks (``checkpoint_log.catch_up``).
"""

from __future__ import annotations

import threading
import time
from collections import deque

from penstock.continuous.driver.checkpoint_log import CheckpointLog, log_epoch, log_offset
from penstock.json_text import JsonValue

FOLLOW_SECONDS = 0.1
"""Seconds between two logged epochs; the epochs in between are skipped."""


class CheckpointFollower:
    """Logs the newest epoch of the sink, in a separate thread.

    It also logs the offset of the previous epoch, because Spark resumes from two consecutive offsets.
    """

    def __init__(self, checkpoint: CheckpointLog, retain: int) -> None:
        self._checkpoint, self._retain = checkpoint, retain
        self._changed = threading.Condition()
        self._pending: deque[tuple[int, JsonValue]] = deque(maxlen=2)
        """The last epochs that are not logged yet, with their offsets."""
        self._writing = self._flushing = self._ended = False
        self.failure: Exception | None = None
        self._logged: tuple[int, JsonValue] | None = None
        self.thread: threading.Thread | None = None

    def add(self, number: int, offset: JsonValue) -> None:
        """Queue a committed epoch for logging; raise the error of an earlier one."""
        with self._changed:
            self._raise_failure()
            self._pending.append((number, offset))
            self._changed.notify_all()
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="checkpoint follower", daemon=True)
                self.thread.start()

    @property
    def logged(self) -> tuple[int, JsonValue] | None:
        """The last logged epoch and its offset; for any thread."""
        with self._changed:
            return self._logged

    def newest(self) -> tuple[int, JsonValue] | None:
        """Return the last logged epoch and its offset; raise the error of a later epoch, once."""
        with self._changed:
            self._raise_failure()
            return self._logged

    def flush(self) -> None:
        """Wait until everything is logged; raise any error."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._pending or self._writing))
            self._flushing = False
            self._raise_failure()

    def end(self) -> None:
        """Log everything and end the thread."""
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
        last_write = time.monotonic() - FOLLOW_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._ended)
                seconds_left = last_write + FOLLOW_SECONDS - time.monotonic()
                self._changed.wait_for(lambda: self._flushing or self._ended, max(seconds_left, 0.0))
                if not self._pending:
                    return
                epochs = list(self._pending)
                self._pending.clear()
                self._writing = True
            last_write = time.monotonic()
            failure = self._log(epochs)
            with self._changed:
                self._writing, self.failure = False, failure or self.failure
                if failure is None:
                    self._logged = epochs[-1]
                self._changed.notify_all()

    def _log(self, epochs: list[tuple[int, JsonValue]]) -> Exception | None:
        """Log the offsets of epochs, and the commit of the last one; return the error, if any."""
        try:
            for number, offset in epochs[:-1]:
                log_offset(self._checkpoint, number, offset)
            number, offset = epochs[-1]
            log_epoch(self._checkpoint, number, offset)
            self._checkpoint.prune(number, self._retain)
        except Exception as error:
            return error
        return None
