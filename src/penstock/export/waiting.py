"""Waiting of an export for another one to end, or for a store or storage to answer."""

from __future__ import annotations

import logging
import threading

from penstock.errors import PenstockError, condition_of
from penstock.redaction import shown

log = logging.getLogger("penstock.export")

_STANDBY_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class Waits:
    """Waits of one export, which end early when it is stopped."""

    def __init__(self, queue: str, stopping: threading.Event) -> None:
        self._queue, self._stopping = queue, stopping
        self._pause = _FIRST_PAUSE
        self._stands_by = False

    def over(self) -> None:
        """Note that the reason for waiting is gone."""
        self._pause, self._stands_by = _FIRST_PAUSE, False

    def for_another(self, error: PenstockError) -> None:
        if not self._stands_by:
            self._stands_by = True
            log.info(
                "the export of queue %r takes over when another one ends: %s",
                self._queue,
                shown(error),
                extra={"action": "export_stands_by", "queue": self._queue},
            )
        self._stopping.wait(_STANDBY_SECONDS)

    def for_answer(self, error: PenstockError) -> None:
        log.warning(
            "the export of queue %r waits %.0f s: %s",
            self._queue,
            self._pause,
            shown(error),
            extra={"action": "export_waits", "queue": self._queue, "error": condition_of(error)},
        )
        self._stopping.wait(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
