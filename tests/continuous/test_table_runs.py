"""Successive runs of a continuous query that stages rows for a SQL table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

import penstock
from penstock.continuous import tasks
from penstock.continuous.connectors import queue as queue_connector
from penstock.continuous.connectors.protocol import SinkDriver
from penstock.continuous.driver import execution
from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.tables import continuous
from tests.continuous.queue_copy import TIMEOUT, Copy, stop_reading_once_behind
from tests.support.sql_tables import named, query, rows, sql_name
from tests.support.waiting import wait_until

COLUMNS = StructType([StructField("id", LongType())])


def rename_by_position(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rename columns by position, as Spark does for the tasks of a table sink."""
    return batch.rename_columns(["c0" if name == "id" else name for name in batch.schema.names])


class TableCopy(Copy):
    """Copy of a queue into a SQL table."""

    def create_sink(self, query_id: str) -> SinkDriver:
        sink = penstock.TableSink(named(self.url, "t"), (), self.url)
        driver = sink.driver(self.url, query_id, exactly_once=True)
        driver.check(COLUMNS)
        return driver

    def create_query(self, **options: object) -> ContinuousExecution:
        return super().create_query(transform=rename_by_position, **options)

    def ids(self) -> list[int]:
        return sorted(number for (number,) in rows(self.url, "t"))

    def count_staged(self) -> int:
        """Return the number of segments that are staged and not committed."""
        table = "penstock_staged" if self.url.startswith("sqlite") else sql_name(self.url, "staged")
        return int(query(self.url, f"select count(*) from {table}")[0][0])


@pytest.fixture
def table(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TableCopy]:
    # Every write is staged immediately, not only the last one of an epoch.
    monkeypatch.setattr(continuous, "CHUNK_ROWS", 1)
    copy = TableCopy(store_url, tmp_path)
    yield copy
    copy.close()


@pytest.fixture
def far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few rows count as a backlog, for a running query and for each of its tasks."""
    monkeypatch.setattr(tasks, "BEHIND_ROWS", 8)
    monkeypatch.setattr(queue_connector, "_AHEAD_ROWS", 2)
    monkeypatch.setattr(execution, "MIN_CATCH_UP_ROWS", 8)
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    stop_reading_once_behind(monkeypatch)


@pytest.mark.usefixtures("far_behind")
def test_a_query_that_catches_up_writes_each_row_once(table: TableCopy) -> None:
    running = table.add(60).create_query()
    table.wait_until_committed(running)
    wait_until(lambda: [job.catches_up for job in table.engine.jobs] == [False, True, False], TIMEOUT)
    table.wait_until_committed(table.add() and running)
    assert table.ids() == table.expected_ids()
    assert running.state is State.ACTIVE
    assert len(table.engine.jobs) == 3


@pytest.mark.usefixtures("far_behind")
def test_rows_staged_by_a_failed_catch_up_job_are_dropped(
    table: TableCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = table.add(60).create_query(start=False)
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 5)
    monkeypatch.setattr(execution, "_FIRST_BACK_OFF_SECONDS", 0.001)
    create_job, staged_counts = running.engine.catch_up_job, []

    def create_failing_job(*args: Any) -> Any:
        job = create_job(*args)
        if not staged_counts:
            monkeypatch.setattr(job, "epoch", fail)
        return job

    def fail() -> Any:
        staged_counts.append(table.count_staged())
        raise RuntimeError("the job failed")

    monkeypatch.setattr(running.engine, "catch_up_job", create_failing_job)
    running.start()
    table.wait_until_committed(running)
    assert staged_counts[0] > 0
    assert table.count_staged() == 0
    assert table.ids() == table.expected_ids()


def test_a_query_that_starts_far_behind_catches_up_first_and_writes_each_row_once(
    table: TableCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "BEHIND_ROWS", 30)
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    running = table.add(60).create_query()
    table.wait_until_committed(running)
    wait_until(lambda: [job.catches_up for job in table.engine.jobs] == [True, False], TIMEOUT)
    table.wait_until_committed(table.add() and running)
    assert table.ids() == table.expected_ids()
    assert running.state is State.ACTIVE
