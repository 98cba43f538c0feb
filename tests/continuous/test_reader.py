"""Pace of a reader: it reads immediately, or shortly after the last send if it knows of no more rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.continuous import tasks
from penstock.continuous.channel import FILLER, KIND, MARKER, METADATA_COLUMNS
from penstock.continuous.connectors.protocol import SourceReader
from penstock.continuous.tasks import ReadLoop
from penstock.json_text import Json
from penstock.spark.internals.udf_wrapper import ROW


class Clock:
    """Clock that replaces the reader's `time`. Each read of the source takes a tenth of a millisecond."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class TimedSource(SourceReader):
    """Source whose rows arrive at given milliseconds, and which returns up to `max_batch` rows at a time."""

    def __init__(self, clock: Clock, due: list[float], max_batch: int = 100) -> None:
        self._clock, self._max_batch = clock, max_batch
        self._due = [100.0 + milliseconds / 1000 for milliseconds in due]
        self.read_count = 0

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        self._clock.now += 0.0001
        arrived = self._arrived()
        rows = list(range(self.read_count, min(arrived, self.read_count + self._max_batch)))
        self.read_count += len(rows)
        return pa.record_batch({"id": rows}) if rows else None

    def _arrived(self) -> int:
        return sum(time <= self._clock.now for time in self._due)

    def unread_rows(self) -> int:
        return self._arrived() - self.read_count

    @property
    def is_over(self) -> bool:
        return self.read_count == len(self._due)

    def wait(self, channel: Any) -> None:
        self._clock.now = max(self._clock.now, self._due[self.read_count])

    def offsets(self) -> dict[int, int]:
        return {0: self.read_count}

    def close(self) -> None: ...


class Driver:
    """Channel that ends the reader when the source is exhausted."""

    def __init__(self, source: TimedSource) -> None:
        self._source = source

    def receive(self) -> Json | None:
        return {"kind": "finish"} if self._source.is_over else None

    def send(self, kind: str, **message: object) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tasks, "time", clock)
    return clock


def collect_sends(clock: Clock, source: TimedSource) -> list[tuple[float, list[int]]]:
    """Return the millisecond and the rows of each batch that has rows."""
    sends = []
    for batch in create_loop(source).batches():
        table = pa.Table.from_batches([batch])
        assert set(table[KIND].to_pylist()) <= {ROW, FILLER}
        rows = [row["id"] for row in table.to_pylist() if row[KIND] == ROW]
        if rows:
            sends.append((round((clock.now - 100) * 1000, 1), rows))
    return sends


def create_loop(source: TimedSource) -> ReadLoop:
    """Return a loop whose fillers are two rows."""
    return ReadLoop(source, Driver(source), 1, 2)  # type: ignore[arg-type]  # a partial channel is enough


def test_rows_that_arrive_just_after_a_send_are_sent_together(clock: Clock) -> None:
    assert collect_sends(clock, TimedSource(clock, [0, 0.3, 0.6, 0.9, 1.4, 1.8])) == [
        (0.1, [0]),
        (1.2, [1, 2, 3]),
        (2.3, [4, 5]),
    ]


def test_a_single_row_is_sent_without_delay(clock: Clock) -> None:
    assert collect_sends(clock, TimedSource(clock, [0, 5, 10])) == [(0.1, [0]), (5.1, [1]), (10.1, [2])]


def test_available_rows_are_read_without_a_pause(clock: Clock) -> None:
    assert collect_sends(clock, TimedSource(clock, [0] * 6, max_batch=2)) == [
        (0.1, [0, 1]),
        (0.2, [2, 3]),
        (0.3, [4, 5]),
    ]


def test_fillers_follow_rows_even_if_a_few_more_rows_have_arrived(clock: Clock) -> None:
    """Otherwise rows would wait while each read finds a single row, which is not enough to push them on."""
    source = TimedSource(clock, [number * 0.8 for number in range(50)], max_batch=1)
    batches = list(create_loop(source).batches())
    assert sum(batch.column(KIND).to_pylist().count(ROW) for batch in batches) == 50
    for batch in batches:
        assert batch.column(KIND).to_pylist()[-2:] == [FILLER, FILLER]


LARGE_ROW = pa.record_batch(
    {
        "text": ["t" * 100_000],
        "bytes": pa.array([b"b" * 100_000], pa.large_binary()),
        "list": [["l" * 100_000]],
        "map": pa.array([[("m" * 100_000, 1)]], pa.map_(pa.string(), pa.int64())),
        "struct": [{"id": 1, "inner": {"text": "s" * 100_000}}],
        "id": [7],
        "none": pa.array([None], pa.string()),
    }
)


class LargeRowSource(TimedSource):
    """Source of one large row."""

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        return None if super().read(max_rows) is None else LARGE_ROW


class EpochEndingDriver(Driver):
    """Channel that ends the epoch when the source is exhausted, and then the reader."""

    def __init__(self, source: TimedSource) -> None:
        super().__init__(source)
        self._messages: list[Json] = [{"kind": "finish"}, {"kind": "epoch", "number": 1}]

    def receive(self) -> Json | None:
        return self._messages.pop() if self._source.is_over else None


def test_markers_and_fillers_are_small_however_large_the_rows_are(clock: Clock) -> None:
    source = LargeRowSource(clock, [0])
    reading = ReadLoop(source, EpochEndingDriver(source), 1, 100)  # type: ignore[arg-type]  # a partial channel is enough
    table = pa.Table.from_batches(reading.batches())
    assert table.column(KIND).to_pylist() == [ROW, *[FILLER] * 100, MARKER, *[FILLER] * 100]
    assert table.slice(0, 1).drop_columns(METADATA_COLUMNS.names).to_batches() == [LARGE_ROW]
    assert table.slice(1).nbytes < LARGE_ROW.nbytes / 10
