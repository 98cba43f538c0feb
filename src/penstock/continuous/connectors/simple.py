"""Rate sources, and console and function sinks, of continuous queries."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import pyarrow as pa
import pyarrow.compute as pc

from penstock.continuous.channel import Channel
from penstock.continuous.connectors.protocol import (
    Epoch,
    Positions,
    ReaderFactory,
    SinkDriver,
    SinkWriter,
    SourceDriver,
    SourceReader,
    WriterFactory,
)
from penstock.errors import CheckpointMismatchError
from penstock.json_text import Json, JsonValue

_MAX_CHARACTERS = 4 << 20
"""The maximum number of characters for all printed rows of an epoch."""
_RULE = "-" * 43


@dataclass(frozen=True)
class ConsoleWriterFactory(WriterFactory):
    """Factory of writers that send the first rows of each epoch to the driver, as text."""

    rows: int
    truncate: int
    """The maximum number of characters in a cell; 0 for no limit."""

    def open(self, task: int) -> SinkWriter:
        return _ConsoleWriter(self, task)


class _ConsoleWriter(SinkWriter):
    def __init__(self, sink: ConsoleWriterFactory, task: int) -> None:
        self._sink, self._task = sink, task
        self._rows: list[list[str]] = []
        self._names: list[str] = []

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        for batch in rows:
            self._names = batch.schema.names
            # Keep only as many rows as are printed.
            first = batch.slice(0, max(self._sink.rows - len(self._rows), 0))
            max_characters = self._sink.truncate or max(
                _MAX_CHARACTERS // (self._sink.rows * batch.num_columns), 20
            )
            columns = [
                [_text(value, max_characters) for value in column.to_pylist()] for column in first.columns
            ]
            self._rows += [list(cells) for cells in zip(*columns, strict=True)]

    def end(self, epoch: int) -> Json:
        rows, self._rows = self._rows, []
        return {str(self._task): {"names": self._names, "rows": rows}} if rows else {}


@dataclass
class ConsoleDriver(SinkDriver):
    """Driver side of the console sink, which prints the rows that tasks send."""

    rows: int = 20
    truncate: int = 20
    out: TextIO | None = None

    @property
    def description(self) -> str:
        return "console"

    def writer_factory(self) -> WriterFactory:
        return ConsoleWriterFactory(self.rows, self.truncate)

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        task_reports = [epoch.attempts[task] for task in sorted(epoch.attempts, key=int)]
        names: list[str] = next((task_report["names"] for task_report in task_reports), [])
        rows = [row for task_report in task_reports for row in task_report["rows"]][: self.rows]
        lines = [_RULE, f"Batch: {epoch.number}", _RULE, *_table(names, rows, align_left=not self.truncate)]
        if epoch.rows_out > len(rows):
            lines.append(f"only showing top {len(rows)} rows")
        print("\n".join(lines), file=self.out or sys.stdout, flush=True)


def _text(value: object, max_characters: int) -> str:
    text = "NULL" if value is None else str(value)
    if len(text) <= max_characters:
        return text
    return text[: max_characters - 3] + "..." if max_characters > 3 else text[:max_characters]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, align_left: bool) -> list[str]:
    widths = [max(3, *(len(cells[column]) for cells in [names, *rows])) for column in range(len(names))]
    separator = "+" + "+".join("-" * width for width in widths) + "+"
    pad = str.ljust if align_left else str.rjust
    lines = [f"|{'|'.join(map(pad, cells, widths))}|" for cells in [names, *rows]]
    return [separator, lines[0], separator, *lines[1:], separator, ""] if names else []


Function = Callable[[pa.RecordBatch], object]


@dataclass(frozen=True)
class FunctionWriter(WriterFactory, SinkWriter):
    """Writer that calls the function; it has no state, so it is its own factory."""

    function: Function

    def open(self, task: int) -> SinkWriter:
        return self

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self.function(pa.concat_batches(rows))

    def end(self, epoch: int) -> Json:
        return {}


@dataclass(frozen=True)
class FunctionDriver(SinkDriver):
    """Driver side of a function sink. Commits do nothing, so rows may be repeated after a failure."""

    function: Function

    @property
    def description(self) -> str:
        return f"function {getattr(self.function, '__name__', type(self.function).__name__)}"

    @property
    def visible_when_written(self) -> bool:
        return True

    def writer_factory(self) -> WriterFactory:
        return FunctionWriter(self.function)

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        """Do nothing: the function already has the rows."""


SCHEMA = pa.schema([("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.int64())])
_KIND = "penstock rate"
_MAX_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class RateReaderFactory(ReaderFactory):
    """Factory of readers. Value v arrives v / rate seconds after the start, in partition v % partitions."""

    rows_per_second: int
    partitions: int
    started: float
    """When value 0 arrived or would have arrived, in seconds since 1970."""
    schema: pa.Schema = SCHEMA

    def open(self, positions: Mapping[int, int]) -> SourceReader:
        return RateReader(self, positions)


class RateReader(SourceReader):
    """Reader of some partitions; a partition's offset is the number of values that it has produced."""

    def __init__(self, source: RateReaderFactory, positions: Mapping[int, int]) -> None:
        self._source, self._positions = source, dict(positions)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        due = int((time.time() - self._source.started) * self._source.rows_per_second) + 1
        arrays = [self._next_values(partition, due, max_rows) for partition in self._positions]
        values = pa.concat_arrays(arrays) if arrays else pa.array([], pa.int64())
        if not len(values):
            return None
        seconds = pc.divide(values.cast(pa.float64()), float(self._source.rows_per_second))
        micros = pc.multiply(pc.add(seconds, self._source.started), 1e6)
        timestamps = pc.round(micros).cast(pa.int64()).cast(SCHEMA.field("timestamp").type)
        return pa.RecordBatch.from_arrays([timestamps, values], schema=SCHEMA)

    def _next_values(self, partition: int, due: int, max_rows: int) -> pa.Array:
        """Return the values below ``due`` that the partition has not yet produced."""
        start, step = self._positions[partition], self._source.partitions
        end = min(max((due - partition + step - 1) // step, start), start + max_rows)
        self._positions[partition] = end
        positions = pc.cumulative_sum(pa.repeat(pa.scalar(step, pa.int64()), end - start))
        return pc.add(positions, (start - 1) * step + partition)

    def offsets(self) -> dict[int, int]:
        return dict(self._positions)

    def wait(self, channel: Channel) -> None:
        source = self._source
        next_value = min(count * source.partitions + part for part, count in self._positions.items())
        due_at = source.started + next_value / source.rows_per_second
        channel.wait(min(max(due_at - time.time(), 0.0), _MAX_WAIT_SECONDS))


@dataclass
class RateDriver(SourceDriver):
    """Driver side of a rate source. A later run continues with the next value, at its own start time."""

    rows_per_second: int
    partitions: int
    _next_value: int = 0

    @property
    def description(self) -> str:
        return f"rate of {self.rows_per_second} rows a second"

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def start(self, committed: JsonValue, read_begun: Callable[[], JsonValue] | None = None) -> Positions:
        counts = [0] * self.partitions if committed is None else self._parse_counts(committed)
        self._next_value = min(count * self.partitions + part for part, count in enumerate(counts))
        return dict(enumerate(counts))

    def _parse_counts(self, committed: JsonValue) -> list[int]:
        counts = committed.get(_KIND) if isinstance(committed, Mapping) else None
        if not isinstance(counts, list) or len(counts) != self.partitions:
            raise CheckpointMismatchError(
                f"the checkpoint has the offset {str(committed)[:200]!r}, which does not fit a rate source "
                f"with {self.partitions} partitions: it belongs to another query; use a new checkpoint",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
            )
        return counts

    def end_offsets(self) -> Positions:
        return {}

    def reader_factory(self) -> RateReaderFactory:
        return RateReaderFactory(
            self.rows_per_second, self.partitions, time.time() - self._next_value / self.rows_per_second
        )

    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        return {_KIND: [end[partition] for partition in range(self.partitions)]}
