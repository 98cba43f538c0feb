"""Convert Spark's progress and errors to the store's form: short, and without secrets."""

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

_TEXT = 300
_MESSAGE = 600
_WARNING = 400
# What Spark appends to an error's message: the query's plan, and its own stack trace.
# All patterns here take linear time, since the text may come from anywhere.
_APPENDED = re.compile(r"\n=== Streaming Query ===|\n[ \t]+at [\w.$]+[(.]|\nJVM stacktrace:")

# Java's default text of an object: its class and its address.
_OBJECT = re.compile(r"(?<![\w.])(?:\w+\.)+([\w$]+)@[0-9a-f]+")


def progress_of(
    progress: Json, rows_in: int, rows_out: int | None, secrets: Sequence[str] = (), late: int = 0
) -> QueryProgress:
    """Return Spark's progress in the store's form.

    Parameters
    ----------
    progress
        The newest progress, in the form of Spark's JSON.
    rows_in, rows_out
        The rows since the last progress that was written.
    secrets
        Texts to replace.
    late
        Rows that this run has dropped as late.
    """
    durations = {phase: float(taken) for phase, taken in (progress.get("durationMs") or {}).items()}
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
        state_rows=_sum(operators, "numRowsTotal"),
        state_bytes=_sum(operators, "memoryUsedBytes"),
        warnings=(
            *_warnings(progress.get("sources") or [], secrets),
            *([_late_text(late)] if late else []),
        ),
    )


def rows_of(progress: Json) -> tuple[int, int | None]:
    """Return the numbers of rows read and written; None if Spark does not count them."""
    out = (progress.get("sink") or {}).get("numOutputRows", -1)
    return int(progress.get("numInputRows") or 0), None if out is None or out < 0 else int(out)


def late_rows_of(progress: Json) -> int:
    """Return how many rows a micro-batch has dropped because they were older than the watermark."""
    return _sum(progress.get("stateOperators") or [], "numRowsDroppedByWatermark") or 0


def _late_text(rows: int) -> str:
    return (
        f"{rows} row{'s have' if rows > 1 else ' has'} been dropped since this run began, because "
        f"{'they were' if rows > 1 else 'it was'} older than the watermark"
    )


def descriptions_of(progress: Json, secrets: Sequence[str]) -> tuple[str | None, str | None]:
    """Return Spark's descriptions of the sources and the sink."""
    sources = [_called(source) for source in progress.get("sources") or []]
    sink = _called(progress.get("sink") or {})
    return text_of(", ".join(filter(None, sources)), secrets), text_of(sink, secrets)


def _warnings(sources: Sequence[Json], secrets: Sequence[str]) -> Iterator[str]:
    """Yield the warnings that change feeds report with their latest offset."""
    for source in sources:
        latest = source.get("latestOffset")
        for warning in (latest.get("warnings") or ()) if isinstance(latest, Mapping) else ():
            text = text_of(str(warning), secrets, _WARNING)
            if text:
                yield text


def _called(end: Json) -> str:
    return _OBJECT.sub(r"\1", end.get("description") or "")


def text_of(text: str | None, secrets: Sequence[str] = (), most: int = _TEXT) -> str | None:
    """Return a text that every store accepts, without secrets; None if it is empty."""
    if not text:
        return None
    kept = text.replace("\0", "").encode(errors="replace").decode()
    return sentence(kept, most, secrets)


def error_of(error: Exception, secrets: Sequence[str] = (), condition: str | None = None) -> QueryError:
    """Return a query's error in the store's form, with Spark's condition if it has lost its own."""
    error = original_error(error)
    if isinstance(error, PenstockError):
        condition, message = error.condition, error.message
    else:
        named = error.getCondition() if isinstance(error, PySparkException) else None
        condition, message = named or condition, str(error) or type(error).__name__
    message = _APPENDED.split(message, maxsplit=1)[0]
    return QueryError(text_of(condition) or QueryFailedError.condition, _brief(message, secrets))


def _brief(message: str, secrets: Sequence[str]) -> str:
    """Return the start and the end of a message; the end is often the error of a Python function."""
    whole = text_of(message, secrets, len(message) + _MESSAGE) or ""
    half = (_MESSAGE - 3) // 2
    return whole if len(whole) <= _MESSAGE else f"{whole[:half]} … {whole[-half:]}"


def _latency(metrics: Mapping[str, str]) -> dict[str, float]:
    start = f"{LATENCY}."
    return {
        name.removeprefix(start): float(value) for name, value in metrics.items() if name.startswith(start)
    }


def _watermark(text: str | None) -> int | None:
    """Return microseconds since 1970; None for 1970, which means no watermark."""
    return (micros_of(datetime.fromisoformat(text)) or None) if text else None


def _sum(operators: Sequence[Json], name: str) -> int | None:
    return sum(int(operator.get(name) or 0) for operator in operators) if operators else None
