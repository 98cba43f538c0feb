"""Spark's progress and Spark's errors as the store has them: short, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from pyspark.errors import PySparkException

from penstock.continuous.driver.progress import LATENCY
from penstock.errors import PenstockError, QueryFailed
from penstock.instants import micros_of
from penstock.pipeline.failures import original_error
from penstock.redaction import sentence
from penstock.store.records.queries import QueryError, QueryProgress

_TEXT = 300
_MESSAGE = 600
_WARNING = 400
# What Spark puts behind an error's message: the query's plan, and where in its own code it was.
# Every pattern here takes time in proportion to the text: nobody knows what others write.
_BEHIND = re.compile(r"\n=== Streaming Query ===|\n[ \t]+at [\w.$]+[(.]|\nJVM stacktrace:")

# What an object is called that has no name: its class, and where it is in memory.
_OBJECT = re.compile(r"(?<![\w.])(?:\w+\.)+([\w$]+)@[0-9a-f]+")


def progress_of(
    told: Mapping[str, Any], rows_in: int, rows_out: int | None, secrets: Sequence[str] = ()
) -> QueryProgress:
    """Progress in Spark's JSON, with the rows of all that it stands for."""
    durations = {phase: float(taken) for phase, taken in (told.get("durationMs") or {}).items()}
    operators = told.get("stateOperators") or []
    return QueryProgress(
        batch_id=int(told["batchId"]),
        rows_in=rows_in,
        rows_out=rows_out,
        latency=_latency((told.get("sink") or {}).get("metrics") or {}),
        duration=durations.get("triggerExecution", told.get("batchDuration")),
        durations=durations,
        watermark=_watermark((told.get("eventTime") or {}).get("watermark")),
        state_rows=_sum(operators, "numRowsTotal"),
        state_bytes=_sum(operators, "memoryUsedBytes"),
        warnings=tuple(_warnings(told.get("sources") or [], secrets)),
    )


def rows_of(told: Mapping[str, Any]) -> tuple[int, int | None]:
    """The rows that went in and came out; None where Spark does not count them."""
    out = (told.get("sink") or {}).get("numOutputRows", -1)
    return int(told.get("numInputRows") or 0), None if out is None or out < 0 else int(out)


def ends_of(told: Mapping[str, Any], secrets: Sequence[str]) -> tuple[str | None, str | None]:
    """What Spark calls the sources and the sink."""
    sources = [_called(each) for each in told.get("sources") or []]
    sink = _called(told.get("sink") or {})
    return text_of(", ".join(filter(None, sources)), secrets), text_of(sink, secrets)


def _warnings(sources: Sequence[Mapping[str, Any]], secrets: Sequence[str]) -> Iterator[str]:
    """What change feeds tell of their systems, beside where they end."""
    for source in sources:
        latest = source.get("latestOffset")
        for each in (latest.get("warnings") or ()) if isinstance(latest, Mapping) else ():
            text = text_of(str(each), secrets, _WARNING)
            if text:
                yield text


def _called(end: Mapping[str, Any]) -> str:
    return _OBJECT.sub(r"\1", end.get("description") or "")


def text_of(text: str | None, secrets: Sequence[str] = (), most: int = _TEXT) -> str | None:
    """A text that every store takes and everybody may read; None for an empty one."""
    if not text:
        return None
    kept = text.replace("\0", "").encode(errors="replace").decode()
    return sentence(kept, most, secrets)


def error_of(error: Exception, secrets: Sequence[str] = (), condition: str | None = None) -> QueryError:
    """What ended a query.

    Parameters
    ----------
    condition
        Spark's name for it, where the error itself has lost it.
    """
    found = original_error(error)
    if isinstance(found, PenstockError):
        condition, message = found.condition, found.message
    else:
        named = found.getCondition() if isinstance(found, PySparkException) else None
        condition, message = named or condition or QueryFailed.condition, str(found) or type(found).__name__
    message = _BEHIND.split(message, maxsplit=1)[0]
    return QueryError(text_of(condition) or QueryFailed.condition, _brief(message, secrets))


def _brief(message: str, secrets: Sequence[str]) -> str:
    """The beginning and the end, which often is what a Python function has raised."""
    whole = text_of(message, secrets, len(message) + _MESSAGE) or ""
    half = (_MESSAGE - 3) // 2
    return whole if len(whole) <= _MESSAGE else f"{whole[:half]} … {whole[-half:]}"


def _latency(metrics: Mapping[str, str]) -> dict[str, float]:
    start = f"{LATENCY}."
    return {
        name.removeprefix(start): float(value) for name, value in metrics.items() if name.startswith(start)
    }


def _watermark(text: str | None) -> int | None:
    """Microseconds since 1970; None for 1970, which stands for none."""
    return (micros_of(datetime.fromisoformat(text)) or None) if text else None


def _sum(operators: Sequence[Mapping[str, Any]], name: str) -> int | None:
    return sum(int(each.get(name) or 0) for each in operators) if operators else None
