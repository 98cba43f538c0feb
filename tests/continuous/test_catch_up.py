"""A query that is far behind reads its backlog as one epoch, in a Spark job that ends."""

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
from tests.continuous.test_queries import AVAILABLE_NOW, Copy, select_evens
from tests.support.waiting import wait_until

TIMEOUT = 60


@pytest.fixture
def copy(
    spark: SparkSession, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Copy]:
    """Copy for which a hundred rows are a backlog."""
    monkeypatch.setattr(execution, "BEHIND_ROWS", 100)
    copy = Copy(spark, store_url, tmp_path)
    yield copy
    for query in copy.running:
        query.stop(10)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_backlog_is_one_epoch_and_later_rows_are_in_other_epochs(copy: Copy, guarantee: str) -> None:
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
    copy.start(AVAILABLE_NOW, guarantee=guarantee).awaitTermination(TIMEOUT)
    assert copy.rows() == copy.expected(), "a query of micro-batches resumes from its checkpoint"


def test_a_job_reads_for_a_limited_time_and_the_next_one_resumes(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its two tasks reads at least one batch."""
    monkeypatch.setattr(runs, "MAX_READ_SECONDS", 0.0)
    monkeypatch.setattr(execution, "MIN_CATCH_UP_ROWS", 10)
    copy.add(25_000)
    query = copy.start()
    query.processAllAvailable()
    assert copy.rows() == copy.expected()
    assert [progress["numInputRows"] for progress in query.recentProgress] == [20_000, 5_000]


def test_the_error_of_a_task_is_the_error_of_the_query(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    copy.add(1_000)
    query = copy.start(transform=lambda frame: select_evens(frame).where("1 / (id - 998) is not null"))
    wait_until(lambda: not query.isActive, TIMEOUT)
    assert "DIVIDE_BY_ZERO" in str(query.exception())
    copy.start(transform=select_evens).processAllAvailable()
    assert copy.rows() == copy.expected()


class NumberedRows(SourceReader):
    """Source of numbered rows, some of which are lost."""

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
        raise AssertionError("the reader waited although there is a backlog")


def read_ids(reader: BacklogReader) -> list[int]:
    return [number for batch in reader.batches() for number in batch.column("id").to_pylist()]


def test_a_reader_ends_after_its_number_of_rows() -> None:
    reader = BacklogReader(NumberedRows(10), 4, 60.0)
    assert read_ids(reader) == [0, 1, 2, 3]
    report = reader.report()
    assert (report["offsets"], report["rows"], report["last_times"]) == ({"0": 4}, 4, {"0": 4})


def test_a_reader_ends_where_the_source_does() -> None:
    assert read_ids(BacklogReader(NumberedRows(3), 4, 60.0)) == [0, 1, 2]


def test_a_reader_continues_after_lost_rows() -> None:
    reader = BacklogReader(NumberedRows(5, lost=(0, 1, 3)), 4, 60.0)
    assert read_ids(reader) == [2, 4]
    assert reader.report()["offsets"] == {"0": 5}


def test_a_reader_ends_when_its_time_has_elapsed() -> None:
    reader = BacklogReader(NumberedRows(10), 10, max_seconds=0.0)
    assert read_ids(reader) == [0], "it reads at least one batch, so that each job makes progress"
    assert reader.report()["offsets"] == {"0": 1}


class RecordingWriter(SinkWriter):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self.rows += [number for batch in rows for number in batch.column("id").to_pylist()]

    def end(self, epoch: int) -> Json:
        return {f"epoch {epoch}": len(self.rows)}


def test_the_parts_of_all_tasks_make_an_epoch() -> None:
    parts, written_ids = [], []
    for rows in (3, 0):
        reader, sink = BacklogReader(NumberedRows(rows), 4, 60.0), RecordingWriter()
        written = write_backlog(sink, 8, ([batch] for batch in reader.batches()))
        parts.append(TaskPart.from_reports(reader.report(), written))
        written_ids.append(sink.rows)
    assert written_ids == [[0, 1, 2], []]
    epoch = epoch_of(8, parts)
    assert (epoch.number, epoch.rows_in, epoch.rows_out) == (8, 3, 3)
    assert sum(times.rows for times in epoch.times) == 3
