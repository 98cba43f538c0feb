"""A query that applies changes to a Delta table, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import types as spark

from penstock.lake.storage import DeltaLocation
from penstock.tables.changes.events import PRESENT, SEQUENCE
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.changes_writer import ChangesWriter, EventTask, change_event_layout, changes_writer
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.transactions import AppTransaction
from penstock.tables.delta.vectors import VECTORS_PROPERTY, vectors_enabled
from tests.tables.delta.row_queries import LocalSpark
from tests.tables.histories import Event
from tests.tables.histories import folded as folded_history

ROWS = (
    spark.StructType()
    .add("k", spark.StringType())
    .add("v", spark.LongType())
    .add("_change_type", spark.StringType())
    .add("_commit_version", spark.LongType())
)
LINES = pa.schema([("k", pa.string()), (SEQUENCE, pa.int64()), (PRESENT, pa.int32())])
VERSIONS = pa.schema([("k", pa.string()), (VALID_FROM, pa.int64()), (VALID_TO, pa.int64())])


def folded_latest(events: Iterable[Event]) -> list[tuple[str, int]]:
    last: dict[str, tuple[int, int, int]] = {}
    for key, value, sequence, present in events:
        last[key] = max(last.get(key, (-1, 0, 0)), (sequence, present, value))
    return sorted((key, value) for key, (_, present, value) in last.items() if present)


FOLDS: dict[int, Callable[[Iterable[Event]], list[Any]]] = {1: folded_latest, 2: folded_history}


def collapsed(batch: Iterable[Event], scd_type: int) -> list[Event]:
    """As Spark does it."""
    best: dict[Any, Event] = {}
    for event in sorted(batch, key=lambda event: event[2:]):
        best[(event[0], event[2]) if scd_type == 2 else event[0]] = event
    return list(best.values())


def lines(events: Iterable[Event]) -> pa.Table:
    return table_of([(key, sequence, present) for key, _, sequence, present in events], LINES)


def table_of(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


class Driver:
    """A query that applies changes to a table, without Spark."""

    by_tasks = True
    """Whether tasks look for stored rows and write new ones, else deltalake does it."""
    by_vectors = False
    """Whether the table has deletion vectors."""

    def __init__(
        self, folder: Path, scd_type: int, app_id: str = "app", schema: spark.StructType = ROWS
    ) -> None:
        self.scd_type, self.app_id = scd_type, app_id
        self.location = DeltaLocation.of(f"delta://{folder}", "t")
        events = change_event_layout(schema, self.location, ["k"], "_commit_version", scd_type)
        self.writer: ChangesWriter = changes_writer(self.location, events, "exactly_once", "", app_id)
        table = self.location.open()
        if self.by_vectors and not vectors_enabled(table, self.location):
            table.alter.set_table_properties({VECTORS_PROPERTY: "true"})

    def apply(self, batch_id: int, events: Iterable[Event]) -> None:
        schema = pa.schema([("c0", pa.string()), ("c1", pa.int64()), ("sequence", pa.int64())])
        schema = schema.append(pa.field("present", pa.int32())).append(pa.field("ambiguous", pa.bool_()))
        self.write(
            batch_id, table_of([(*event, False) for event in collapsed(events, self.scd_type)], schema)
        )

    def write(self, batch_id: int, rows: pa.Table) -> None:
        """Apply events that Spark has collapsed."""
        transaction = AppTransaction(self.app_id, batch_id, 7)
        if self.writer._has_batch(self.writer._open(), transaction):
            return
        stage = DeltaStage(self.location, self.writer.layout, self.app_id, batch_id)
        file = EventTask(stage, events=self.writer.events).write_rows(iter(rows.to_batches(max_chunksize=3)))
        session = cast(SparkSession, LocalSpark()) if self.by_tasks else None
        self.writer._commit(stage, [] if file is None else [file], transaction, session)
        stage.delete_staged()

    def rows(self) -> list[tuple[Any, ...]]:
        found = pa.table(DeltaTable(self.location.path).scan()).to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)

    def table(self) -> DeltaTable:
        return self.location.open()

    def applied(self) -> DeltaTable:
        (path,) = Path(self.location.path).glob("_penstock/applied-*")
        return DeltaTable(str(path))


FIRST = [("a", 1, 1, 1), ("b", 1, 1, 1), ("c", 5, 5, 0), ("d", 2, 2, 1)]
SECOND = [("a", 3, 3, 0), ("b", 2, 2, 1), ("c", 4, 4, 1), ("e", 2, 2, 0), ("d", 1, 1, 1), ("f", 3, 3, 1)]
