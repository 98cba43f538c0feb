"""The rate source: rows at a steady rate with ``timestamp`` and ``value``, as those of Spark's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.continuous.connectors.protocol import Positions, SourceDriver
from penstock.continuous.task.channel import Channel
from penstock.continuous.task.reader import ReaderFactory, SourceReader
from penstock.errors import CheckpointMismatch

SCHEMA = pa.schema([("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.int64())])
_KIND = "penstock rate"
_MAX_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class RateReaderFactory(ReaderFactory):
    """Factory of readers: value v comes v / rate seconds after the beginning, in partition v % partitions."""

    rows_per_second: int
    partitions: int
    began: float
    """When value 0 came, or would have come, in seconds since 1970."""
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
        """Return the values below ``due`` that the partition has not produced yet."""
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

    def close(self) -> None:
        """Do nothing: it holds no resources."""


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
        """The schema of its rows."""
        return SCHEMA

    def own(self) -> None:
        """Do nothing: it has no other owner."""

    def start(self, logged: Any | None) -> Positions:
        counts = [0] * self.partitions if logged is None else self._counts(logged)
        self._at = min(count * self.partitions + part for part, count in enumerate(counts))
        return dict(enumerate(counts))

    def _counts(self, logged: Any) -> list[int]:
        counts = logged.get(_KIND) if isinstance(logged, Mapping) else None
        if not isinstance(counts, list) or len(counts) != self.partitions:
            raise CheckpointMismatch(
                f"the checkpoint has the offset {str(logged)[:200]!r}, which is not that of a rate source "
                f"with {self.partitions} partitions: it belongs to another query; use a new checkpoint"
            )
        return counts

    def ends(self) -> Positions:
        return {}

    def readers(self) -> RateReaderFactory:
        return RateReaderFactory(
            self.rows_per_second, self.partitions, time.time() - self._at / self.rows_per_second
        )

    def plan(self, start: Positions, end: Positions) -> Any:
        return {_KIND: [end[partition] for partition in range(self.partitions)]}

    def logged(self, offset: Any) -> bool:
        return False

    def release(self, ended: Any | None) -> None:
        """Do nothing: it has no other owner."""
