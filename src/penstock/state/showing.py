"""What a checkpoint holds, told without starting the query."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.errors import StateRefused
from penstock.limits.record import read_record
from penstock.state.files import Files
from penstock.state.layout import Layout, read_layout
from penstock.state.result import CheckpointState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.limits.progress import LimitProgress
    from penstock.state.result import StateOperator


def show(spark: SparkSession | None, checkpoint: str | os.PathLike[str]) -> CheckpointState:
    """What the checkpoint of a streaming query holds: batches, watermarks, offsets and stateful operators.

    Nothing is started and nothing is written. It takes checkpoints of micro-batches and of continuous queries, whole or as a crash
    left them, also while the query runs.

    Parameters
    ----------
    spark
        A session. Spark reads all of the state, in one job, for its columns and its rows as of the last committed batch; with None they
        are left out, files are listed and small ones are read.
    checkpoint
        The query's ``checkpointLocation``: a path, or the URL of a file system that Python and Spark both reach.

    Raises
    ------
    CheckpointNotFound
        When there is no checkpoint.
    StateRefused
        When it cannot be reached.
    """
    layout = read_layout(Files(checkpoint))
    operators, untold = _counted(spark, layout)
    limit, why = _limit(spark, layout.files)
    logs = layout.logs
    return CheckpointState(
        layout.files.shown,
        logs.query_id,
        logs.committed,
        logs.planned,
        operators,
        limit,
        (*logs.untold, *untold, *why),
    )


def _limit(spark: SparkSession | None, files: Files) -> tuple[LimitProgress | None, tuple[str, ...]]:
    try:
        if read_record(files.checkpoint) is None:
            return None, ()
        # Late: it imports Spark, and queries without a limit do without.
        from penstock.limits.progress import limit_progress

        return limit_progress(files.location, spark=spark), ()
    except (StateRefused, OSError, ValueError, KeyError) as error:
        return None, (f"how far the limit has come: {error}",)


def _counted(spark: SparkSession | None, layout: Layout) -> tuple[tuple[StateOperator, ...], tuple[str, ...]]:
    if not layout.operators:
        return (), ()
    if spark is None:
        return layout.operators, ("columns and rows of the state: Spark reads them, and there is no session",)
    if not layout.logs.batches:
        why = "no batch is committed, and Spark reads the state of one"
        return layout.operators, (f"columns and rows of the state: {why}",)
    from penstock.state.counting import counted

    return counted(spark, layout, layout.logs.batches[-1]), ()
