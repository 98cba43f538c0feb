"""Rows as they come, until there are enough."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pyarrow as pa
from pyspark import inheritable_thread_target
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.arguments import in_quotes
from penstock.arrow.arrays import first_rows
from penstock.errors import InvalidInput, OutputModeRefused
from penstock.modes.checking.check import check
from penstock.modes.checking.report import WARNING
from penstock.pipeline.failures import original_error
from penstock.pipeline.initial_batch import no_data_batches
from penstock.spark.internals.sessions import JvmError, is_local, remove_folder


class RowCollector:
    """No more rows than were asked for; those of a query come in a thread of its own.

    Parameters
    ----------
    asked
        How many rows are enough.
    """

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.tables: list[pa.Table] = []
        self._once: list[pa.Table] = []
        self._enough = threading.Event()

    @property
    def rows(self) -> int:
        return _rows(self.tables)

    @property
    def lacking(self) -> int:
        return self.asked - self.rows

    @property
    def is_enough(self) -> bool:
        return self._enough.is_set()

    def add(self, table: pa.Table) -> None:
        """Take what is lacking."""
        self.tables.extend(first_rows([table], self.lacking))
        if self.lacking == 0:
            self._enough.set()

    def forget_behind(self, tables: int) -> None:
        """Keep the first tables only: the rows of the others come again, if there is time for that."""
        self._once = self.given
        self.tables = self.tables[:tables]

    @property
    def given(self) -> list[pa.Table]:
        """What is there when the time is over: also what has come once, where less of it came again."""
        return self.tables if self.rows >= _rows(self._once) else self._once

    def wait(self, seconds: float) -> bool:
        """Until there are enough, or so many seconds; whether there are."""
        return self._enough.wait(seconds)


def _rows(tables: list[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)


# ---- clock: How long something may go on.

_QUICKEST, _SLOWEST = 0.02, 0.5
_LONGEST = 1e9
"""Seconds, 30 years: larger numbers are too large for those who wait."""


class Deadline:
    """Counts from when it is made.

    Parameters
    ----------
    seconds
        How long; without end when None.
    """

    def __init__(self, seconds: float | None) -> None:
        self._began = time.monotonic()
        self._seconds = None if seconds is None else min(seconds, _LONGEST)
        self._pause = _QUICKEST

    @property
    def left(self) -> float | None:
        """Seconds until the time is over; None when it never is."""
        return None if self._seconds is None else max(0.0, self._seconds - self.passed)

    @property
    def passed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.left == 0.0

    def at_most(self, seconds: float) -> float:
        """So many seconds, or those that are left."""
        return seconds if self.left is None else min(seconds, self.left)

    def rest(self) -> None:
        """Wait before one looks again: a moment at first, longer each time."""
        time.sleep(self.at_most(self._pause))
        self._pause = min(self._pause * 1.5, _SLOWEST)

    def wake(self) -> None:
        """Something has come: the next rest is short."""
        self._pause = _QUICKEST


# ---- query: A streaming query for a moment: nothing is left of it, however it ends.

Each = Callable[[DataFrame, int], None]
_MODE = "append"


def require_append(frame: DataFrame) -> None:
    """Refuse what Spark does not start in append mode.

    Raises
    ------
    OutputModeRefused
        With the report.
    """
    report = check(frame)
    found = report[_MODE]
    if found.allowed:
        return
    first = next(problem for problem in found.problems if problem.severity != WARNING)
    fix = f" Fix: {first.fix}." if first.fix else ""
    raise OutputModeRefused(
        "rows are taken from a streaming query in output mode append, which is not allowed for this one: "
        f"{first.message}.{fix}\n" + "\n".join(found.lines()),
        mode=_MODE,
        problems=[problem.code for problem in found.problems],
    )


@contextmanager
def run_query(
    frame: DataFrame, each: Each, *, folder: str | None, **trigger: Any
) -> Iterator[StreamingQuery]:
    """A query in append mode with a checkpoint of its own; both are gone behind the block.

    Parameters
    ----------
    each
        Called with each micro-batch and its number.
    folder
        Where the checkpoint is made; this machine's place for temporary files when None.
    trigger
        The argument of Spark's ``trigger``.

    Raises
    ------
    Exception
        What the query failed with.
    """
    spark = frame.sparkSession
    name = f"penstock_take_{uuid4().hex[:12]}"
    started: list[StreamingQuery] = []
    with _checkpoint(spark, folder, name) as place:
        writer = frame.writeStream.queryName(name).outputMode(_MODE).option("checkpointLocation", place)
        start = writer.trigger(**trigger).foreachBatch(each).start
        # An interrupt does not reach Spark while it starts a query, and leaves this thread's connection to the JVM unusable for a
        # while: another thread starts the query, and stops it when it has started.
        with ThreadPoolExecutor(1, "penstock-take") as beside:
            # An interrupt while the executor's thread comes up would give it a second one, which stops nothing.
            beside.submit(int).result()
            try:
                with no_data_batches(spark):
                    beside.submit(inheritable_thread_target(spark)(lambda: started.append(start()))).result()
                yield started[0]
            finally:
                beside.submit(_stop, started).result()


def _stop(queries: list[StreamingQuery]) -> None:
    for query in queries:
        query.stop()


@contextmanager
def restore_interrupts() -> Iterator[None]:
    """An interrupt in the middle of a call to the JVM, of which the way there makes an error of its own, is an interrupt again."""
    try:
        yield
    except JvmError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


def query_error(query: StreamingQuery) -> Exception | None:
    """What ended a query; None when it was stopped, came to its end or goes on."""
    error: StreamingQueryException | None = query.exception()
    return None if error is None else original_error(error)


@contextmanager
def _checkpoint(spark: SparkSession, folder: str | None, name: str) -> Iterator[str]:
    if folder is not None and urlsplit(folder).scheme:
        place = f"{folder.rstrip('/')}/{name}"
        try:
            yield place
        finally:
            with ThreadPoolExecutor(1, "penstock-take") as beside:
                beside.submit(remove_folder, spark, place).result()
        return
    local = tempfile.mkdtemp(prefix=f"{name}-", dir=None if folder is None else os.path.abspath(folder))
    try:
        yield f"file://{local}"
    finally:
        shutil.rmtree(local, ignore_errors=True)


def check_folder(frame: DataFrame, folder: str | None) -> None:
    """Refuse a checkpoint on this machine's disk for a query whose executors, which are elsewhere, would keep state in it.

    Raises
    ------
    InvalidInput
    """
    master = str(frame.sparkSession.sparkContext.master)
    if folder is None and not is_local(master):
        raise InvalidInput(
            f"the query keeps state, and the session runs on {in_quotes(master)}, whose executors may not see this machine's "
            "temporary files: give folder=, a directory or URL that all of the machines have",
            master=master,
        )
