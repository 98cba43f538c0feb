"""A query that writes an Iceberg table, micro-batch by micro-batch, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table
from pyspark import cloudpickle
from pyspark.sql import types as spark

from penstock.arrow.schema import canonical_schema
from penstock.tables.iceberg import event_files, numbered_tasks, stage, writer
from penstock.tables.iceberg.attempts import _list_files
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.schema import rows_layout
from penstock.tables.iceberg.transactions import MicroBatch
from penstock.tables.iceberg.writer import IcebergWriter, iceberg_writer

ROWS = spark.StructType().add("k", spark.LongType()).add("v", spark.StringType())
Row = tuple[Any, ...]


class _Result:
    """What a query over Arrow batches gives; each batch is a task of its own."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches

    def mapInArrow(  # noqa: N802 - Spark's name
        self, task: Callable[..., Iterator[pa.RecordBatch]], _schema: object
    ) -> _Result:
        # As Spark sends it to its workers.
        task = cloudpickle.loads(cloudpickle.dumps(task))
        parts = ([batch.slice(0, 1), batch.slice(1)] for batch in self._batches)
        return _Result([found for task_parts in parts for found in task(iter(task_parts))])

    def collect(self) -> list[Any]:
        return [SimpleNamespace(**row) for batch in self._batches for row in batch.to_pylist()]


class _Session:
    sparkContext = SimpleNamespace(defaultParallelism=2)  # noqa: N815 - Spark's name

    def range(self, start: int, end: int, _step: int, _tasks: int) -> _Result:
        return _Result([pa.record_batch({"id": [number]}) for number in range(start, end)])


class _Frame(_Result):
    sparkSession = _Session()  # noqa: N815 - Spark's name
    write = MagicMock()

    def __init__(self, schema: spark.StructType, tasks: Sequence[Sequence[Row]]) -> None:
        arrow = canonical_schema(schema)
        super().__init__(
            [
                pa.RecordBatch.from_pylist([dict(zip(arrow.names, row, strict=True)) for row in rows], arrow)
                for rows in tasks
            ]
        )
        self.schema, self.columns = schema, schema.names


class FaultyCatalog:
    """A catalog whose next commits go wrong, each in the way that its name says."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.faults: list[Callable[[Callable[[], Any]], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def load_table(self, identifier: Any) -> Table:
        table = self._catalog.load_table(identifier)
        table.catalog = cast("Catalog", self)
        return table

    def commit_table(self, *arguments: Any) -> Any:
        def commit() -> Any:
            return self._catalog.commit_table(*arguments)

        return self.faults.pop(0)(commit) if self.faults else commit()


class Run:
    """One run of a query; another one of the same query is another object."""

    def __init__(self, folder: Path, name: str = "t", catalog: Mapping[str, str] | None = None) -> None:
        """A run on a table of the catalog with some properties, by default one in SQLite."""
        folder.mkdir(exist_ok=True)
        properties = catalog or {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.location = IcebergLocation("lake", ("shop", name), properties)
        self.catalog = FaultyCatalog(self.location.catalog)
        self.location.__dict__["catalog"] = self.catalog

    @property
    def table(self) -> Table:
        return self.location.open()

    def rows(self) -> list[Row]:
        found = self.table.scan().to_arrow().to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)

    @property
    def stored(self) -> list[str]:
        """The names of all files in the table's data folder."""
        table = self.table
        files = _list_files(table.io, table.location_provider().data_path)
        return sorted(path.rpartition("/")[2] for path in files)

    @property
    def orphans(self) -> list[str]:
        """Those that no snapshot has."""
        table = self.table
        known = {
            entry.data_file.file_path.rpartition("/")[2]
            for snapshot in table.metadata.snapshots
            for manifest in snapshot.manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
        }
        return [file for file in self.stored if file not in known]


class Driver(Run):
    """A run of a query that writes rows."""

    def __init__(
        self,
        folder: Path,
        mode: str = "append",
        *keys: str,
        name: str = "t",
        schema: spark.StructType = ROWS,
        app_id: str = "app",
        guarantee: str = "exactly_once",
        catalog: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, name, catalog)
        self.app_id, self.schema, self.guarantee = app_id, schema, guarantee
        self.writer: IcebergWriter = iceberg_writer(
            self.location, rows_layout(schema, keys), mode, guarantee, "nowhere", app_id
        )

    def write(self, batch_id: int, *tasks: Sequence[Row], input_digest: str = "same") -> None:
        """Write a micro-batch, with the rows of each task."""
        batch = None
        if self.guarantee == "exactly_once":
            batch = MicroBatch(self.app_id, batch_id, input_digest)
        checkpoint = SimpleNamespace(require_query=lambda queries: list(queries))
        with (
            inline_tasks(),
            patch.object(IcebergWriter, "_micro_batch", lambda *_: batch),
            patch.object(writer, "numbered_columns", lambda frame: frame),
            patch.object(writer, "Checkpoint", lambda _: checkpoint),
        ):
            self.writer(cast(Any, _Frame(self.schema, tasks)), batch_id)


@contextmanager
def inline_tasks() -> Iterator[None]:
    """Run tasks in this process, as if Spark did."""
    context = SimpleNamespace(
        attemptNumber=lambda: 0, partitionId=lambda: 0, getLocalProperty=lambda _: "query"
    )
    tasks = SimpleNamespace(get=lambda: context)
    with ExitStack() as patches:
        for module in (stage, event_files, numbered_tasks):
            patches.enter_context(patch.object(module, "TaskContext", tasks))
        yield
