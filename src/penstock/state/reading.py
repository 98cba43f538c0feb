"""The state of a query as a DataFrame, through Spark's state data source, or the reason why not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from penstock.arguments import did_you_mean, in_quotes, require
from penstock.errors import StateRefused
from penstock.spark.internals.sessions import clone_session, is_classic
from penstock.state.files import Files, is_there
from penstock.state.layout import Layout, read_layout
from penstock.state.logs import CONTINUOUS
from penstock.state.parts import way_to
from penstock.state.result import StateOperator, StatePart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# What java.net.URI writes with escapes in a path.
_ESCAPED = re.compile(r"[\x00-\x20\"#%<>?\[\\\]^`{|}\x7f]")
_LONGEST_REASON = 300


def read(
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    operator: int = 0,
    *,
    part: str | None = None,
    batch: int | None = None,
) -> DataFrame:
    """The state of one stateful operator, without starting the query.

    Parameters
    ----------
    checkpoint
        The query's ``checkpointLocation``: a path, or the URL of a file system that Python and Spark both reach.
    operator
        The operator's id; ``show`` lists them.
    part
        Which of its parts, for an operator with several: ``left`` or ``right`` of a stream-stream join, a variable of a
        transformWithState, or its ``timers``.
    batch
        The batch as of whose end the state is read; by default the last committed one.

    Returns
    -------
    DataFrame
        Columns ``key``, ``value`` and ``partition_id``, as Spark's data source ``statestore`` has them; for variables the columns of
        their kind, with a row for each element of a list or map. It is read when it is used, and so may fail when a running query has
        cleaned the batch up by then.

    Raises
    ------
    CheckpointNotFound
        When there is no checkpoint.
    StateRefused
        When there is no such state, or it cannot be read.
    """
    layout = read_layout(Files(checkpoint))
    found = _operator(layout, operator)
    way = way_to(found, _part(found, part))
    _require_schemas(layout, found)
    return state_frame(spark, layout, operator, {**way.rows, "batchId": str(_batch(layout, batch))})


def state_frame(spark: SparkSession, layout: Layout, operator: int, options: Mapping[str, str]) -> DataFrame:
    """What Spark's reader gives for some options.

    Raises
    ------
    StateRefused
        When it gives nothing.
    """
    reader = _session(spark, layout).read.format("statestore").option("operatorId", operator)
    try:
        return reader.options(**options).load(layout.files.location)
    except Exception as error:
        where = layout.files.shown
        if _ESCAPED.search(layout.files.location):
            raise StateRefused(
                f"Spark's state reader does not find {where!r}: it puts escapes, as URLs have them, in place of blanks and some other "
                "letters of the path. Read it through a symbolic link or a copy without such letters",
                condition="STATE_REFUSED.PATH",
                checkpoint=where,
            ) from error
        raise StateRefused(
            f"Spark cannot read operator {operator} of the checkpoint at {where!r}: {spark_says(error)}",
            condition="STATE_REFUSED.UNREADABLE",
            checkpoint=where,
            operator=operator,
        ) from error


def spark_says(error: Exception) -> str:
    """The condition and the first words of an error of Spark's."""
    java: Any = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.toString())
    return " ".join(text[max(text.find("["), 0) :].split())[:_LONGEST_REASON]


def _session(spark: SparkSession, layout: Layout) -> SparkSession:
    """A session that knows how the files of the state are named: Spark takes that from its settings, not from the checkpoint."""
    last = layout.logs.committed
    wanted = "2" if last is not None and last.state_ids else "1"
    if spark.conf.get(_FORMAT, "1") == wanted:
        return spark
    if not is_classic(spark):
        raise StateRefused(
            f"the checkpoint's state is of format {wanted}, and Spark reads it in a session with {_FORMAT}={wanted}: set it there",
            condition="STATE_REFUSED.SESSION",
            format=wanted,
        )
    own = clone_session(spark)
    own.conf.set(_FORMAT, wanted)
    return own


def _operator(layout: Layout, number: int) -> StateOperator:
    require("operator", number, int, "an operator's number, as ps.state.show lists them")
    where = layout.files.shown
    if not layout.operators:
        last = layout.logs.planned or layout.logs.committed
        why = (
            "it is a continuous query's, and those keep none"
            if last is not None and last.engine == CONTINUOUS
            else "the query keeps none, or has not run a batch yet"
        )
        raise StateRefused(
            f"the checkpoint at {where!r} has no state: {why}. ps.state.show tells what it has",
            condition="STATE_REFUSED.NO_STATE",
            checkpoint=where,
        )
    for found in layout.operators:
        if found.id == number:
            return found
    known = ", ".join(f"{each.id} ({each.name or 'no name'})" for each in layout.operators)
    raise StateRefused(
        f"the checkpoint at {where!r} has no operator {number}: say one of {known}",
        condition="STATE_REFUSED.NO_OPERATOR",
        checkpoint=where,
        operator=number,
    )


def _part(operator: StateOperator, name: str | None) -> StatePart:
    known = [part.name for part in operator.parts]
    if name is None and len(known) == 1:
        return operator.parts[0]
    if name in known:
        return operator.parts[known.index(name)]
    called = f"operator {operator.id} ({operator.name or 'no name'})"
    what = f"{called} has {len(known)} parts" if name is None else f"{called} has no part {in_quotes(name)}"
    hint = "" if name is None else did_you_mean(name, known)
    raise StateRefused(
        f"{what}: say one of {', '.join(known) or 'none'} as part.{hint}",
        condition="STATE_REFUSED.NO_PART",
        operator=operator.id,
        parts=known,
    )


def _require_schemas(layout: Layout, operator: StateOperator) -> None:
    """Refuse what Spark looks for where the checkpoint used to be."""
    for path in layout.schema_paths.get(operator.id, ()):
        if not is_there(path):
            raise StateRefused(
                f"the checkpoint was made elsewhere, and Spark finds the schemas of operator {operator.id} by the absolute path {path}: "
                "move or copy it back there, or read it where the query runs",
                condition="STATE_REFUSED.MOVED",
                operator=operator.id,
                path=path,
            )


def _batch(layout: Layout, batch: int | None) -> int:
    known = layout.logs.batches
    if not known:
        planned = layout.logs.planned
        why = (
            "no batch has begun" if planned is None else f"batch {planned.id} has begun and is not committed"
        )
        raise StateRefused(
            f"the checkpoint at {layout.files.shown!r} has no committed batch ({why}), and Spark reads the state of one: "
            "let the query run until it has committed",
            condition="STATE_REFUSED.NOTHING_COMMITTED",
            checkpoint=layout.files.shown,
        )
    if batch is None:
        return known[-1]
    if batch not in known:
        raise StateRefused(
            f"batch {batch} is not committed, or cleaned up since: the checkpoint has batches {known[0]} to {known[-1]}",
            condition="STATE_REFUSED.NO_BATCH",
            batch=batch,
            first=known[0],
            last=known[-1],
        )
    return batch
