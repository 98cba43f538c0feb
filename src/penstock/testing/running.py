"""A query under test, and what it emits in each micro-batch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from penstock.testing.crashes import AFTER_SINK, BEFORE_SINK, pass_by

Sink = Callable[[DataFrame, int], object]


def run(
    frame: DataFrame,
    *,
    output_mode: str = "append",
    checkpoint: str | Path | None = None,
    sink: Sink | None = None,
) -> StreamTest:
    """Start a query over streams of a test, and keep what it emits.

    Parameters
    ----------
    frame
        What the function under test makes of `MemoryStream.to_df` of one or several streams.
    output_mode
        ``append``, ``update`` or ``complete``.
    checkpoint
        A directory that the test keeps, to start the query again over it; else a temporary one.
    sink
        A function of a micro-batch's rows and its number, as for ``foreachBatch``, which is tested along with the query.

    Raises
    ------
    AnalysisException
        Spark's own, when the query cannot be started in this mode.
    """
    return StreamTest(frame, output_mode, checkpoint, sink)


class StreamTest:
    """A running query; a ``with`` block stops it. Made by `run` and `MemoryStream.start`."""

    __test__ = False

    def __init__(
        self, frame: DataFrame, output_mode: str, checkpoint: str | Path | None, sink: Sink | None
    ) -> None:
        self._own = None if checkpoint is not None else Path(tempfile.mkdtemp(prefix="penstock-test-"))
        self._sink = sink
        self._tables: dict[int, pa.Table] = {}
        self._error: BaseException | None = None
        writer = frame.writeStream.outputMode(output_mode).foreachBatch(self._write)
        try:
            self.query: StreamingQuery = writer.option(
                "checkpointLocation", str(self._own or checkpoint)
            ).start()
        except BaseException:
            self._tidy()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def process_all_available(self) -> Self:
        """Wait until all rows that were added are through, with the micro-batches without data that follow.

        Raises
        ------
        Exception
            What the sink raised, or `Crash`; Spark's ``StreamingQueryException`` for what failed elsewhere.
        """
        try:
            self.query.processAllAvailable()
            found = self.query.exception()
        except StreamingQueryException as error:
            found = error
        if found is not None:
            raise (self._error or found) from None
        return self

    def emitted(self) -> list[list[dict[str, Any]]]:
        """The rows of each micro-batch that emitted some or had data, one list of them after the other; a row is a dict.

        A micro-batch that was repeated is there once, as in a sink that replaces what it had of it.
        """
        with_data = {told.batchId for told in self.query.recentProgress if told.numInputRows}
        return [
            table.to_pylist()
            for number, table in sorted(self._tables.items())
            if table.num_rows or number in with_data
        ]

    def stop(self) -> None:
        """End the query; what it emitted can still be asked for."""
        self.query.stop()
        self._tidy()

    def _write(self, batch: DataFrame, number: int) -> None:
        self._error = None
        try:
            pass_by(BEFORE_SINK, number)
            self._tables[number] = batch.toArrow()
            if self._sink is not None:
                self._sink(batch, number)
            pass_by(AFTER_SINK, number)
        except BaseException as error:
            self._error = error
            raise

    def _tidy(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
