"""What the tasks of a continuous query do with rows for a SQL table."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.continuous.writer import Sink, SinkTask
from penstock.queue.open_stores import open_store
from penstock.spark.store_reach import check_reach
from penstock.store.staging import Attempt
from penstock.tables import merging
from penstock.tables.inserting import insert_chunk
from penstock.tables.segment_stage import SegmentStage
from penstock.tables.shaping import shaped
from penstock.tables.stages import CHUNK_BYTES, CHUNK_ROWS, chunked
from penstock.tables.task import Taking


@dataclass(frozen=True)
class TableWrites(Sink):
    """Rows into a table: seen when they are written, or staged for the end of their epoch."""

    url: str = field(repr=False)
    taking: Taking
    app_id: str | None
    """Of rows that are staged; None for rows that are seen at once."""

    def shaped(self, frame: Any) -> Any:
        return shaped(frame, self.taking.layout)

    def open(self, task: int) -> SinkTask:
        check_reach(self.url, None)
        return TableInserts(self) if self.app_id is None else TableStaging(self, task, self.app_id)


class TableInserts(SinkTask):
    """Each write is a transaction, or several where there are many rows."""

    def __init__(self, sink: TableWrites) -> None:
        self._taking = sink.taking
        self._database = open_store(sink.url).database

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        for chunk in chunked(iter(rows)):
            insert_chunk(self._database, self._taking.layout, self._taking.ready(chunk), merging.insert)

    def end(self, epoch: int) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing: the process keeps its store open."""


class TableStaging(SinkTask):
    """Rows are gathered, and staged when they are many or their epoch ends: nobody sees them any earlier for it."""

    def __init__(self, sink: TableWrites, task: int, app_id: str) -> None:
        self._taking, self._task, self._app_id = sink.taking, task, app_id
        self._attempt = str(uuid.uuid4())
        self._database = open_store(sink.url).database
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._staged = 0

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self._held += rows
        self._rows += sum(batch.num_rows for batch in rows)
        self._bytes += sum(batch.nbytes for batch in rows)
        if self._rows >= CHUNK_ROWS or self._bytes >= CHUNK_BYTES:
            self._stage(epoch)

    def _stage(self, epoch: int) -> None:
        taking = self._taking
        stage = SegmentStage.of(taking.layout, taking.columns, self._app_id, epoch)
        attempt = Attempt(self._app_id, epoch, self._task, self._attempt)
        for chunk in chunked(iter(self._held)):
            self._staged += stage.add(self._database, attempt, taking.ready(chunk), self._staged)
        self._held, self._rows, self._bytes = [], 0, 0

    def end(self, epoch: int) -> dict[str, int]:
        self._stage(epoch)
        staged, self._staged = self._staged, 0
        return {self._attempt: staged} if staged else {}

    def close(self) -> None:
        """Nothing: what is staged and never promoted goes with the next epoch."""
