"""Execution of a preview: one query in one mode over prepared micro-batches.

The source is a folder with one Parquet file for each micro-batch, which Spark reads one at a time, in the
order of their modification times. The trigger is ``availableNow``, so the query ends after the micro-batches
without data that follow the last one.
"""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    StreamingQueryException,
    UnsupportedOperationException,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StateOperatorProgress, StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from penstock.modes.previewing.inputs import Input
from penstock.modes.previewing.micro_batches import (
    DATA,
    MAX_WITHOUT_DATA,
    NO_DATA,
    MicroBatch,
    ModePreview,
    StateRows,
)
from penstock.spark.internals.query_start import Refusal
from penstock.spark.internals.sessions import cause_of

_CUT_POLL_SECONDS, _STOP_POLL_SECONDS = 1, 0.01
"""Seconds between checks for whether an endless query has shown enough, and whether it has stopped."""

_REFUSALS = (AnalysisException, UnsupportedOperationException, IllegalArgumentException)
_FIRST_FILE_TIME = 946_684_800
_PLAN_TEXT = re.compile(r"(?:;\s*)?SQLSTATE: \w+.*|;\s*\n.*", re.DOTALL)
_CONDITION = re.compile(r"\[([A-Z_0-9.]+)\]")


def read_input(spark: SparkSession, preview_input: Input, folder: Path) -> DataFrame:
    """Return a streaming DataFrame with one micro-batch for each of the input's tables."""
    folder.mkdir()
    for number, table in enumerate(preview_input.tables):
        path = folder / f"{number:06}.parquet"
        pq.write_table(table, path)
        os.utime(path, (_FIRST_FILE_TIME + number, _FIRST_FILE_TIME + number))
    reader = spark.readStream.schema(preview_input.schema).option("maxFilesPerTrigger", 1)
    frame = reader.parquet(folder.as_uri())
    return frame if preview_input.watermark is None else frame.withWatermark(*preview_input.watermark)


def run(frame: DataFrame, mode: str, inputs: list[Input], checkpoint: Path) -> ModePreview:
    # The total number of input rows of each micro-batch.
    rows_of_inputs = ((table.num_rows for table in preview_input.tables) for preview_input in inputs)
    input_rows = [sum(batch) for batch in zip_longest(*rows_of_inputs, fillvalue=0)]
    emitted = _EmittedRows(len(input_rows) + MAX_WITHOUT_DATA)
    writer = frame.writeStream.outputMode(mode).option("checkpointLocation", checkpoint.as_uri())
    try:
        query = writer.trigger(availableNow=True).foreachBatch(emitted.collect).start()
    except _REFUSALS as error:
        return ModePreview(mode, refusal=refusal(error))
    emitted.started(query)
    try:
        while not query.awaitTermination(_CUT_POLL_SECONDS):
            if emitted.is_cut:
                query.stop()
    except StreamingQueryException as error:
        cause = _failure(error, emitted, mode)
        if isinstance(cause, Refusal):
            return ModePreview(mode, refusal=cause)
        raise cause from None
    finally:
        query.stop()
    progress = {report.batchId: report for report in query.recentProgress}
    batches = [
        _micro_batch(progress[batch], table, input_rows) for batch, table in sorted(emitted.tables.items())
    ]
    return ModePreview(mode, tuple(batches), is_cut=emitted.is_cut)


class _EmittedRows:
    """The rows that a query emits, by batch id."""

    def __init__(self, max_batches: int) -> None:
        self.tables: dict[int, pa.Table] = {}
        self.error: Exception | None = None
        self.is_cut = False
        self._max_batches = max_batches
        self._query: StreamingQuery | None = None
        self._started = threading.Event()

    def started(self, query: StreamingQuery) -> None:
        self._query = query
        self._started.set()

    def collect(self, frame: DataFrame, batch: int) -> None:
        """Collect a micro-batch; the function of ``foreachBatch``."""
        try:
            table = frame.toArrow()
        except Exception as error:
            self.error = error
            raise
        if batch < self._max_batches:
            self.tables[batch] = table
            return
        self.is_cut = True
        self._started.wait()
        # Wait for the stop here, where no running task would fail.
        while self._query is not None and self._query.isActive:
            time.sleep(_STOP_POLL_SECONDS)


def _failure(error: StreamingQueryException, emitted: _EmittedRows, mode: str) -> Refusal | Exception:
    """Return the cause of a query's failure; Spark may refuse a mode only when it plans a micro-batch."""
    cause = emitted.error or cause_of(error)
    if isinstance(cause, AnalysisException) or (not emitted.tables and isinstance(cause, _REFUSALS)):
        return refusal(cause)
    raised = error if emitted.error is None else emitted.error
    raised.add_note(f"in the preview of {mode} mode, in micro-batch {len(emitted.tables)}")
    return raised


def refusal(error: Exception) -> Refusal:
    text = str(error)
    condition = _CONDITION.match(text)
    return Refusal(condition[1] if condition else None, " ".join(_PLAN_TEXT.sub("", text).split()))


def _micro_batch(progress: StreamingQueryProgress, emitted: pa.Table, rows: list[int]) -> MicroBatch:
    has_data = progress.batchId < len(rows)
    return MicroBatch(
        batch=progress.batchId,
        kind=DATA if has_data else NO_DATA,
        input_rows=rows[progress.batchId] if has_data else 0,
        emitted=emitted,
        watermark=_watermark(progress.eventTime.get("watermark")),
        operators=tuple(_state_rows(operator) for operator in progress.stateOperators),
    )


def _watermark(text: str | None) -> datetime | None:
    """Parse the watermark, which Spark reports as 1970 before there is one."""
    if text is None:
        return None
    moment = datetime.fromisoformat(text)
    return moment if moment > datetime(1970, 1, 1, tzinfo=UTC) else None


def _state_rows(progress: StateOperatorProgress) -> StateRows:
    return StateRows(
        progress.operatorName,
        progress.numRowsTotal,
        progress.numRowsUpdated,
        progress.numRowsRemoved,
        progress.numRowsDroppedByWatermark,
    )
