"""Spark's progress of streaming queries, in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.spark.progress_log import ProgressLog
from tests.support.waiting import wait_until


@pytest.fixture
def logged_progress(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> Callable[[str], list[dict[str, Any]]]:
    """Records of ``penstock.progress`` about a query, by its name; there are some to the end of it."""
    caplog.set_level(logging.DEBUG, "penstock.progress")
    penstock.log_progress(spark)

    def found(name: str) -> list[dict[str, Any]]:
        return [vars(record) for record in list(caplog.records) if getattr(record, "query", None) == name]

    def all_of(name: str) -> list[dict[str, Any]]:
        wait_until(lambda: any(each["action"] == "terminated" for each in found(name)))
        return found(name)

    return all_of


def run(frame: DataFrame, name: str, folder: Path) -> Any:
    writer = frame.writeStream.format("noop").queryName(name).option("checkpointLocation", str(folder / name))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def rows(spark: SparkSession, folder: Path) -> DataFrame:
    (folder / "rows").mkdir()
    (folder / "rows/1.json").write_text('{"id": 1}\n{"id": 2}\n')
    return spark.readStream.schema("id long").json(str(folder / "rows"))


def test_the_start_progress_and_end_of_a_spark_query_are_logged_once(
    spark: SparkSession, logged_progress: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    penstock.log_progress(spark)
    penstock.log_progress(SparkSession.getActiveSession() or spark)
    query = run(rows(spark, tmp_path).dropDuplicates(["id"]), "counted", tmp_path)
    found = logged_progress("counted")
    assert [each["action"] for each in found] == ["started", "progress", "terminated"]
    assert [each["levelname"] for each in found] == ["INFO", "DEBUG", "INFO"]
    assert {(each["query_id"], each["run_id"]) for each in found} == {(str(query.id), str(query.runId))}
    (progress,) = found[1:-1]
    assert (progress["batch"], progress["rows"], progress["state_rows"]) == (0, 2, 2)
    assert progress["rows_late"] == 0
    assert progress["duration_ms"]["triggerExecution"] > 0
    assert found[-1]["error"] is None


def test_a_failed_query_is_logged_with_its_condition_and_without_passwords(
    spark: SparkSession, logged_progress: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    def fail(_frame: DataFrame, _number: int) -> None:
        raise ValueError("no way to postgresql://app:hunter22@host/db")

    frame = rows(spark, tmp_path)
    writer = frame.writeStream.foreachBatch(fail).queryName("failing")
    query = writer.option("checkpointLocation", str(tmp_path / "failing")).start()
    with pytest.raises(Exception, match="no way"):
        query.awaitTermination()
    last = logged_progress("failing")[-1]
    assert last["levelname"] == "ERROR"
    assert last["error"] == "FOREACH_BATCH_USER_FUNCTION_ERROR"
    assert "hunter22" not in repr(last)


def test_the_epochs_of_a_continuous_query_are_logged(
    spark: SparkSession, logged_progress: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with penstock.connect(url) as store:
        schema = pa.schema([("id", pa.int64())])
        store.create_queue("source", schema).append([{"id": 1}, {"id": 2}])
        store.create_queue("sink", schema)
        store.create_consumer("copy").register("source")
        pipeline = penstock.stream(spark, penstock.QueueSource("source", consumer="copy", url=url)).write(
            penstock.QueueSink("sink", url=url)
        )
        query = pipeline.start(
            name="row by row",
            checkpoint=tmp_path / "checkpoint",
            trigger=penstock.Trigger.continuous("100 ms"),
        )
        query.processAllAvailable()
        query.stop()
    found = logged_progress("row by row")
    assert (found[0]["action"], found[-1]["action"]) == ("started", "terminated")
    epochs = [each for each in found if each["action"] == "progress"]
    assert sum(each["rows"] for each in epochs) == 2
    assert sum(each["rows_out"] or 0 for each in epochs) == 2


def test_the_listener_never_raises_and_logs_what_it_can(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock.progress")
    listener: Any = ProgressLog()
    for call in (
        listener.onQueryStarted,
        listener.onQueryProgress,
        listener.onQueryIdle,
        listener.onQueryTerminated,
    ):
        call(SimpleNamespace())
    assert not caplog.records
    listener.onQueryIdle(SimpleNamespace(id="a", runId="b"))
    assert caplog.records[0].action == "idle"  # type: ignore[attr-defined] # by extra


def test_progress_below_the_log_level_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.progress")
    read: list[str] = []

    class Event:
        @property
        def progress(self) -> None:
            read.append("progress")

    listener: Any = ProgressLog()
    listener.onQueryProgress(Event())
    assert not read
