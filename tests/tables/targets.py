"""A table of a store, and queries that write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import penstock
from penstock.tables.columns import Layout, layout_of
from penstock.tables.names import resolve
from penstock.tables.row_encoding import database_schema, to_database_types
from penstock.tables.sql import apply, ddl
from penstock.tables.sql.staging import PostgresStage, SegmentStage, Stage
from penstock.tables.sql.writer import TableTarget
from tests.support.sql_tables import named, rows

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
SHAPED = pa.schema([("c0", pa.string()), ("c1", pa.int64())])
CHANGE_SCHEMA = pa.schema([*SCHEMA, ("_change_type", pa.string()), ("_commit_version", pa.int64())])
SHAPED_CHANGES = pa.schema([*SHAPED, ("sequence", pa.int64()), ("present", pa.int32())])


class Table:
    """A table with its keys, and what single tasks and drivers do with it."""

    CHANGES: str | None = None
    """Where rows are changes, what orders them."""
    HISTORY = False
    """Whether every version of a row is kept."""

    def __init__(
        self, store: penstock.Store, url: str, name: str = "t", keys: Sequence[str] = ("k",)
    ) -> None:
        self.store, self.url, self.name = store, url, name
        self.database = store.database

        def work(tx: Any) -> Layout:
            schema = SCHEMA if self.CHANGES is None else CHANGE_SCHEMA
            called = resolve(tx, named(url, name))
            layout = layout_of(
                called, schema, keys, tx.dialect, sequence_by=self.CHANGES, history=self.HISTORY
            )
            if self.CHANGES is None:
                ddl.ensure_table(tx, layout, complete=False)
            else:
                apply.prepare_tables(tx, layout)
            return layout

        self.layout = self.database.run(work)
        self._attempts = 0

    def stage(self, app_id: str = "app", batch_id: int = 0) -> Stage:
        columns = database_schema(SHAPED if self.CHANGES is None else SHAPED_CHANGES, self.layout.dialect)
        if self.layout.dialect == "postgres":
            return PostgresStage.open(self.database, self.layout, columns, app_id, batch_id)
        return SegmentStage.of(self.layout, columns, app_id, batch_id)

    def put(self, stage: Stage, *rows: tuple[Any, ...]) -> dict[str, int]:
        """What one attempt of a task stages."""
        self._attempts += 1
        shaped = SHAPED if self.CHANGES is None else SHAPED_CHANGES
        columns = zip(zip(*rows, strict=True), shaped.types, strict=True)
        batch = pa.RecordBatch.from_arrays(
            [pa.array(values, kind) for values, kind in columns], schema=shaped
        )
        chunks = iter([to_database_types(batch, stage.columns)])
        return stage.write_chunks(self.database, self._attempts, self._attempts, chunks)

    def write(self, stage: Stage, mode: str, attempts: dict[str, int]) -> int:
        target = TableTarget(self.layout, self.name, mode, stage)
        written = self.database.run(lambda tx: target.write(tx, attempts))
        if isinstance(stage, PostgresStage):
            self.database.run(stage.drop)
        return written

    def rows(self) -> list[tuple[Any, ...]]:
        return rows(self.url, self.name)
