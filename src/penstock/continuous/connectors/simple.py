"""The rate source, and the console and function sinks."""

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
"""The largest number of characters for all printed rows of an epoch."""
_RULE = "-" * 43


@dataclass(frozen=True)
class ConsoleWriterFactory(WriterFactory):
    """Factory of writers that send the first rows of each epoch to the driver, as text."""

    rows: int
    truncate: int
    """The largest number of characters in a cell; 0 for all."""

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

    def end(self, epoch: int) -> Json:
        shown, self._shown = self._shown, []
        return {str(self._task): {"names": self._names, "rows": shown}} if shown else {}


@dataclass
class ConsoleDriver(SinkDriver):
    """Driver side of the console: prints the rows that the tasks have sent."""

    rows: int = 20
    truncate: int = 20
    out: TextIO | None = None

    @property
    def description(self) -> str:
        return "console"

    def writers(self) -> WriterFactory:
        return ConsoleWriterFactory(self.rows, self.truncate)

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        parts = [epoch.attempts[task] for task in sorted(epoch.attempts, key=int)]
        names: list[str] = next((part["names"] for part in parts), [])
        rows = [row for part in parts for row in part["rows"]][: self.rows]
        text = [_RULE, f"Batch: {epoch.number}", _RULE, *_table(names, rows, left=not self.truncate)]
        if epoch.rows_out > len(rows):
            text.append(f"only showing top {len(rows)} rows")
        print("\n".join(text), file=self.out or sys.stdout, flush=True)


def _text(value: object, longest: int) -> str:
    text = "NULL" if value is None else str(value)
    if len(text) <= longest:
        return text
    return text[: longest - 3] + "..." if longest > 3 else text[:longest]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, left: bool) -> list[str]:
    widths = [max(3, *(len(cells[n]) for cells in [names, *rows])) for n in range(len(names))]
    rule = "+" + "+".join("-" * width for width in widths) + "+"
    pad = str.ljust if left else str.rjust
    lines = [f"|{'|'.join(map(pad, cells, widths))}|" for cells in [names, *rows]]
    return [rule, lines[0], rule, *lines[1:], rule, ""] if names else []


Function = Callable[[pa.RecordBatch], object]


@dataclass(frozen=True)
class FunctionWriter(WriterFactory, SinkWriter):
    """Writer that calls the function; it is its own factory, as it has no state."""

    function: Function

    def open(self, task: int) -> SinkWriter:
        return self

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self.function(pa.concat_batches(rows))

    def end(self, epoch: int) -> Json:
        return {}


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

    def writers(self) -> WriterFactory:
        return FunctionWriter(self.function)

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        """Do nothing, since the function already has the rows."""


SCHEMA = pa.schema([("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.int64())])
_KIND = "penstock rate"
_MAX_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class RateReaderFactory(ReaderFactory):
    """Factory of readers: value v arrives v / rate seconds after the start, in partition v % partitions."""

    rows_per_second: int
    partitions: int
    began: float
    """When value 0 arrived, or would have arrived, in seconds since 1970."""
    schema: pa.Schema = SCHEMA

    def open(self, positions: Mapping[int, int]) -> SourceReader:
        return RateReader(self, positions)


class RateReader(SourceReader):
    """Reader of some partitions; a partition's offset is the number of values that it has produced."""

    def __init__(self, source: RateReaderFactory, positions: Mapping[int, int]) -> None:
        self._source, self._positions = source, dict(positions)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        due = int((time.time() - self._source.began) * self._source.rows_per_second) + 1
        arrays = [self._values(partition, due, max_rows) for partition in self._positions]
        values = pa.concat_arrays(arrays) if arrays else pa.array([], pa.int64())
        if not len(values):
            return None
        seconds = pc.divide(values.cast(pa.float64()), float(self._source.rows_per_second))
        micros = pc.multiply(pc.add(seconds, self._source.began), 1e6)
        at = pc.round(micros).cast(pa.int64()).cast(SCHEMA.field("timestamp").type)
        return pa.RecordBatch.from_arrays([at, values], schema=SCHEMA)

    def _values(self, partition: int, due: int, max_rows: int) -> pa.Array:
        """Return the values below ``due`` that the partition has not yet produced."""
        start, every = self._positions[partition], self._source.partitions
        end = min(max((due - partition + every - 1) // every, start), start + max_rows)
        self._positions[partition] = end
        steps = pc.cumulative_sum(pa.repeat(pa.scalar(every, pa.int64()), end - start))
        return pc.add(steps, (start - 1) * every + partition)

    def offsets(self) -> dict[int, int]:
        return dict(self._positions)

    def wait(self, channel: Channel) -> None:
        source = self._source
        coming = min(count * source.partitions + part for part, count in self._positions.items())
        due = source.began + coming / source.rows_per_second
        channel.wait(min(max(due - time.time(), 0.0), _MAX_WAIT_SECONDS))


@dataclass
class RateDriver(SourceDriver):
    """Driver side of a rate source; a later run resumes with the next values, from its own start."""

    rows_per_second: int
    partitions: int
    _at: int = 0

    @property
    def description(self) -> str:
        return f"rate of {self.rows_per_second} rows a second"

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def start(self, logged: JsonValue, begun: Callable[[], JsonValue] | None = None) -> Positions:
        counts = [0] * self.partitions if logged is None else self._counts(logged)
        self._at = min(count * self.partitions + part for part, count in enumerate(counts))
        return dict(enumerate(counts))

    def _counts(self, logged: JsonValue) -> list[int]:
        counts = logged.get(_KIND) if isinstance(logged, Mapping) else None
        if not isinstance(counts, list) or len(counts) != self.partitions:
            raise CheckpointMismatchError(
                f"the checkpoint has the offset {str(logged)[:200]!r}, which does not fit a rate source "
                f"with {self.partitions} partitions: it belongs to another query; use a new checkpoint",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
            )
        return counts

    def ends(self) -> Positions:
        return {}

    def readers(self) -> RateReaderFactory:
        return RateReaderFactory(
            self.rows_per_second, self.partitions, time.time() - self._at / self.rows_per_second
        )

    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        return {_KIND: [end[partition] for partition in range(self.partitions)]}
