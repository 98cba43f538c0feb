"""A streaming query for a moment: nothing is left of it, however it ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from pyspark import inheritable_thread_target
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.arguments import in_quotes
from penstock.errors import InvalidInput, OutputModeRefused
from penstock.modes.checking import check
from penstock.modes.report import WARNING
from penstock.pipeline.failures import plain
from penstock.pipeline.settings import no_data_batches
from penstock.spark.internals.sessions import JvmError, is_local, remove_folder

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
def running(frame: DataFrame, each: Each, *, folder: str | None, **trigger: Any) -> Iterator[StreamingQuery]:
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
def plain_interrupts() -> Iterator[None]:
    """An interrupt in the middle of a call to the JVM, of which the way there makes an error of its own, is an interrupt again."""
    try:
        yield
    except JvmError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


def failure(query: StreamingQuery) -> Exception | None:
    """What ended a query; None when it was stopped, came to its end or goes on."""
    error: StreamingQueryException | None = query.exception()
    return None if error is None else plain(error)


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
