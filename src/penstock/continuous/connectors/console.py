"""The console sink: the first rows of each epoch, printed on the driver as Spark's console sink does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.continuous.connectors.protocol import SinkDriver
from penstock.continuous.driver.epochs import Epoch
from penstock.continuous.task.writer import SinkWriter, WriterFactory

_MAX_CHARACTERS = 4 << 20
"""Of all rows that are printed of an epoch."""
_RULE = "-" * 43


@dataclass(frozen=True)
class ConsoleWriterFactory(WriterFactory):
    """Factory of writers that send the first rows of each epoch to the driver, as text."""

    rows: int
    truncate: int
    """Characters of a cell; 0 for all."""

    def open(self, task: int) -> SinkWriter:
        return _ConsoleWriter(self, task)


class _ConsoleWriter(SinkWriter):
    def __init__(self, sink: ConsoleWriterFactory, task: int) -> None:
        self._sink, self._task = sink, task
        self._shown: list[list[str]] = []
        self._names: list[str] = []

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        for batch in rows:
            self._names = batch.schema.names
            # Keep no more rows than are printed.
            first = batch.slice(0, max(self._sink.rows - len(self._shown), 0))
            longest = self._sink.truncate or max(_MAX_CHARACTERS // (self._sink.rows * batch.num_columns), 20)
            columns = [[_text(value, longest) for value in column.to_pylist()] for column in first.columns]
            self._shown += [list(cells) for cells in zip(*columns, strict=True)]

    def end(self, epoch: int) -> dict[str, Any]:
        shown, self._shown = self._shown, []
        return {str(self._task): {"names": self._names, "rows": shown}} if shown else {}

    def close(self) -> None:
        """Do nothing: it holds no resources."""


@dataclass
class ConsoleDriver(SinkDriver):
    """Driver side of the console: it prints what the tasks have sent."""

    rows: int = 20
    truncate: int = 20
    out: TextIO | None = None

    @property
    def description(self) -> str:
        return "console"

    def check(self, schema: StructType) -> None:
        """Accept any rows."""

    def writers(self) -> WriterFactory:
        return ConsoleWriterFactory(self.rows, self.truncate)

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: Any) -> None:
        parts = [epoch.attempts[task] for task in sorted(epoch.attempts, key=int)]
        names: list[str] = next((part["names"] for part in parts), [])
        rows = [row for part in parts for row in part["rows"]][: self.rows]
        text = [_RULE, f"Batch: {epoch.number}", _RULE, *_table(names, rows, left=not self.truncate)]
        if epoch.rows_out > len(rows):
            text.append(f"only showing top {len(rows)} rows")
        print("\n".join(text), file=self.out or sys.stdout, flush=True)


def _text(value: Any, longest: int) -> str:
    text = "NULL" if value is None else str(value)
    if len(text) <= longest:
        return text
    return text[: longest - 3] + "..." if longest > 3 else text[:longest]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, left: bool) -> list[str]:
    widths = [max(3, *(len(cells[n]) for cells in [names, *rows])) for n in range(len(names))]
    rule = "+" + "+".join("-" * width for width in widths) + "+"
    lines = [
        "|"
        + "|".join(cell.ljust(w) if left else cell.rjust(w) for cell, w in zip(cells, widths, strict=True))
        + "|"
        for cells in [names, *rows]
    ]
    return [rule, lines[0], rule, *lines[1:], rule, ""] if names else []
