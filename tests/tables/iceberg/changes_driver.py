"""A query that applies changes to an Iceberg table, micro-batch by micro-batch, without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import pyarrow as pa
from pyspark.sql import types as spark

from penstock.tables.iceberg import changes_writer as changes
from penstock.tables.iceberg import writer
from penstock.tables.iceberg.applied_events import BRANCH
from penstock.tables.iceberg.changes_writer import ChangesWriter, change_layout, changes_writer
from penstock.tables.iceberg.transactions import MicroBatch
from penstock.tables.iceberg.writer import IcebergWriter
from tests.tables.delta.driver import ROWS, collapsed
from tests.tables.histories import Event
from tests.tables.iceberg.driver import Run, _Result, _Session, inline_tasks
from tests.tables.iceberg.faults import Fault


class _Changes(_Result):
    sparkSession = _Session()  # noqa: N815 - Spark's name
    write = MagicMock()


class ChangesDriver(Run):
    """A run of a query that applies changes."""

    def __init__(
        self,
        folder: Path,
        scd_type: int = 1,
        app_id: str = "app",
        *,
        name: str = "t",
        schema: spark.StructType = ROWS,
        keys: Sequence[str] = ("k",),
        faults: Sequence[Fault] = (),
        catalog: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, name, catalog)
        self.catalog.faults = list(faults)
        self.scd_type, self.app_id = scd_type, app_id
        accepted = change_layout(schema, self.location, keys, "_commit_version", scd_type)
        self.writer: ChangesWriter = changes_writer(
            self.location, accepted, "exactly_once", "nowhere", app_id
        )

    def apply(self, batch_id: int, events: Iterable[Event], input_digest: str = "same") -> None:
        """Apply the events of a micro-batch, three of them in each task."""
        self.write(batch_id, collapsed(events, self.scd_type), input_digest)

    def write(self, batch_id: int, events: Sequence[tuple[Any, ...]], input_digest: str = "same") -> None:
        """Apply events that Spark has collapsed: values, sequence, and whether the row is there."""
        layout = self.writer.events
        names = [f"c{number}" for number in range(len(layout.query_columns))]
        schema = pa.schema(
            [
                *(pa.field(name, field.type) for name, field in zip(names, layout.row_schema, strict=True)),
                ("sequence", layout.sequence_type),
                ("present", pa.int32()),
                *([] if layout.unchanged is None else [("unknown", pa.string())]),
                ("ambiguous", pa.bool_()),
            ]
        )
        rows = [dict(zip(schema.names, (*event, False), strict=True)) for event in events]
        tasks = [rows[start : start + 3] for start in range(0, len(rows), 3)] or [[]]
        frame = _Changes([pa.RecordBatch.from_pylist(task, schema) for task in tasks])
        checkpoint = SimpleNamespace(require_query=lambda queries: list(queries))
        batch = MicroBatch(self.app_id, batch_id, input_digest)
        with (
            inline_tasks(),
            patch.object(IcebergWriter, "_micro_batch", lambda *_: batch),
            patch.object(changes, "collapse", lambda frame, _: frame),
            patch.object(writer, "Checkpoint", lambda _: checkpoint),
        ):
            self.writer(cast(Any, frame), batch_id)

    def recorded(self) -> list[tuple[Any, ...]]:
        """The lines of the record."""
        table = self.table
        found = [
            entry.data_file
            for manifest in table.snapshot_by_name(BRANCH).manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io)
        ]
        lines = [
            tuple(row.values())
            for file in found
            for row in pa.parquet.read_table(file.file_path.removeprefix("file://")).to_pylist()
        ]
        return sorted(lines, key=repr)
