"""Rules of sinks: the output modes that they support, and their guarantees (Spark 4.2, 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import InvalidInputError
from penstock.modes.checking.emits import ADD, REPLACE_BY_KEY, Emits
from penstock.modes.checking.report import MODES, UNSAFE, WARNING, Problem
from penstock.spark.internals.query_start import Format, look_up_format
from penstock.spark.internals.sessions import is_classic

FILES = ("parquet", "json", "csv", "orc", "text", "xml")
DEBUG = ("console", "memory", "noop")
FUNCTIONS = {"foreach": "foreach", "foreachbatch": "foreachBatch"}
_V1_FORMATS = (*FILES, "delta", "foreachbatch")
_KNOWN = (*DEBUG, *_V1_FORMATS, "foreach", "kafka", "penstock", "penstock table")
KNOWN_FROM = {
    "delta": "the source of Delta Lake 4.0 (DeltaDataSource; DeltaSink, which respects overwriteSchema only "
    "in complete mode), not tested here",
    "kafka": "the source of Spark 4.3 (KafkaTable, KafkaWriteBuilder), not tested here",
}
"""The source code from which formats without a test are known, even if a session lacks their package."""
_UNSUPPORTED_MODE = "STREAMING_OUTPUT_MODE.UNSUPPORTED_DATASOURCE"


@dataclass(frozen=True)
class Sink:
    name: str
    format: Format = field(default_factory=Format)
    instance: object = None
    """The sink object, if one was passed."""


def sink_of(frame: DataFrame, sink: object) -> Sink | None:
    """Resolve a sink: a format's name, ``foreach``, ``foreachBatch``, or an object with a ``format``."""
    if sink is None:
        return None
    format_name = sink if isinstance(sink, str) else getattr(sink, "format", None)
    if not isinstance(format_name, str):
        raise InvalidInputError(
            "a sink is a format such as 'parquet', 'foreachBatch', or a QueueSink or TableSink, not "
            f"{in_quotes(sink)}"
        )
    name = format_name.lower()
    if name not in _KNOWN:
        return Sink(format_name, look_up_format(frame, format_name) if is_classic(frame) else Format())
    missing = look_up_format(frame, name).not_found if name in KNOWN_FROM and is_classic(frame) else None
    known_format = Format(
        python=name == "penstock", is_v1=name in _V1_FORMATS, files=name in FILES, not_found=missing
    )
    return Sink(name, known_format, None if isinstance(sink, str) else sink)


def sink_problems(sink: Sink, mode: str, trigger: str, emits: Emits | None) -> Iterator[Problem]:
    """Report what a sink does not support, and the guarantees that it does not give."""
    source = KNOWN_FROM.get(sink.name)
    if sink.format.not_found is not None and source is None:
        yield Problem(
            "PENSTOCK_NO_SINK",
            f"the session does not have the format {sink.name}",
            fix="an installed format; or spark.jars.packages with its package, when the session is created",
            spark=sink.format.not_found.message,
            condition=sink.format.not_found.condition,
        )
        return
    if not sink.format.streams:
        yield Problem(
            "PENSTOCK_NO_SINK",
            f"streams cannot be written to {sink.name}",
            fix=f"foreachBatch(lambda batch, _: batch.write.format('{sink.name}')...), if it takes a batch",
        )
    elif mode not in _supported_modes(sink):
        yield Problem(
            _UNSUPPORTED_MODE if sink.format.files or sink.name == "delta" else "PENSTOCK_SINK_MODE",
            f"{_label(sink)} takes {' and '.join(_supported_modes(sink))} mode, not "
            f"{mode}{_unsupported_reason(sink, mode)}",
            fix="TableSink(name, keys=[...]), which takes every mode; or foreachBatch",
            condition=_UNSUPPORTED_MODE if sink.format.files else None,
            source=source,
        )
    if trigger == "continuous":
        yield from _continuous_problems(sink)
    elif sink.name in FUNCTIONS:
        yield Problem(
            "PENSTOCK_SINK_REPEATS",
            f"{FUNCTIONS[sink.name]} gets rows again when a query restarts in the middle of a micro-batch",
            WARNING,
            fix="exactly_once(connection, sink, app_id, batch_id) in foreachBatch; or TableSink",
        )
    elif sink.name == "kafka":
        yield Problem(
            "PENSTOCK_SINK_REPEATS",
            "Kafka gets rows again when a query restarts in the middle of a micro-batch",
            WARNING,
            fix="drop repeated rows by a key when reading; or QueueSink",
            source=source,
        )
    sink_action = ADD if emits is None else emits.sink
    if sink_action != ADD and sink.name == "kafka":
        repetition = "again with new values" if sink_action == REPLACE_BY_KEY else "again in each micro-batch"
        yield Problem(
            "PENSTOCK_SINK_ONLY_ADDS",
            f"the query emits rows {repetition}, and a topic only grows: readers get old and new ones",
            WARNING,
            fix="a compacted topic with the group's key as the record's key",
            source=source,
        )
    is_other_python_sink = sink.format.python and sink.name != "penstock"
    if sink_action != ADD and is_other_python_sink and mode in _supported_modes(sink):
        yield Problem(
            "PENSTOCK_SINK_HAS_TO_REPLACE",
            f"in {mode} mode {sink.name} must replace all its rows in one commit (overwrite=True), which "
            "Spark cannot check",
            WARNING,
        )


def unchecked(sink: Sink) -> Iterator[str]:
    """Describe properties of a sink that could not be checked."""
    if sink.format.lookup_error is not None:
        yield (
            f"what the sink {sink.name} takes, which Spark does not report without the query's options: "
            f"{sink.format.lookup_error}"
        )
    if sink.format.not_found is not None and sink.name in KNOWN_FROM:
        yield (
            f"whether the session that starts the query has the format {sink.name}, which this one does not "
            f"have: {sink.format.not_found.message}"
        )


def _label(sink: Sink) -> str:
    return {"penstock": "a queue", "penstock table": "a table"}.get(sink.name, f"the sink {sink.name}")


def _supported_modes(sink: Sink) -> tuple[str, ...]:
    if sink.format.files or sink.name == "penstock":
        return ("append",)
    if sink.name == "delta" or sink.format.python:
        return ("append", "complete")
    supported = {"complete": sink.format.truncates, "update": sink.format.updates}
    return tuple(mode for mode in MODES if supported.get(mode) is not False)


def _unsupported_reason(sink: Sink, mode: str) -> str:
    if mode == "complete" and sink.format.truncates is False:
        return ": it cannot be emptied"
    if mode == "update" and sink.format.updates is False:
        return ": it does not take updated rows as new ones"
    return ""


def _continuous_problems(sink: Sink) -> Iterator[Problem]:
    if sink.format.is_v1:
        yield Problem(
            "PENSTOCK_SINK_NOT_CONTINUOUS",
            f"the sink {sink.name} cannot be written to under the continuous trigger",
            fix="a processing-time trigger",
        )
    elif sink.name == "foreach":
        yield Problem(
            "PENSTOCK_SINK_NOT_CONTINUOUS",
            "Spark's continuous trigger cannot call a Python function: the query starts, and fails with its "
            "first rows",
            fix="a processing-time trigger",
        )
    elif sink.format.python or sink.name == "penstock table":
        yield Problem(
            "PENSTOCK_ROWS_LOST_CONTINUOUS",
            "Spark's continuous trigger commits without calling a Python sink's write(): every row is lost, "
            "and the query looks healthy",
            UNSAFE,
            fix="a processing-time trigger",
        )


def table_refusals(
    frame: DataFrame, sink: object, mode: str, *, continuous: bool = False
) -> Iterator[Problem]:
    """Report why a pipeline to a ``TableSink`` would not start; this runs the check of the start itself."""
    check = getattr(sink, "refusal", None)
    error = None if check is None else check(frame, mode, continuous=continuous)
    if error is not None:
        yield Problem(
            "PENSTOCK_TABLE_REFUSES",
            error.message,
            fix=_nested_keys_fix(frame, getattr(sink, "keys", ())),
            condition=error.condition,
        )


def _nested_keys_fix(frame: DataFrame, keys: tuple[str, ...]) -> str | None:
    """Suggest using fields of nested keys as columns, such as the start of a window."""
    nested = {field.name: field.dataType for field in frame.schema if isinstance(field.dataType, StructType)}
    for key in keys:
        if key in nested:
            inner = nested[key].names[0]
            return f"select('{key}.{inner}', ...), with '{inner}' among the keys in place of '{key}'"
    return None
