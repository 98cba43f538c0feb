"""Conversion of Spark's progress and errors to the store's format: short, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from pyspark.errors import PySparkException

from penstock.changes.finality import finalized_of
from penstock.continuous.driver.progress import LATENCY
from penstock.errors import PenstockError, QueryFailedError
from penstock.instants import micros_of
from penstock.json_text import Json
from penstock.redaction import sentence
from penstock.spark.error_boundary import original_error
from penstock.store.records.queries import QueryError, QueryProgress

_MAX_TEXT = 300
_MAX_MESSAGE = 600
_MAX_WARNING = 400
# What Spark appends to the message of an error: the query's plan and a stack trace.
# All patterns here take linear time, because the text may come from anywhere.
_SPARK_SUFFIX = re.compile(r"\n=== Streaming Query ===|\n[ \t]+at [\w.$]+[(.]|\nJVM stacktrace:")

# Java's default text for an object: its class and address.
_JAVA_OBJECT = re.compile(r"(?<![\w.])(?:\w+\.)+([\w$]+)@[0-9a-f]+")


def progress_of(
    progress: Json, rows_in: int, rows_out: int | None, secrets: Sequence[str] = (), late_rows: int = 0
) -> QueryProgress:
    """Return Spark's progress in the store's format.

    Parameters
    ----------
    progress
        The newest progress, as Spark's JSON.
    rows_in, rows_out
        The number of rows since the last written progress.
    secrets
        Texts to redact.
    late_rows
        The number of rows that this run has dropped because they were late.
    """
    durations = {phase: float(millis) for phase, millis in (progress.get("durationMs") or {}).items()}
    operators = progress.get("stateOperators") or []
    return QueryProgress(
        batch_id=int(progress["batchId"]),
        rows_in=rows_in,
        rows_out=rows_out,
        latency=_latency((progress.get("sink") or {}).get("metrics") or {}),
        duration=durations.get("triggerExecution", progress.get("batchDuration")),
        durations=durations,
        finalized_until=finalized_of(progress),
        watermark=_watermark((progress.get("eventTime") or {}).get("watermark")),
        state_rows=_total(operators, "numRowsTotal"),
        state_bytes=_total(operators, "memoryUsedBytes"),
        warnings=(
            *_warnings(progress.get("sources") or [], secrets),
            *([_late_text(late_rows)] if late_rows else []),
        ),
    )


def rows_of(progress: Json) -> tuple[int, int | None]:
    """Return the numbers of rows read and written; None for a number that Spark does not count."""
    rows_out = (progress.get("sink") or {}).get("numOutputRows", -1)
    return int(progress.get("numInputRows") or 0), None if rows_out is None or rows_out < 0 else int(rows_out)


def late_rows_of(progress: Json) -> int:
    """Return how many rows a micro-batch dropped because they were older than the watermark."""
    return _total(progress.get("stateOperators") or [], "numRowsDroppedByWatermark") or 0


def _late_text(rows: int) -> str:
    return (
        f"{rows} row{'s have' if rows > 1 else ' has'} been dropped since this run began, because "
        f"{'they were' if rows > 1 else 'it was'} older than the watermark"
    )


def descriptions_of(progress: Json, secrets: Sequence[str]) -> tuple[str | None, str | None]:
    """Return Spark's descriptions of the sources and the sink."""
    sources = [_description(source) for source in progress.get("sources") or []]
    sink = _description(progress.get("sink") or {})
    return text_of(", ".join(filter(None, sources)), secrets), text_of(sink, secrets)


def _warnings(sources: Sequence[Json], secrets: Sequence[str]) -> Iterator[str]:
    """Yield the warnings in the latest offsets of change feeds."""
    for source in sources:
        latest = source.get("latestOffset")
        for warning in (latest.get("warnings") or ()) if isinstance(latest, Mapping) else ():
            text = text_of(str(warning), secrets, _MAX_WARNING)
            if text:
                yield text


def _description(connector: Json) -> str:
    return _JAVA_OBJECT.sub(r"\1", connector.get("description") or "")


def text_of(text: str | None, secrets: Sequence[str] = (), max_characters: int = _MAX_TEXT) -> str | None:
    """Return a text without secrets that every store accepts; None if it is empty."""
    if not text:
        return None
    storable = text.replace("\0", "").encode(errors="replace").decode()
    return sentence(storable, max_characters, secrets)


def error_of(error: Exception, secrets: Sequence[str] = (), condition: str | None = None) -> QueryError:
    """Return a query's error in the store's format; ``condition`` is used if the error has none."""
    error = original_error(error)
    if isinstance(error, PenstockError):
        condition, message = error.condition, error.message
    else:
        spark_condition = error.getCondition() if isinstance(error, PySparkException) else None
        condition, message = spark_condition or condition, str(error) or type(error).__name__
    message = _SPARK_SUFFIX.split(message, maxsplit=1)[0]
    return QueryError(text_of(condition) or QueryFailedError.condition, _shorten(message, secrets))


def _shorten(message: str, secrets: Sequence[str]) -> str:
    """Keep only the start and the end of a long message; the end is often the error of a Python function."""
    text = text_of(message, secrets, len(message) + _MAX_MESSAGE) or ""
    half = (_MAX_MESSAGE - 3) // 2
    return text if len(text) <= _MAX_MESSAGE else f"{text[:half]} … {text[-half:]}"


def _latency(metrics: Mapping[str, str]) -> dict[str, float]:
    prefix = f"{LATENCY}."
    return {
        name.removeprefix(prefix): float(value) for name, value in metrics.items() if name.startswith(prefix)
    }


def _watermark(text: str | None) -> int | None:
    """Return microseconds since 1970; None for 1970 itself, which means no watermark."""
    return (micros_of(datetime.fromisoformat(text)) or None) if text else None


def _total(operators: Sequence[Json], name: str) -> int | None:
    return sum(int(operator.get(name) or 0) for operator in operators) if operators else None
