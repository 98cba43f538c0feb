"""Which rows of a merged segment came with which append, and when: run lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow.segments import decode, encode

_SCHEMA = pa.schema([("end", pa.int64()), ("append", pa.int64()), ("timestamp", pa.int64())])


@dataclass(frozen=True)
class Part:
    """A segment as the runs see it: of one append at one time, or with encoded runs of its own."""

    rows: int
    append: int
    timestamp: int
    runs: bytes | None


@dataclass(frozen=True)
class Runs:
    """Runs of rows that share an append: its end (relative to the segment's start), id and time, ascending."""

    batch: pa.RecordBatch
    """Columns ``end``, ``append`` and ``timestamp`` (microseconds since 1970), all int64."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Runs:
        return cls(decode(data, _SCHEMA))

    @classmethod
    def of(cls, ends: Sequence[int], appends: Sequence[int], timestamps: Sequence[int]) -> Runs:
        return cls(pa.RecordBatch.from_arrays([ends, appends, timestamps], schema=_SCHEMA))

    @classmethod
    def concat(cls, parts: Sequence[Part]) -> Runs:
        """The runs of adjacent segments, one after the other."""
        batches: list[pa.RecordBatch] = []
        plain: tuple[list[int], list[int], list[int]] = ([], [], [])
        offset = 0
        for part in parts:
            if part.runs is None:
                plain[0].append(offset + part.rows)
                plain[1].append(part.append)
                plain[2].append(part.timestamp)
            else:
                batches += [cls.of(*plain).batch, cls.from_bytes(part.runs)._shifted(offset)]
                plain = ([], [], [])
            offset += part.rows
        return cls(pa.concat_batches([*batches, cls.of(*plain).batch]))._joined()

    def _shifted(self, offset: int) -> pa.RecordBatch:
        ends = pc.add(self.batch.column("end"), offset)
        return pa.RecordBatch.from_arrays([ends, *self.batch.columns[1:]], schema=_SCHEMA)

    def _joined(self) -> Runs:
        """One run for neighbours of the same append."""
        appends = self.batch.column("append")
        last = [*pc.not_equal(appends[:-1], appends[1:]).to_pylist(), True]
        return Runs(self.batch.filter(pa.array(last)))

    def to_buffer(self) -> pa.Buffer:
        return encode(self.batch)

    def slice(self, offset: int, length: int) -> Runs:
        """The runs of ``length`` rows from ``offset``, relative to them."""
        ends = pc.subtract(self.batch.column("end"), offset)
        starts = pa.concat_arrays([pa.array([-offset], pa.int64()), ends[:-1]])
        within = pc.and_(pc.greater(ends, 0), pc.less(starts, length))
        batch = pa.RecordBatch.from_arrays(
            [pc.min_element_wise(ends, pa.scalar(length, pa.int64())), *self.batch.columns[1:]],
            schema=_SCHEMA,
        )
        return Runs(batch.filter(within))

    def timestamps(self) -> pa.Array:
        """The time of every row, as int64 microseconds."""
        ends = self.batch.column("end")
        runs = pa.RunEndEncodedArray.from_arrays(ends.cast(pa.int32()), self.batch.column("timestamp"))
        return pc.run_end_decode(runs)

    def end_of(self, append: int) -> int:
        """Rows up to and with the last append whose id is at most ``append``."""
        index = pc.sum(pc.less_equal(self.batch.column("append"), append)).as_py() or 0
        return int(self.batch.column("end")[index - 1].as_py()) if index else 0

    def append_at(self, row: int) -> int:
        """The id of the append that brought a row."""
        index = pc.sum(pc.less_equal(self.batch.column("end"), row)).as_py() or 0
        return int(self.batch.column("append")[index].as_py())

    def timestamp_at(self, row: int) -> int:
        """The time of a row."""
        index = pc.sum(pc.less_equal(self.batch.column("end"), row)).as_py() or 0
        return int(self.batch.column("timestamp")[index].as_py())

    def rows_before(self, timestamp: int) -> int:
        """Rows that are older than ``timestamp``."""
        index = pc.sum(pc.less(self.batch.column("timestamp"), timestamp)).as_py() or 0
        return int(self.batch.column("end")[index - 1].as_py()) if index else 0
