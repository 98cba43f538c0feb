"""Successive runs of a continuous query while rows are staged for a SQL table."""

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
from penstock.continuous.driver import execution as module
from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.tables import continuous
from tests.continuous.copying import PATIENCE, Copy, read_no_further_when_behind
from tests.support.sql_tables import named, query, rows, sql_name
from tests.support.waiting import wait_until

COLUMNS = StructType([StructField("id", LongType())])


def shaped(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rename columns by position, as Spark does for the tasks of a table."""
    return batch.rename_columns(["c0" if name == "id" else name for name in batch.schema.names])


class TableCopy(Copy):
    """A queue copied into a SQL table."""

    def sink(self, query_id: str) -> SinkDriver:
        sink = penstock.TableSink(named(self.url, "t"), (), self.url)
        driver = sink.driver(self.url, query_id, exactly_once=True)
        driver.check(COLUMNS)
        return driver

    def query(self, **more: object) -> ContinuousExecution:
        return super().query(transform=shaped, **more)

    def ids(self) -> list[int]:
        return sorted(number for (number,) in rows(self.url, "t"))

    def staged(self) -> int:
        """Return how many segments of uncommitted epochs are in the store."""
        table = "penstock_staged" if self.url.startswith("sqlite") else sql_name(self.url, "staged")
        return int(query(self.url, f"select count(*) from {table}")[0][0])


@pytest.fixture
def table(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TableCopy]:
    # Each write is staged, and not only the end of an epoch.
    monkeypatch.setattr(continuous, "CHUNK_ROWS", 1)
    found = TableCopy(store_url, tmp_path)
    yield found
    found.close()


@pytest.fixture
def far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are a backlog, for a query that runs, and those of one of its tasks."""
    monkeypatch.setattr(tasks, "BEHIND_ROWS", 8)
    monkeypatch.setattr(queue_connector, "_AHEAD_ROWS", 2)
    monkeypatch.setattr(module, "MIN_CATCH_UP_ROWS", 8)
    monkeypatch.setattr(module, "_MAX_RESTARTS", 0)
    read_no_further_when_behind(monkeypatch)


@pytest.mark.usefixtures("far_behind")
def test_a_query_that_catches_up_writes_each_row_once(table: TableCopy) -> None:
    running = table.add(60).query()
    table.through(running)
    wait_until(lambda: [job.catches_up for job in table.engine.jobs] == [False, True, False], PATIENCE)
    table.through(table.add() and running)
    assert table.ids() == table.all()
    assert running.state is State.ACTIVE
    assert len(table.engine.jobs) == 3


@pytest.mark.usefixtures("far_behind")
def test_rows_that_a_job_that_catches_up_has_staged_are_dropped_when_it_fails(
    table: TableCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = table.add(60).query(start=False)
    monkeypatch.setattr(module, "_MAX_RESTARTS", 5)
    monkeypatch.setattr(module, "_FIRST_BACK_OFF_SECONDS", 0.001)
    made, staged = running.engine.catch_up_job, []

    def fails_once(*arguments: Any) -> Any:
        job = made(*arguments)
        if not staged:
            monkeypatch.setattr(job, "epoch", fail)
        return job

    def fail() -> Any:
        staged.append(table.staged())
        raise RuntimeError("the job has failed")

    monkeypatch.setattr(running.engine, "catch_up_job", fails_once)
    running.start()
    table.through(running)
    assert staged[0] > 0
    assert table.staged() == 0
    assert table.ids() == table.all()


def test_a_query_that_starts_far_behind_catches_up_first_and_writes_each_row_once(
    table: TableCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEHIND_ROWS", 30)
    monkeypatch.setattr(module, "_MAX_RESTARTS", 0)
    running = table.add(60).query()
    table.through(running)
    wait_until(lambda: [job.catches_up for job in table.engine.jobs] == [True, False], PATIENCE)
    table.through(table.add() and running)
    assert table.ids() == table.all()
    assert running.state is State.ACTIVE
