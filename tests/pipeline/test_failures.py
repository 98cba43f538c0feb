"""What Spark reports of a failure becomes the error that caused it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.errors.exceptions.captured import convert_exception
from pyspark.sql import SparkSession

import penstock
from penstock.errors import (
    ChangelogContractViolationError,
    ContinuousFailedError,
    PenstockError,
    QueryFailedError,
    QueueNotFoundError,
    SchemaMismatchError,
    StoreError,
)
from penstock.spark.error_boundary import (
    job_failure,
    original_error,
    without_traceback,
    without_tracebacks,
)
from tests.support.spark_queues import stream


def test_the_original_error_under_sparks_own_is_found(spark: SparkSession) -> None:
    """Where the abort of a write fails too, Spark's message has no reason."""
    java = spark._jvm.java.lang
    reason = "Traceback:\npenstock.errors.QueueNotFoundError: [QUEUE_NOT_FOUND] there is no queue 'out'"
    report = convert_exception(java.RuntimeException("Writing job failed.", java.RuntimeException(reason)))
    found = original_error(report)
    assert isinstance(found, QueueNotFoundError)
    assert "there is no queue 'out'" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        StoreError("it is closed", condition="STORE_CLOSED"),
        ChangelogContractViolationError(
            "too early", condition="CHANGELOG_CONTRACT_VIOLATION.COMMIT_BEFORE_1970"
        ),
    ],
)
def test_an_error_keeps_the_class_and_condition_that_it_was_raised_with(error: PenstockError) -> None:
    kind = type(error)
    found = original_error(
        RuntimeError(f"Traceback:\n{kind.__module__}.{kind.__name__}: {error}\n  at org.apache")
    )
    assert type(found) is kind
    assert (found.condition, found.message) == (error.condition, error.message)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Job 3 cancelled because SparkContext was shut down"),
        RuntimeError('the return value of "org.apache.spark.SparkContext.dagScheduler()" is null'),
        Py4JNetworkError("Answer from Java side is empty"),
        ConnectionRefusedError(111, "Connection refused"),
    ],
)
def test_a_shutdown_of_spark_is_reported_with_a_remedy(error: Exception) -> None:
    found = original_error(error)
    assert isinstance(found, QueryFailedError)
    assert found.condition == "QUERY_FAILED.SPARK_SHUT_DOWN"
    assert "only to the driver's process" in str(found)


def test_any_other_error_is_left_unchanged() -> None:
    error = ValueError("division by zero")
    assert original_error(error) is error


TRACEBACK = """Traceback (most recent call last):
  File "job.py", line 3, in f
    raise ValueError("row 57 is bad")
ValueError: row 57 is bad"""
WORKER = f"""org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown from \
the Python worker: {TRACEBACK}
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.read(PythonRunner.scala:1097)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:"""
BARRIER = """Could not recover from a failed barrier ResultStage. Most recent failure reason: Stage failed \
because barrier task ResultTask(5, 1) finished unsuccessfully.
"""
TASK = """Task 0 in stage 2.0 failed 1 times, most recent failure: Lost task 0.0 in stage 2.0 (TID 3) \
(executor driver): """
DIVISION = """[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012
== SQL (line 1, position 1) ==
1 div id"""


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (WORKER, f"ValueError: row 57 is bad\n{TRACEBACK}"),
        (f"org.apache.spark.SparkArithmeticException: {DIVISION}\n\tat a.B$.c(D.scala:1)", DIVISION),
    ],
)
@pytest.mark.parametrize("before", [BARRIER, TASK])
def test_a_failed_job_is_reported_by_what_the_users_code_raised(
    spark: SparkSession, before: str, report: str, cause: str
) -> None:
    failed = spark._jvm.java.lang.RuntimeException(f"Job aborted due to stage failure: {before}{report}")
    error = job_failure(convert_exception(failed))
    assert isinstance(error, ContinuousFailedError)
    assert error.message == f"a task of the query failed: {cause}"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("division by zero"),
        ContinuousFailedError("the reader of task 1 has disconnected"),
        PySparkException("Job 3 cancelled because SparkContext was shut down"),
    ],
)
def test_a_failure_of_the_query_itself_is_not_taken_for_one_of_its_job(error: Exception) -> None:
    assert job_failure(error) is error


def test_the_error_of_a_writer_is_found_in_its_report() -> None:
    found = job_failure(
        ContinuousFailedError(
            "the writer of task 0 failed:\npenstock.errors.SchemaMismatchError: [SCHEMA_MISMATCH] no nulls"
        )
    )
    assert isinstance(found, SchemaMismatchError)


def test_an_error_raised_by_the_jvm_is_not_taken_for_its_shutdown(spark: SparkSession) -> None:
    with pytest.raises(Py4JJavaError) as raised:
        spark._jvm.java.util.ArrayList().get(0)
    assert original_error(raised.value) is raised.value


def test_a_micro_batch_on_the_driver_fails_with_the_error_of_its_task(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    """Without the tracebacks of the driver and of the task, whose last line would be the error."""
    store.create_queue("events", pa.schema([("id", pa.int64())])).append([{"id": None}])
    events = stream(spark, store_url, "events")
    sink = penstock.TableSink("copy", keys=["id"], url=store_url)
    write = sink.writer(events, "exactly_once", "append", str(tmp_path / "c"))
    writer = events.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "c"))
    with pytest.raises(StreamingQueryException) as failed:
        writer.trigger(availableNow=True).start().awaitTermination()
    report = str(failed.value)
    assert "penstock.errors.TableRefusedError: [TABLE_REFUSED.NULL_KEY]" in report
    assert "PythonException" not in report
    assert report.count("Traceback") == 1
    assert report.count("error_boundary.py") == 1


def test_an_error_of_spark_alone_passes_the_boundary_unchanged() -> None:
    error = PySparkException("division by zero")

    @without_traceback
    def fail() -> None:
        raise error

    with pytest.raises(PySparkException) as raised:
        fail()
    assert raised.value is error


def test_a_callback_adds_one_line_of_penstock_to_a_traceback() -> None:
    @without_tracebacks
    class Reader:
        def read(self) -> None:
            raise StoreError("it is closed", condition="STORE_CLOSED")

    with pytest.raises(StoreError) as raised:
        Reader().read()
    assert len(raised.traceback) == 2  # this test, and the boundary
