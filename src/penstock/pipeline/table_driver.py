"""A SQL table as the driver of a continuous query sees it: looked at before each run, and one transaction for each epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.continuous.commits import Commits
from penstock.continuous.ends import SinkDriver, SinkEpoch
from penstock.continuous.epochs import Epoch
from penstock.continuous.writer import Sink
from penstock.pipeline.table_tasks import TableWrites
from penstock.queue.open_stores import open_store
from penstock.tables import existing
from penstock.tables.loading import nul_refused
from penstock.tables.names import resolve
from penstock.tables.segment_stage import SegmentStage, drop_earlier
from penstock.tables.sink import TableSink
from penstock.tables.target import TableTarget
from penstock.tables.task import Taking


@dataclass
class TableSinkDriver(SinkDriver):
    """A table to add rows to."""

    table: TableSink
    url: str = field(repr=False)
    query_id: str
    exactly_once: bool
    _taking: Taking | None = field(default=None, init=False)

    @property
    def description(self) -> str:
        return f"table {in_quotes(self.table.name)}"

    @property
    def at_once(self) -> bool:
        return not self.exactly_once

    def check(self, schema: StructType) -> None:
        self._taking = Taking.of(self.table.prepared(self.url, schema, "append", self.table.keys))

    def clear(self) -> None:
        if self.exactly_once:
            name = self._known.layout.name.ledger_name
            drop_earlier(open_store(self.url).database, name, self._commits.app_id)

    def sink(self) -> TableWrites:
        """See whether the table is still there."""
        layout = self._known.layout
        open_store(self.url).database.run(lambda tx: existing.require(tx, layout), write=False)
        return TableWrites(self.url, self._known, self._commits.app_id if self.exactly_once else None)

    def newest(self) -> SinkEpoch:
        database = open_store(self.url).database
        name = database.run(lambda tx: resolve(tx, self.table.name), write=False)
        return self._commits.newest(name.ledger_name)

    @property
    def may_be_new(self) -> bool:
        return self.table.allow_new_sink

    def commit(self, sink: Sink, epoch: Epoch, offset: Any) -> None:
        if not self.exactly_once:
            self._commits.note(self._known.layout.name.ledger_name, epoch, offset)
            return
        with nul_refused():
            self._commits.commit(self._target(epoch.number), epoch, offset)

    @property
    def _known(self) -> Taking:
        assert self._taking is not None, "it is checked first"
        return self._taking

    @property
    def _commits(self) -> Commits:
        table = self.table
        return Commits(
            self.url,
            self.query_id,
            table.app_id or self.query_id,
            table.allow_new_checkpoint,
            table.allow_new_sink,
        )

    def _target(self, number: int) -> TableTarget:
        known = self._known
        stage = SegmentStage.of(known.layout, known.columns, self._commits.app_id, number)
        return TableTarget(known.layout, self.table.name, "append", stage)
