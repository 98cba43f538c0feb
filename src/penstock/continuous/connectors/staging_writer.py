"""Base class of writers that stage rows until their epoch is committed."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence

import pyarrow as pa

from penstock.continuous.connectors.protocol import SinkWriter
from penstock.store.staging import Attempt

MAX_ROWS, MAX_BYTES = 50_000, 4 << 20
"""How many rows or bytes may wait until they are staged. Staging hundreds of rows takes as long as staging
one, and these limits keep the last write before a commit short.
"""


class StagingWriter(SinkWriter):
    """Writer of a task that collects rows, and stages them when there are many or their epoch ends."""

    def __init__(self, app_id: str, task: int, *, max_rows: int, max_bytes: int) -> None:
        self._app_id, self._task, self._attempt_id = app_id, task, str(uuid.uuid4())
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = self._staged_parts = 0

    @abstractmethod
    def stage(self, rows: Sequence[pa.RecordBatch], attempt: Attempt, staged_parts: int) -> int:
        """Stage rows of an attempt that already has ``staged_parts`` parts; return how many were added.

        Rows need not be durable before the commit. If they are lost, the run repeats the epoch.
        """

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self._pending += rows
        self._pending_rows += sum(batch.num_rows for batch in rows)
        self._pending_bytes += sum(batch.nbytes for batch in rows)
        if self._pending_rows >= self._max_rows or self._pending_bytes >= self._max_bytes:
            self._stage(epoch)

    def _stage(self, epoch: int) -> None:
        pending, self._pending, self._pending_rows, self._pending_bytes = self._pending, [], 0, 0
        if pending:
            attempt = Attempt(self._app_id, epoch, self._task, self._attempt_id)
            self._staged_parts += self.stage(pending, attempt, self._staged_parts)

    def end(self, epoch: int) -> dict[str, int]:
        self._stage(epoch)
        staged_parts, self._staged_parts = self._staged_parts, 0
        return {self._attempt_id: staged_parts} if staged_parts else {}
