"""The function sink: a user's function, called with the rows in the tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.continuous.connectors.protocol import SinkDriver
from penstock.continuous.driver.epochs import Epoch
from penstock.continuous.task.writer import SinkWriter, WriterFactory

Function = Callable[[pa.RecordBatch], object]


@dataclass(frozen=True)
class FunctionWriter(WriterFactory, SinkWriter):
    """Writer that calls the function; it is its own factory, as it has no state."""

    function: Function

    def open(self, task: int) -> SinkWriter:
        return self

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self.function(pa.concat_batches(rows))

    def end(self, epoch: int) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Do nothing: it holds no resources."""


@dataclass(frozen=True)
class FunctionDriver(SinkDriver):
    """Driver side of a function: commits do nothing, so rows may come again after a failure."""

    function: Function

    @property
    def description(self) -> str:
        return f"function {getattr(self.function, '__name__', type(self.function).__name__)}"

    @property
    def at_once(self) -> bool:
        return True

    def check(self, schema: StructType) -> None:
        """Accept any rows."""

    def writers(self) -> WriterFactory:
        return FunctionWriter(self.function)

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: Any) -> None:
        """Do nothing: the function has got the rows."""
