"""``ExportPauses``: waiting until another export ends, or until a store or table storage answers."""

from __future__ import annotations

import logging
import threading

from penstock.errors import PenstockError, condition_of
from penstock.redaction import redacted_message

log = logging.getLogger("penstock.export")

_STANDBY_SECONDS = 1.0
_FIRST_PAUSE, _MAX_PAUSE = 1.0, 30.0


class ExportPauses:
    """Pauses of an export, which end early when it is stopped."""

    def __init__(self, queue: str, stopping: threading.Event) -> None:
        self._queue, self._stopping = queue, stopping
        self._pause = _FIRST_PAUSE
        self._is_standing_by = False

    def reset(self) -> None:
        """Record that the export no longer waits."""
        self._pause, self._is_standing_by = _FIRST_PAUSE, False

    def wait_for_other_export(self, error: PenstockError) -> None:
        if not self._is_standing_by:
            self._is_standing_by = True
            log.info(
                "the export of queue %r takes over when another one ends: %s",
                self._queue,
                redacted_message(error),
                extra={"action": "export_stands_by", "queue": self._queue},
            )
        self._stopping.wait(_STANDBY_SECONDS)

    def wait_for_storage(self, error: PenstockError) -> None:
        log.warning(
            "the export of queue %r waits %.0f s: %s",
            self._queue,
            self._pause,
            redacted_message(error),
            extra={"action": "export_waits", "queue": self._queue, "error": condition_of(error)},
        )
        self._stopping.wait(self._pause)
        self._pause = min(self._pause * 2, _MAX_PAUSE)
