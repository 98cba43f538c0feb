"""In Spark's Python workers, where no program sets up a log, warnings are still written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

SILENT, HEARD = "silent", "heard"


def heard() -> str:
    """Whether a warning of Penstock's is written in this process, which has set up nothing."""
    import penstock

    assert penstock.__version__
    log: logging.Logger | None = logging.getLogger("penstock.store")
    while log is not None and log.name != "root":
        if log.handlers:
            return SILENT
        log = log.parent
    return HEARD


class Asking(DataSource):
    """A stream that notes down what each of Spark's processes has found."""

    @classmethod
    def name(cls) -> str:
        return "asking"

    def schema(self) -> str:
        return "found string"

    def streamReader(self, schema: Any) -> Reader:  # noqa: N802 - the names of PySpark
        return Reader(self.options["folder"])


class Reader(DataSourceStreamReader):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - as above
        Path(self.folder, "planning").write_text(heard())
        return {"at": 0}

    def latestOffset(self) -> dict[str, int]:  # noqa: N802 - as above
        return {"at": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        Path(self.folder, "task").write_text(heard())
        yield pa.RecordBatch.from_pydict({"found": ["x"]})


def test_the_planning_of_a_source_and_its_tasks_say_their_warnings(
    spark: SparkSession, tmp_path: Path
) -> None:
    assert heard() == SILENT, "this process is somebody's program"
    spark.dataSource.register(Asking)
    frame = spark.readStream.format("asking").option("folder", str(tmp_path)).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert {name: (tmp_path / name).read_text() for name in ("planning", "task")} == {
        "planning": HEARD,
        "task": HEARD,
    }
