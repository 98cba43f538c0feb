"""Writer for sinks that stage rows until their epoch ends."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence

import pyarrow as pa

from penstock.continuous.connectors.protocol import SinkWriter
from penstock.store.staging import Attempt

MOST_ROWS, MOST_BYTES = 50_000, 4 << 20
"""How many rows or bytes may wait for the end of their epoch. Staging one row takes as long as staging
hundreds, and this many do not delay the commit much.
"""


class StagingWriter(SinkWriter):
    """Writer of a task that gathers rows, and stages them when there are many or when their epoch ends."""

    def __init__(self, app_id: str, task: int, *, most_rows: int, most_bytes: int) -> None:
        self._app_id, self._task, self._attempt = app_id, task, str(uuid.uuid4())
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._staged = 0

    @abstractmethod
    def stage(self, rows: Sequence[pa.RecordBatch], attempt: Attempt, staged: int) -> int:
        """Stage rows of an attempt that has ``staged`` parts already; return how many were added.

        They need not be durable before their epoch is: if staged rows are lost, the run is repeated.
        """

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self._held += rows
        self._rows += sum(batch.num_rows for batch in rows)
        self._bytes += sum(batch.nbytes for batch in rows)
        if self._rows >= self._most_rows or self._bytes >= self._most_bytes:
            self._stage(epoch)

    def _stage(self, epoch: int) -> None:
        held, self._held, self._rows, self._bytes = self._held, [], 0, 0
        if held:
            attempt = Attempt(self._app_id, epoch, self._task, self._attempt)
            self._staged += self.stage(held, attempt, self._staged)

    def end(self, epoch: int) -> dict[str, int]:
        self._stage(epoch)
        staged, self._staged = self._staged, 0
        return {self._attempt: staged} if staged else {}
