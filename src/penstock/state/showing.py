"""``state.show``: reads a checkpoint without starting the query."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.errors import StateRefused
from penstock.limits.record import read_record
from penstock.state.files import Files
from penstock.state.layout import Layout, read_layout
from penstock.state.operators import StateOperator
from penstock.state.result import CheckpointState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.limits.progress import LimitProgress


def show(spark: SparkSession | None, checkpoint: str | os.PathLike[str]) -> CheckpointState:
    """Show what the checkpoint of a streaming query has: batches, watermarks, offsets and stateful operators.

    Nothing is started and nothing is written. The checkpoint may be of micro-batches or of a continuous
    query, complete or as a crash left it, also while the query runs.

    Parameters
    ----------
    spark
        A session. Spark reads all of the state in one job, for its columns and its rows as of the last
        committed batch. With None these are left out: files are listed, and small ones are read.
    checkpoint
        The query's ``checkpointLocation``: a path, or the URL of a file system that Python and Spark both
        reach.

    Raises
    ------
    CheckpointNotFound
        When there is no checkpoint.
    StateRefused
        When it cannot be reached.
    """
    layout = read_layout(Files(checkpoint))
    operators, uncounted = _counted(spark, layout)
    limit, limit_unknown = _limit(spark, layout.files)
    logs = layout.logs
    return CheckpointState(
        layout.files.shown,
        logs.query_id,
        logs.committed,
        logs.planned,
        operators,
        limit,
        (*logs.untold, *uncounted, *limit_unknown),
    )


def _limit(spark: SparkSession | None, files: Files) -> tuple[LimitProgress | None, tuple[str, ...]]:
    try:
        if read_record(files.checkpoint) is None:
            return None, ()
        # Imported late: it imports Spark, which queries without a limit do not need.
        from penstock.limits.progress import limit_progress

        return limit_progress(files.location, spark=spark), ()
    except (StateRefused, OSError, ValueError, KeyError) as error:
        return None, (f"progress of the limit: {error}",)


def _counted(spark: SparkSession | None, layout: Layout) -> tuple[tuple[StateOperator, ...], tuple[str, ...]]:
    if not layout.operators:
        return (), ()
    if spark is None:
        return layout.operators, ("columns and rows of the state: reading them needs a Spark session",)
    if not layout.logs.batches:
        why = "Spark reads the state of a committed batch, and there is none"
        return layout.operators, (f"columns and rows of the state: {why}",)
    from penstock.state.counting import count_rows

    return count_rows(spark, layout, layout.logs.batches[-1]), ()
