"""A query that is far behind reads its backlog as one epoch, by a Spark job that ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.continuous.catch_up import BacklogReader, write_backlog
from penstock.continuous.connectors.protocol import SinkWriter, SourceReader
from penstock.continuous.driver import execution, runs
from penstock.continuous.driver.epochs import TaskPart, epoch_of
from penstock.json_text import Json
from tests.continuous.test_queries import NOW, Copy, evens
from tests.support.waiting import wait_until

PATIENCE = 60


@pytest.fixture
def copy(
    spark: SparkSession, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Copy]:
    """A copy for which a hundred rows are a backlog."""
    monkeypatch.setattr(execution, "BEHIND_ROWS", 100)
    found = Copy(spark, store_url, tmp_path)
    yield found
    for query in found.running:
        query.stop(10)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_backlog_is_one_epoch_and_later_rows_are_others(copy: Copy, guarantee: str) -> None:
    copy.add(1_000)
    query = copy.start(guarantee=guarantee)
    query.processAllAvailable()
    assert copy.rows() == copy.expected()
    first = query.recentProgress[0]
    assert (first["batchId"], first["numInputRows"], first["sink"]["numOutputRows"]) == (0, 1_000, 500)
    assert first["latencyMs"]
    copy.add()
    query.processAllAvailable()
    assert copy.rows() == copy.expected()
    assert query.lastProgress["batchId"] > 0
    query.stop()
    copy.add()
    copy.start(NOW, guarantee=guarantee).awaitTermination(PATIENCE)
    assert copy.rows() == copy.expected(), "a query of micro-batches resumes from its checkpoint"


def test_a_job_reads_for_some_seconds_and_the_next_one_goes_on(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its two tasks reads one batch at least."""
    monkeypatch.setattr(runs, "MAX_READ_SECONDS", 0.0)
    monkeypatch.setattr(execution, "MIN_CATCH_UP_ROWS", 10)
    copy.add(25_000)
    query = copy.start()
    query.processAllAvailable()
    assert copy.rows() == copy.expected()
    assert [each["numInputRows"] for each in query.recentProgress] == [20_000, 5_000]


def test_the_error_of_a_task_is_that_of_the_query(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    copy.add(1_000)
    query = copy.start(transform=lambda frame: evens(frame).where("1 / (id - 998) is not null"))
    wait_until(lambda: not query.isActive, PATIENCE)
    assert "DIVIDE_BY_ZERO" in str(query.exception())
    copy.start(transform=evens).processAllAvailable()
    assert copy.rows() == copy.expected()


class Rows(SourceReader):
    """Source of numbered rows, of which some are lost."""

    def __init__(self, rows: int, lost: tuple[int, ...] = ()) -> None:
        self._rows, self._lost, self._at = rows, lost, 0

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        self.skipped_rows = self._at in self._lost
        if self._at >= self._rows or self.skipped_rows:
            self._at += self.skipped_rows
            return None
        self._at += 1
        return pa.record_batch({"id": [self._at - 1]})

    def offsets(self) -> dict[int, int]:
        return {0: self._at}

    def unread_rows(self) -> int:
        return self._rows - self._at

    def last_times(self) -> dict[int, int]:
        return {0: self._at}

    def creation_times(self) -> list[tuple[int, int]]:
        return [(7, 1)]

    def wait(self, channel: object) -> None:
        raise AssertionError("a backlog is there")


def read(reader: BacklogReader) -> list[int]:
    return [number for batch in reader.batches() for number in batch.column("id").to_pylist()]


def test_a_reader_ends_after_its_rows() -> None:
    reader = BacklogReader(Rows(10), 4, 60.0)
    assert read(reader) == [0, 1, 2, 3]
    report = reader.report()
    assert (report["offsets"], report["rows"], report["last_times"]) == ({"0": 4}, 4, {"0": 4})


def test_a_reader_ends_where_the_source_does() -> None:
    assert read(BacklogReader(Rows(3), 4, 60.0)) == [0, 1, 2]


def test_a_reader_goes_on_behind_lost_rows() -> None:
    reader = BacklogReader(Rows(5, lost=(0, 1, 3)), 4, 60.0)
    assert read(reader) == [2, 4]
    assert reader.report()["offsets"] == {"0": 5}


def test_a_reader_ends_when_its_time_is_over() -> None:
    reader = BacklogReader(Rows(10), 10, max_seconds=0.0)
    assert read(reader) == [0], "it reads something, so that each job moves on"
    assert reader.report()["offsets"] == {"0": 1}


class Kept(SinkWriter):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self.rows += [number for batch in rows for number in batch.column("id").to_pylist()]

    def end(self, epoch: int) -> Json:
        return {f"epoch {epoch}": len(self.rows)}


def test_the_parts_of_tasks_are_an_epoch() -> None:
    parts, sinks = [], []
    for rows in (3, 0):
        reader, sink = BacklogReader(Rows(rows), 4, 60.0), Kept()
        written = write_backlog(sink, 8, ([batch] for batch in reader.batches()))
        parts.append(TaskPart.from_reports(reader.report(), written))
        sinks.append(sink.rows)
    assert sinks == [[0, 1, 2], []]
    epoch = epoch_of(8, parts)
    assert (epoch.number, epoch.rows_in, epoch.rows_out) == (8, 3, 3)
    assert sum(times.rows for times in epoch.times) == 3
