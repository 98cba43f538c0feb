"""A query that had nothing to do when it was started."""

from __future__ import annotations

import uuid
from typing import Any

from penstock.pipeline.query import STOP_SECONDS, Query


class EndedQuery(Query):
    """It ended at once; its status says why."""

    def __init__(self, query_id: str, name: str | None, message: str) -> None:
        self._id, self._name, self._message = query_id, name, message
        self._run_id = str(uuid.uuid4())

    @property
    def id(self) -> str:
        return self._id

    @property
    def runId(self) -> str:
        return self._run_id

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def isActive(self) -> bool:
        return False

    @property
    def status(self) -> dict[str, Any]:
        return {"message": self._message, "isDataAvailable": False, "isTriggerActive": False}

    @property
    def lastProgress(self) -> Any:
        return None

    @property
    def recentProgress(self) -> list[Any]:
        return []

    def exception(self) -> Exception | None:
        return None

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        return True

    def processAllAvailable(self) -> None:
        """Nothing is to be processed."""

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        return True
