"""``take_sample``: draw a uniform sample without replacement from a stream's rows.

Each row gets a random key, and the sample is the rows with the smallest keys. This is algorithm A-Res of
Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97(5),
2006, with equal weights for all rows. The rows with the smallest keys of all are among the rows with the
smallest keys of each part (Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007). So each
task draws its own sample, and the samples are merged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.types import DoubleType, LongType, StructField, StructType

from penstock.arguments import refusal
from penstock.peek.query import (
    Deadline,
    restore_interrupts,
    run_query,
    with_any_column,
    with_numbered_columns,
)
from penstock.peek.result import TakeResult
from penstock.peek.take import (
    check_arguments,
    check_query,
    check_seconds,
    folder_text,
    without_side_effects,
)
from penstock.spark.internals.python_workers import check_workers

Keys = NDArray[np.float64]
_SLACK = 2
"""A reservoir is reduced when it has this many times the number of rows in the sample."""


class Reservoir:
    """Reservoir: keeps the ``rows`` rows with the smallest keys among all rows added."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._bound = np.inf
        self._parts: list[tuple[pa.Table, Keys]] = []
        self._held = 0

    def add(self, table: pa.Table, keys: Keys) -> None:
        places = np.flatnonzero(keys < self._bound)
        if not places.size:
            return
        # Copy the rows, so that the whole batch does not stay in memory.
        self._parts.append((table.take(pa.array(places)), keys[places]))
        self._held += int(places.size)
        if self._held >= _SLACK * self._rows:
            self._reduce()

    def kept(self) -> tuple[pa.Table, Keys] | None:
        """Return the sample in the order of its keys, which is random; None if no rows were added."""
        if not self._parts:
            return None
        self._reduce()
        ((table, keys),) = self._parts
        order = np.argsort(keys)
        return table.take(pa.array(order)), keys[order]

    def _reduce(self) -> None:
        table = pa.concat_tables([part for part, _ in self._parts])
        keys = np.concatenate([part for _, part in self._parts])
        if keys.size > self._rows:
            places = np.argpartition(keys, self._rows - 1)[: self._rows]
            table, keys = table.take(pa.array(places)), keys[places]
        if keys.size == self._rows:
            self._bound = float(keys.max())
        self._parts, self._held = [(table, keys)], int(keys.size)


_KEY, _SEEN = "key", "seen"
_BATCH_ROWS = 10_000
_MICRO_BATCH_ROWS = 1_000_000
"""The most rows in a micro-batch of a timed run. It is limited because an incomplete micro-batch does not
count.
"""


def take_sample(
    df: DataFrame,
    n: int,
    *,
    seconds: float | None = None,
    seed: int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> TakeResult:
    """Draw a uniform sample without replacement from the rows of a streaming DataFrame.

    Each task keeps the rows with the smallest random keys, so at most ``n`` rows leave each task, and the
    tasks' samples are merged (see :mod:`penstock.peek.sample`). As with :func:`take`, no rows are consumed
    and no files are left behind. The query runs in output mode append.

    Parameters
    ----------
    df
        A streaming DataFrame of a classic session.
    n
        The size of the sample, from 1. The result has all rows if the stream has fewer.
    seconds
        Draw from the rows that arrive within this many seconds, in whole micro-batches. By default, draw from
        the rows that the stream has now.
    seed
        A whole number from 0. With the same seed, the same tasks draw the same sample again.
    folder
        The directory or URL for the query's temporary checkpoint; by default, this machine's folder for
        temporary files. See :func:`take`.

    Returns
    -------
    TakeResult
        The rows in random order. ``seen`` is the number of rows that they were drawn from.

    Raises
    ------
    InvalidInputError, OutputModeRefusedError, Exception
        As for :func:`take`.
    """
    check_arguments(df, n)
    check_seconds("seconds", seconds)
    if seed is not None and (type(seed) is not int or seed < 0):
        raise refusal("seed", seed, "a whole number from 0, or None")
    place = folder_text(folder)
    wanted = with_any_column(df)
    check_query(wanted, place)
    check_workers(df.sparkSession)
    deadline, reservoir, seen = Deadline(seconds), Reservoir(n), 0

    def draw(batch: DataFrame, number: int) -> None:
        nonlocal seen
        drawn = _drawn(batch, n, None if seed is None else [seed, number]).toArrow()
        seen += pc.sum(drawn[_SEEN], min_count=0).as_py()
        reservoir.add(drawn.drop_columns([_KEY, _SEEN]), drawn[_KEY].to_numpy())

    frame = without_side_effects(wanted, None if seconds is None else _MICRO_BATCH_ROWS)
    with restore_interrupts():
        run_query(frame, draw, deadline, folder=place, available_now=seconds is None)
    kept = reservoir.kept()
    tables = [] if kept is None else [kept[0].rename_columns(wanted.columns)]
    return TakeResult.of(df, tables, n, deadline.passed, complete=True, seen=seen)


def _drawn(batch: DataFrame, rows: int, seed: list[int] | None) -> DataFrame:
    """Return the sampled rows of each task with their keys. The first row of each task also has the number of
    rows that the task has read.
    """
    numbered = with_numbered_columns(batch)
    schema = StructType(
        [*numbered.schema.fields, StructField(_KEY, DoubleType()), StructField(_SEEN, LongType())]
    )

    def draw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        part = 0 if context is None else context.partitionId()
        random = np.random.default_rng(None if seed is None else [*seed, part])
        return draw_from(batches, rows, random)

    return numbered.mapInArrow(draw, schema)


def draw_from(
    batches: Iterator[pa.RecordBatch], rows: int, random: np.random.Generator
) -> Iterator[pa.RecordBatch]:
    """Yield a task's sample, with keys from ``random``."""
    reservoir, seen = Reservoir(rows), 0
    for batch in batches:
        seen += batch.num_rows
        reservoir.add(pa.Table.from_batches([batch]), random.random(batch.num_rows))
    kept = reservoir.kept()
    if kept is None:
        return
    table, keys = kept
    counts = np.zeros(keys.size, np.int64)
    counts[0] = seen
    table = table.append_column(_KEY, pa.array(keys)).append_column(_SEEN, pa.array(counts))
    yield from table.to_batches(_BATCH_ROWS)
