"""Loads state with Spark's state reader, in a session with the settings that a checkpoint needs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from penstock.errors import StateRefusedError
from penstock.json_text import parse_json_object
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.sessions import clone_session, is_classic

_FORMAT_SETTING = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# Characters that java.net.URI escapes in paths.
_ESCAPED = re.compile(r"[\x00-\x20\"#%<>?\[\\\]^`{|}\x7f]")
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)*\]")
_CALL = re.compile(r"\AAn error occurred while calling \S+\s*:\s*")
_FRAMES = re.compile(r"\n\s*at ")
_REASON_CHARACTERS = 300


def load_state(
    spark: SparkSession, checkpoint: Checkpoint, operator: int, options: Mapping[str, str], *, state_ids: bool
) -> DataFrame:
    """Load an operator's state with options of Spark's state reader.

    ``state_ids`` says whether the commit log names the files of the state (format 2 of Spark's state
    checkpoints).
    """
    reader = _session_for_format(spark, state_ids).read.format("statestore").option("operatorId", operator)
    try:
        return reader.options(**options).load(checkpoint.location)
    except Exception as error:
        location = checkpoint.label
        if _ESCAPED.search(checkpoint.location):
            raise StateRefusedError(
                f"Spark's state reader does not find {location!r}, because it escapes spaces and some other "
                "characters in paths: read it through a symbolic link, or a copy, without such characters",
                condition="STATE_REFUSED.PATH",
                checkpoint=location,
            ) from error
        raise unreadable(location, operator, error) from error


def has_state_ids(checkpoint: Checkpoint, batch_id: int) -> bool:
    """Return whether the commit log's entry of a micro-batch names the files of the state."""
    lines = (checkpoint.read(f"commits/{batch_id}") or b"").split(b"\n")
    try:
        return len(lines) > 1 and bool(parse_json_object(lines[1]).get("stateUniqueIds"))
    except ValueError:
        return False


def unreadable(shown: str, operator: int, error: Exception) -> StateRefusedError:
    """Return the error for state that Spark's reader cannot load, or whose rows it cannot read."""
    return StateRefusedError(
        f"Spark cannot read operator {operator} of the checkpoint at {shown!r}: {spark_reason(error)}",
        condition="STATE_REFUSED.UNREADABLE",
        checkpoint=shown,
        operator=operator,
    )


def spark_reason(error: Exception) -> str:
    """Return the message with Spark's condition, and the root cause, without stack traces."""
    causes = [_FRAMES.split(part)[0] for part in str(error).split("\nCaused by: ")]
    texts = [" ".join(_CALL.sub("", cause).split()) for cause in causes]
    named = [text[match.start() :] for text in texts if (match := _CONDITION.search(text))]
    if not named:
        return texts[-1][:_REASON_CHARACTERS]
    reason = named[0][:_REASON_CHARACTERS]
    return reason if texts[-1].endswith(named[-1]) else f"{reason} ({texts[-1][:_REASON_CHARACTERS]})"


def _session_for_format(spark: SparkSession, state_ids: bool) -> SparkSession:
    """Return a session with a setting for the state's file format, which Spark takes from no option."""
    file_format = "2" if state_ids else "1"
    if spark.conf.get(_FORMAT_SETTING, "1") == file_format:
        return spark
    if not is_classic(spark):
        raise StateRefusedError(
            f"the checkpoint's state has format {file_format}, which Spark reads only with "
            f"{_FORMAT_SETTING}={file_format}: set it on the session",
            condition="STATE_REFUSED.SESSION",
            format=file_format,
        )
    session = clone_session(spark)
    session.conf.set(_FORMAT_SETTING, file_format)
    return session
