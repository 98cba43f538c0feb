"""Shared parts of ``take`` and ``take_sample``: a collector of rows, a deadline, and a temporary streaming
query.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from uuid import uuid4

import pyarrow as pa
from pyspark import inheritable_thread_target
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.streaming.query import StreamingQuery

from penstock.arguments import in_quotes
from penstock.arrow.arrays import first_rows
from penstock.errors import InvalidInputError
from penstock.modes.checking.check import check
from penstock.modes.checking.report import first_problem, refusal
from penstock.pipeline.initial_batch import no_data_batches
from penstock.spark.error_boundary import original_error
from penstock.spark.internals.sessions import JvmError, is_local, remove_folder


class RowCollector:
    """Collector of the first ``wanted`` rows. A query adds rows from a separate thread."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.tables: list[pa.Table] = []
        self.enough = threading.Event()
        """Set when all rows are collected."""
        self._discarded: list[pa.Table] = []

    @property
    def rows(self) -> int:
        return _rows(self.tables)

    @property
    def missing(self) -> int:
        return self.wanted - self.rows

    @property
    def is_enough(self) -> bool:
        return self.enough.is_set()

    def add(self, table: pa.Table) -> None:
        """Add as many rows as are missing."""
        self.tables.extend(first_rows([table], self.missing))
        if self.missing == 0:
            self.enough.set()

    def keep_first(self, tables: int) -> None:
        """Discard all tables after the first ``tables``, whose rows will be read again if there is time."""
        self._discarded = self.collected
        self.tables = self.tables[:tables]

    @property
    def collected(self) -> list[pa.Table]:
        """Return the collected rows, including the discarded ones if fewer rows were read again."""
        return self.tables if self.rows >= _rows(self._discarded) else self._discarded


def _rows(tables: list[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)


_MIN_PAUSE, _MAX_PAUSE = 0.02, 0.5
_MAX_SECONDS = 1e9
"""About 30 years, since locks and events do not accept much larger numbers."""


class Deadline:
    """A time limit that starts now; None means no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._began = time.monotonic()
        self._seconds = None if seconds is None else min(seconds, _MAX_SECONDS)
        self._pause = _MIN_PAUSE

    @property
    def left(self) -> float | None:
        """Seconds until the deadline; None without a limit."""
        return None if self._seconds is None else max(0.0, self._seconds - self.passed)

    @property
    def passed(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.left == 0.0

    def at_most(self, seconds: float) -> float:
        """Return ``seconds``, or the remaining time if that is shorter."""
        return seconds if self.left is None else min(seconds, self.left)

    def pause(self) -> None:
        """Wait before the next attempt. The first pause is short, and each one is longer than the previous
        one.
        """
        time.sleep(self.at_most(self._pause))
        self._pause = min(self._pause * 1.5, _MAX_PAUSE)

    def reset_pause(self) -> None:
        self._pause = _MIN_PAUSE


def with_numbered_columns(batch: DataFrame) -> DataFrame:
    """Rename columns to their numbers, since two columns may have the same name."""
    return batch.toDF(*(f"c{number}" for number in range(len(batch.columns))))


def with_any_column(frame: DataFrame) -> DataFrame:
    """Return a DataFrame with at least one column. Arrow tables without columns lose the number of their
    rows.
    """
    return frame if frame.columns else frame.select(lit(True).alias("row"))


OnBatch = Callable[[DataFrame, int], None]
"""Spark calls it from a separate thread, with each micro-batch and its number."""
_MODE = "append"
_POLL_SECONDS = 0.05


def require_append(frame: DataFrame) -> None:
    """Refuse a query that Spark would not start in append mode."""
    report = check(frame)[_MODE]
    if report.allowed:
        return
    first = first_problem(report)
    fix = f" Fix: {first.fix}." if first.fix else ""
    raise refusal(
        report,
        "take and take_sample run a streaming query in output mode append, which Spark does not allow for "
        f"this DataFrame: {first.message}.{fix}",
    )


def run_query(
    frame: DataFrame,
    on_batch: OnBatch,
    deadline: Deadline,
    *,
    folder: str | None,
    available_now: bool,
    enough: threading.Event | None = None,
) -> None:
    """Run a query in append mode until it ends, the deadline passes or ``enough`` is set. Then stop it, and
    remove its temporary checkpoint. Raise the query's error, unless ``enough`` is set.
    """
    spark, name = frame.sparkSession, f"penstock_take_{uuid4().hex[:12]}"
    enough = enough or threading.Event()
    started: list[StreamingQuery] = []
    errors: list[Exception] = []
    stopping = threading.Event()

    def on_batch_keeping_errors(batch: DataFrame, number: int) -> None:
        try:
            on_batch(batch, number)
        except Exception as error:
            # Stopping a query interrupts its current micro-batch.
            if not stopping.is_set():
                errors.append(original_error(error))
            raise

    with _checkpoint(spark, folder, name) as place:
        writer = frame.writeStream.queryName(name).outputMode(_MODE).option("checkpointLocation", place)
        writer = (
            writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
        )
        start = writer.foreachBatch(on_batch_keeping_errors).start
        # An interrupt does not reach Spark while Spark starts a query, and it makes this thread's connection
        # to the JVM unusable for a while. So another thread starts the query, and stops it once it has
        # started.
        with ThreadPoolExecutor(1, "penstock-take") as worker:
            # Start the thread before the query: after an interrupt during its start, the executor would use a
            # second thread, which stops no query.
            worker.submit(int).result()
            try:
                with no_data_batches(spark):
                    worker.submit(inheritable_thread_target(spark)(lambda: started.append(start()))).result()
                query = started[0]
                while query.isActive and not deadline.is_over:
                    if enough.wait(deadline.at_most(_POLL_SECONDS)):
                        break
                failure: StreamingQueryException | None = query.exception()
            finally:
                stopping.set()
                worker.submit(_stop, started).result()
    if failure is not None:
        errors.append(original_error(failure))
    if errors and not enough.is_set():
        raise errors[0]


def _stop(queries: list[StreamingQuery]) -> None:
    for query in queries:
        query.stop()


@contextmanager
def restore_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt if the connection to the JVM has turned it into another error."""
    try:
        yield
    except JvmError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _checkpoint(spark: SparkSession, folder: str | None, name: str) -> Iterator[str]:
    if folder is not None and urlsplit(folder).scheme:
        place = f"{folder.rstrip('/')}/{name}"
        try:
            yield place
        finally:
            with ThreadPoolExecutor(1, "penstock-take") as worker:
                worker.submit(remove_folder, spark, place).result()
        return
    parent = None if folder is None else os.path.abspath(folder)
    with TemporaryDirectory(prefix=f"{name}-", dir=parent, ignore_cleanup_errors=True) as local:
        yield f"file://{local}"


def check_folder(frame: DataFrame, folder: str | None) -> None:
    """Refuse a checkpoint on this machine's disk for a query that keeps state on other machines."""
    master = str(frame.sparkSession.sparkContext.master)
    if folder is None and not is_local(master):
        raise InvalidInputError(
            f"the query keeps state, and the executors of {in_quotes(master)} may not reach this machine's "
            "temporary files: pass folder=, a directory or URL that all machines reach",
            condition="INVALID_INPUT.SHARED_FOLDER_NEEDED",
            master=master,
        )
