"""One query in one mode over micro-batches that are there already, and what Spark says of each.

The source is a folder with one Parquet file for each micro-batch, of which Spark reads one at a time, in the order of their
times. The trigger is ``availableNow``: it ends by itself, behind the micro-batches without data that follow the last one.
"""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    StreamingQueryException,
    UnsupportedOperationException,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.modes.previewing.inputs import Input
from penstock.modes.previewing.result import DATA, NO_DATA, MicroBatch, ModePreview, StateRows
from penstock.spark.internals.output_mode_checker import Refusal

MOST_WITHOUT_DATA = 5
"""A query with processing-time timers runs such micro-batches for ever."""
_PATIENCE, _GLANCE = 1, 0.01
"""Seconds between looks at whether such a query has shown enough, and whether it has been stopped."""

_REFUSALS = (AnalysisException, UnsupportedOperationException, IllegalArgumentException)
_FIRST_FILE = 946_684_800
_PLAN = re.compile(r"(?:;\s*)?SQLSTATE: \w+.*|;\s*\n.*", re.DOTALL)
_CONDITION = re.compile(r"\[([A-Z_0-9.]+)\]")


def source(spark: SparkSession, given: Input, folder: Path) -> DataFrame:
    """A streaming DataFrame of which each micro-batch is one of the input's tables."""
    folder.mkdir()
    for number, table in enumerate(given.tables):
        path = folder / f"{number:06}.parquet"
        pq.write_table(table, path)
        os.utime(path, (_FIRST_FILE + number, _FIRST_FILE + number))
    reader = spark.readStream.schema(given.schema).option("maxFilesPerTrigger", 1)
    return reader.parquet(folder.as_uri())


def run(frame: DataFrame, mode: str, inputs: list[Input], checkpoint: Path) -> ModePreview:
    """Run a query to its end in one mode.

    Raises
    ------
    Exception
        What the transformation raised, in the words of Spark, with a note that says in which mode and micro-batch.
    """
    rows = _rows_of_batches(inputs)
    kept = _Kept(len(rows) + MOST_WITHOUT_DATA)
    writer = frame.writeStream.outputMode(mode).option("checkpointLocation", checkpoint.as_uri())
    try:
        query = writer.trigger(availableNow=True).foreachBatch(kept.keep).start()
    except _REFUSALS as error:
        return ModePreview(mode, refusal=_refusal(error))
    kept.started(query)
    try:
        while not query.awaitTermination(_PATIENCE):
            if kept.is_cut:
                query.stop()
    except StreamingQueryException as error:
        found = _found(error, kept, mode)
        if isinstance(found, Refusal):
            return ModePreview(mode, refusal=found)
        raise found from None
    finally:
        query.stop()
    told = {progress.batchId: progress for progress in query.recentProgress}
    batches = [_micro_batch(told[batch], kept.tables[batch], rows) for batch in sorted(kept.tables)]
    return ModePreview(mode, tuple(batches), is_cut=kept.is_cut)


def _rows_of_batches(inputs: list[Input]) -> list[int]:
    """How many rows go into each micro-batch, those of all inputs together."""
    longest = max(len(given.tables) for given in inputs)
    return [
        sum(given.tables[number].num_rows for given in inputs if number < len(given.tables))
        for number in range(longest)
    ]


class _Kept:
    """The rows that a query emits, by batch id."""

    def __init__(self, most: int) -> None:
        self.tables: dict[int, pa.Table] = {}
        self.error: Exception | None = None
        self.is_cut = False
        self._most = most
        self._query: StreamingQuery | None = None
        self._started = threading.Event()

    def started(self, query: StreamingQuery) -> None:
        self._query = query
        self._started.set()

    def keep(self, frame: DataFrame, batch: int) -> None:
        """Called by Spark with the rows of each micro-batch, one after the other."""
        try:
            table = frame.toArrow()
        except Exception as error:
            self.error = error
            raise
        if batch < self._most:
            self.tables[batch] = table
            return
        self.is_cut = True
        self._started.wait()
        # Until it has been stopped, at a point where no task is running that would complain.
        while self._query is not None and self._query.isActive:
            time.sleep(_GLANCE)


def _found(error: StreamingQueryException, kept: _Kept, mode: str) -> Refusal | Exception:
    """What a query failed with: the mode itself, where Spark finds that only when it plans the first micro-batch."""
    cause = getattr(error, "_cause", None)
    if kept.error is None and not kept.tables and isinstance(cause, _REFUSALS):
        return _refusal(cause)
    found = error if kept.error is None else kept.error
    found.add_note(f"in the preview of {mode} mode, in micro-batch {len(kept.tables)}")
    return found


def _refusal(error: Exception) -> Refusal:
    text = str(error)
    found = _CONDITION.match(text)
    return Refusal(found[1] if found else None, " ".join(_PLAN.sub("", text).split()))


def _micro_batch(progress: Any, emitted: pa.Table, rows: list[int]) -> MicroBatch:
    has_data = progress.batchId < len(rows)
    return MicroBatch(
        batch=progress.batchId,
        kind=DATA if has_data else NO_DATA,
        input_rows=rows[progress.batchId] if has_data else 0,
        emitted=emitted,
        watermark=_watermark(progress.eventTime.get("watermark")),
        operators=tuple(_operator(each) for each in progress.stateOperators),
    )


def _watermark(text: str | None) -> datetime | None:
    """Spark says 1970 before there is one."""
    if text is None:
        return None
    moment = datetime.fromisoformat(text)
    return moment if moment > datetime(1970, 1, 1, tzinfo=UTC) else None


def _operator(progress: Any) -> StateRows:
    return StateRows(
        progress.operatorName,
        progress.numRowsTotal,
        progress.numRowsUpdated,
        progress.numRowsRemoved,
        progress.numRowsDroppedByWatermark,
    )
