"""Pipelines with the continuous trigger on Spark."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.continuous.driver import execution
from penstock.errors import (
    ContinuousFailedError,
    ContinuousRefusedError,
    DataLostError,
    InvalidOptionError,
    SchemaMismatchError,
)
from tests.continuous.queue_copy import SimulatedCrash, crash_after
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
CONTINUOUS, AVAILABLE_NOW = penstock.Trigger.continuous("50 ms"), penstock.Trigger.available_now()
TIMEOUT = 60


class Copy:
    """Two queues, and pipelines that copy from one to the other."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark, self.url, self.folder = spark, url, folder
        self.store = penstock.connect(url)
        self.queue = self.store.create_queue("in", SCHEMA, partitions=2)
        self.out = self.store.create_queue("out", SCHEMA, partitions=2)
        self.store.create_consumer("c").register("in")
        self.running: list[penstock.Query] = []
        self.next_id = 0

    def add(self, count: int = 10) -> None:
        for partition in range(2):
            ids = range(self.next_id + partition, self.next_id + count, 2)
            self.queue.append([{"id": i, "name": f"name {i}"} for i in ids], partition=partition)
        self.next_id += count

    def pipeline(
        self, *, source: Any = None, sink: Any = None, transform: Any = None, **options: object
    ) -> penstock.Pipeline:
        stream = penstock.stream(self.spark, source or penstock.QueueSource("in", "c", self.url)).transform(
            transform or select_evens
        )
        return stream.write(sink or penstock.QueueSink("out", self.url), **options)

    def start(
        self, trigger: penstock.Trigger = CONTINUOUS, *, checkpoint: Any = "ck", **options: object
    ) -> Any:
        folder = None if checkpoint is None else self.folder / checkpoint
        query = self.pipeline(**options).start(checkpoint=folder, name="copy", trigger=trigger)
        self.running.append(query)
        return query

    def rows(self) -> list[tuple[int, str]]:
        tables = [self.out.read(part.partition, 0, part.next_index) for part in self.out.info().partitions]
        return sorted((row["id"], row["name"]) for table in tables for row in table.to_pylist())

    def expected(self) -> list[tuple[int, str]]:
        return [(i, f"NAME {i}") for i in range(0, self.next_id, 2)]


def select_evens(frame: DataFrame) -> DataFrame:
    return frame.where("id % 2 = 0").withColumn("name", F.upper("name"))


@pytest.fixture
def copy(spark: SparkSession, store_url: str, tmp_path: Path) -> Iterator[Copy]:
    copy = Copy(spark, store_url, tmp_path)
    yield copy
    for query in copy.running:
        query.stop(10)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_rows_are_transformed_and_written(copy: Copy, guarantee: str) -> None:
    copy.add()
    query = copy.start(guarantee=guarantee)
    query.processAllAvailable()
    copy.add()
    query.processAllAvailable()
    assert copy.rows() == copy.expected()
    assert (query.isActive, query.state) == (True, "ACTIVE")
    assert query.lastProgress["numInputRows"] > 0
    assert query.stop()
    assert (query.isActive, query.exception()) == (False, None)
    assert copy.store.consumer("c").lag("in").rows == 0


@one_store
def test_a_running_query_keeps_its_columns_across_runs(copy: Copy) -> None:
    copy.add()
    query = copy.start(transform=lambda frame: frame.where("id % 2 = 0").withColumn("name", F.upper("name")))
    query.processAllAvailable()
    run_id = query.lastProgress["runId"]
    copy.queue.add_columns(pa.field("note", pa.string()))
    copy.add()
    query.processAllAvailable()
    # Added partitions start another run, which is planned again.
    copy.queue.add_partitions(1)
    copy.queue.append([{"id": copy.next_id, "name": f"name {copy.next_id}", "note": "new"}], partition=2)
    copy.next_id += 2
    query.processAllAvailable()
    assert copy.rows() == copy.expected()
    assert (query.exception(), query.lastProgress["runId"]) == (None, run_id)
    query.stop()
    copy.queue.append([{"id": copy.next_id, "name": f"name {copy.next_id}", "note": "newer"}])
    copy.next_id += 2
    with pytest.raises(SchemaMismatchError, match="note"):
        copy.start()
    copy.out.add_columns(pa.field("note", pa.string()))
    restarted = copy.start()
    restarted.processAllAvailable()
    copy.out.refresh()
    assert copy.rows() == copy.expected()
    rows = [row for p in range(2) for row in copy.out.read(p, 0).to_pylist()]
    assert [row["note"] for row in rows if row["note"]] == ["newer"]


def test_either_engine_continues_the_checkpoint_of_the_other(copy: Copy) -> None:
    ids = set()
    for trigger in (AVAILABLE_NOW, CONTINUOUS, AVAILABLE_NOW, CONTINUOUS, CONTINUOUS, AVAILABLE_NOW):
        copy.add()
        query = copy.start(trigger)
        ids.add(query.id)
        if trigger is CONTINUOUS:
            query.processAllAvailable()
            query.stop()
        else:
            query.awaitTermination()
        assert copy.rows() == copy.expected()
    assert len(ids) == 1


@pytest.mark.parametrize(
    "is_first",
    [
        pytest.param(True, id="the first epoch"),
        # `test_tables` runs this case among the fast tests.
        pytest.param(False, id="a later epoch", marks=pytest.mark.soak),
    ],
)
def test_the_micro_batch_engine_recovers_an_epoch_that_only_the_sink_has(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """The driver of the continuous query dies after the commit to the sink."""
    query = copy.start()
    if not is_first:
        copy.add()
        query.processAllAvailable()
    crash_after(monkeypatch, query.execution, query.execution.sink, "commit")
    copy.add()
    assert query.execution.join(TIMEOUT)
    assert isinstance(query.execution.failure, SimulatedCrash)
    committed = query.execution.checkpoint.last_commit()
    assert query.execution.sink.newest().number == (0 if committed is None else committed + 1)
    copy.add()
    restarted = copy.start(AVAILABLE_NOW)
    restarted.awaitTermination()
    assert copy.rows() == copy.expected()
    assert restarted.id == query.id
    # The recovered epoch, and a micro-batch with the remaining rows.
    assert query.execution.checkpoint.last_commit() == (1 if committed is None else committed + 2)
    assert copy.store.consumer("c").lag("in").rows == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("trigger", [AVAILABLE_NOW, CONTINUOUS], ids=["micro-batches", "continuous"])
@pytest.mark.parametrize("kept", [0, 1, 2], ids=["nothing", "the first micro-batch", "the offsets"])
def test_a_micro_batch_missing_from_the_checkpoint_is_recovered_from_the_sink(
    copy: Copy, trigger: penstock.Trigger, kept: int
) -> None:
    """The machine lost power, and Spark does not sync its checkpoint.

    Rows that are appended afterwards must not end up in the lost micro-batch.
    """
    for _ in range(2 if kept else 1):
        copy.add()
        copy.start(AVAILABLE_NOW).awaitTermination()
    lost = 1 if kept else 0
    for entry in ("commits",) if kept == 2 else ("commits", "offsets"):
        for name in (f"{lost}", f".{lost}.crc"):
            (copy.folder / "ck" / entry / name).unlink()
    copy.add()
    restarted = copy.start(trigger)
    if trigger is AVAILABLE_NOW:
        restarted.awaitTermination()
    else:
        restarted.processAllAvailable()
    assert copy.rows() == copy.expected()
    restarted.stop()
    assert copy.store.consumer("c").lag("in").rows == 0


@one_store
def test_a_query_without_a_checkpoint_uses_a_temporary_one(copy: Copy) -> None:
    query = copy.start(checkpoint=None)
    folder = Path(query.execution.checkpoint.location)
    assert (folder / "metadata").exists()
    copy.add()
    query.processAllAvailable()
    query.stop()
    assert not folder.exists()
    assert copy.rows() == copy.expected()


@one_store
def test_a_function_sink_receives_the_rows(copy: Copy, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()

    def write_ids(batch: pa.RecordBatch) -> None:
        (files / f"{time.monotonic_ns()}").write_text(",".join(map(str, batch["id"].to_pylist())))

    query = copy.start(sink=penstock.FunctionSink(write_ids))
    copy.add()
    query.processAllAvailable()
    ids = [int(i) for path in files.iterdir() for i in path.read_text().split(",")]
    assert sorted(ids) == [0, 2, 4, 6, 8]


@one_store
def test_a_rate_source_is_written_to_the_console(
    spark: SparkSession, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first example of Spark's documentation of continuous processing."""
    pipeline = penstock.stream(spark, penstock.RateSource(20)).write(penstock.ConsoleSink(truncate=False))
    query: Any = pipeline.start(name="rate", trigger=CONTINUOUS)
    printed = ""

    def values() -> list[str]:
        nonlocal printed
        printed += capsys.readouterr().out
        return [line.split("|")[2].strip() for line in printed.splitlines() if line.startswith("|20")]

    try:
        wait_until(lambda: len(values()) >= 5, TIMEOUT, "five rows")
    finally:
        query.stop()
    assert "Batch: 0\n" in printed
    assert "|timestamp" in printed
    assert values()[:5] == ["0", "1", "2", "3", "4"]


def _count_by_name(frame: DataFrame) -> DataFrame:
    return frame.groupBy("name").count()


@one_store
def test_operations_that_do_not_work_row_by_row_are_refused_before_the_query_starts(copy: Copy) -> None:
    with pytest.raises(ContinuousRefusedError, match="does not support Aggregate"):
        copy.start(transform=_count_by_name)
    with pytest.raises(ContinuousRefusedError, match="current_timestamp"):
        copy.start(transform=lambda df: df.withColumn("name", F.current_timestamp().cast("string")))
    with pytest.raises(ContinuousRefusedError, match="NOT_PIPELINED"):
        copy.start(transform=lambda df: df.mapInArrow(lambda batches: batches, df.schema))
    with pytest.raises(SchemaMismatchError, match=r"UNKNOWN_COLUMN\].*nam"):
        copy.start(transform=lambda df: df.withColumnRenamed("name", "nam"))
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*exactly_once or at_least_once"):
        copy.start(guarantee="idempotent")
    rate = copy.spark.readStream.format("rate").load()
    with pytest.raises(ContinuousRefusedError, match="data source rate does not support"):
        penstock.stream(copy.spark, rate).write(penstock.ConsoleSink()).start(trigger=CONTINUOUS)
    assert not copy.running


@one_store
def test_the_error_that_ends_a_query_is_reported(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    query = copy.start(
        transform=lambda df: df.withColumn("id", F.assert_true(F.col("id") < 0).cast("bigint"))
    )
    copy.add()
    with pytest.raises(Exception, match="is not true"):
        query.awaitTermination(TIMEOUT)
    assert query.exception() is not None
    wait_until(lambda: not query.isActive, TIMEOUT, "the query has ended")
    assert copy.rows() == []


@one_store
def test_a_failed_expression_is_reported_without_the_frames_of_the_jvm(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 1)
    query = copy.start(transform=lambda df: df.withColumn("id", F.expr("10 div (id - 4)")))
    copy.add()
    with pytest.raises(ContinuousFailedError, match=r"\[DIVIDE_BY_ZERO\] Division by zero") as raised:
        query.awaitTermination(TIMEOUT)
    logged = [record.getMessage() for record in caplog.records if record.name == "penstock.continuous"]
    assert any("restarts after epoch -1" in text for text in logged)
    for text in [str(raised.value), *logged]:
        assert "\tat " not in text
        assert "calling o" not in text


@one_store
def test_an_error_in_a_users_sink_function_shows_where_it_was_raised(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has its cause, even if that is an error of Penstock, but no stack frames of Penstock."""
    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)

    def look_up_prices(rows: pa.RecordBatch) -> None:
        try:
            raise SchemaMismatchError("no column price")
        except SchemaMismatchError as cause:
            raise KeyError("price") from cause

    query = copy.start(sink=penstock.FunctionSink(look_up_prices))
    copy.add()
    with pytest.raises(ContinuousFailedError, match=r"failed:\nbuiltins\.KeyError: 'price'\n") as raised:
        query.awaitTermination(TIMEOUT)
    lines = str(raised.value).splitlines()
    assert any("test_queries.py" in line and "in look_up_prices" in line for line in lines)
    assert "penstock.errors.SchemaMismatchError: [SCHEMA_MISMATCH] no column price" in lines
    assert not any("src/penstock" in line for line in lines)


@one_store
def test_rows_that_no_run_can_read_end_the_query_without_restarts(
    copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = copy.store.create_queue("narrow", pa.schema([("id", pa.int32())]))
    copy.store.create_queue("wide", pa.schema([("id", pa.int64())]))
    copy.store.consumer("c").register("narrow")
    source = penstock.QueueSource("narrow", "c", copy.url)
    query = (
        penstock.stream(copy.spark, source)
        .write(penstock.QueueSink("wide", copy.url))
        .start(checkpoint=copy.folder / "ck", trigger=CONTINUOUS)
    )
    copy.running.append(query)
    narrow.widen_columns({"id": pa.int64()})
    narrow.append([{"id": 2**40}])
    with pytest.raises(SchemaMismatchError) as raised:
        query.awaitTermination(TIMEOUT)
    assert raised.value.condition == "SCHEMA_MISMATCH.COLUMN_WIDENED"
    assert "restarts" not in caplog.text


@one_store
def test_a_query_whose_first_rows_were_trimmed_does_not_start(copy: Copy) -> None:
    copy.add()
    copy.queue.trim(before=3)
    with pytest.raises(DataLostError, match=r"rows \[0, 3\)"):
        copy.start()
    source = penstock.QueueSource("in", "c", copy.url, {"failOnDataLoss": False})
    query = copy.start(source=source)
    query.processAllAvailable()
    assert copy.rows() == [(6, "NAME 6"), (8, "NAME 8")]


@one_store
def test_secrets_in_an_error_of_a_users_function_are_not_logged(
    copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "penstock")
    secret = "QZ7hush9"
    text = f"no response from postgresql://me:{secret}@db and https://b.example/o?sig={secret}"
    copy.add()
    query = copy.start(transform=lambda frame: frame.withColumn("name", F.raise_error(F.lit(text))))
    with pytest.raises(Exception, match="no response from"):
        query.processAllAvailable()
    assert "no response from postgresql://me:***@db" in caplog.text
    assert secret not in caplog.text
