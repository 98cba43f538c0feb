"""What a sink is, and what the session knows of it (Spark 4.2, 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import InvalidInput
from penstock.modes.checking.emits import ADD, REPLACE_BY_KEY, Emits
from penstock.modes.checking.report import MODES, UNSAFE, WARNING, Problem
from penstock.spark.internals.sessions import is_classic
from penstock.spark.internals.sources import Format, look_up

FILES = ("parquet", "json", "csv", "orc", "text", "xml")
DEBUG = ("console", "memory", "noop")
FUNCTIONS = {"foreach": "foreach", "foreachbatch": "foreachBatch"}
_OLDER = (*FILES, "delta", "foreachbatch")
_KNOWN = (*DEBUG, *_OLDER, "foreach", "kafka", "penstock", "penstock table")
READ_IN_SOURCE = ("delta", "kafka")
"""Formats of packages that are known from their source, also where a session does not have them."""


@dataclass(frozen=True)
class Sink:
    """A sink and how Spark sees it."""

    name: str
    format: Format = field(default_factory=Format)
    given: object = None
    """The object, where it is one."""


def sink_of(frame: DataFrame, sink: object) -> Sink | None:
    """The sink that was given: a format's name, ``foreach``, ``foreachBatch``, or an object with a ``format``."""
    if sink is None:
        return None
    given = sink if isinstance(sink, str) else getattr(sink, "format", None)
    if not isinstance(given, str):
        raise InvalidInput(
            f"a sink is a format such as 'parquet', 'foreachBatch', or a ps.QueueSink or ps.TableSink, not {in_quotes(sink)}"
        )
    name = given.lower()
    if name not in _KNOWN:
        return Sink(given, look_up(frame, given) if is_classic(frame) else Format())
    itself = None if isinstance(sink, str) else sink
    missing = look_up(frame, name).missing if name in READ_IN_SOURCE and is_classic(frame) else None
    known = Format(python=name == "penstock", older=name in _OLDER, files=name in FILES, missing=missing)
    return Sink(name, known, itself)


# ---- sinks: What sinks take, and which promises they keep (Spark 4.2, 4.3).

KNOWN_FROM = {
    "delta": "the source of Delta Lake 4.0 (DeltaDataSource; DeltaSink, which heeds overwriteSchema in complete mode only), not tried here",
    "kafka": "the source of Spark 4.3 (KafkaTable, KafkaWriteBuilder), not tried here",
}
"""What was read to know a sink that could not be tried."""
_FILE_MODE = "STREAMING_OUTPUT_MODE.UNSUPPORTED_DATASOURCE"


def sink_problems(sink: Sink, mode: str, trigger: str, emits: Emits | None) -> Iterator[Problem]:
    """What a sink does not take, or does not keep."""
    source = KNOWN_FROM.get(sink.name)
    if sink.format.missing is not None and source is None:
        yield Problem(
            "PENSTOCK_NO_SINK",
            f"the session has no format {sink.name}",
            fix="a format that is there; or spark.jars.packages with the package that has it, when the session is made",
            spark=sink.format.missing.message,
            condition=sink.format.missing.condition,
        )
        return
    if not sink.format.streams:
        yield Problem(
            "PENSTOCK_NO_SINK",
            f"no stream can be written to {sink.name}",
            fix=f"foreachBatch(lambda batch, _: batch.write.format('{sink.name}')...), where it takes a batch",
        )
    elif mode not in _takes(sink):
        yield Problem(
            _FILE_MODE if sink.format.files or sink.name == "delta" else "PENSTOCK_SINK_MODE",
            f"{_shown(sink)} takes {' and '.join(_takes(sink))} mode, not {mode}{_why(sink, mode)}",
            fix="ps.TableSink(name, keys=[...]), which takes every mode; or foreachBatch",
            condition=_FILE_MODE if sink.format.files else None,
            source=source,
        )
    if trigger == "continuous":
        yield from _continuous(sink)
    elif sink.name in FUNCTIONS:
        yield Problem(
            "PENSTOCK_SINK_REPEATS",
            f"{FUNCTIONS[sink.name]} is called again with rows that it had, when a query restarts in the middle of a micro-batch",
            WARNING,
            fix="ps.exactly_once(connection, sink, app_id, batch_id) in foreachBatch; or ps.TableSink",
        )
    elif sink.name == "kafka":
        yield Problem(
            "PENSTOCK_SINK_REPEATS",
            "Kafka gets rows again when a query restarts in the middle of a micro-batch",
            WARNING,
            fix="have readers drop repeated rows by a key; or ps.QueueSink",
            source=source,
        )
    if emits is not None and emits.sink != ADD and sink.name == "kafka":
        how = "again with new values" if emits.sink == REPLACE_BY_KEY else "again in each micro-batch"
        yield Problem(
            "PENSTOCK_SINK_ONLY_ADDS",
            f"the query gives rows {how}, and a topic only grows: readers get old and new ones",
            WARNING,
            fix="a compacted topic with the group's key as the record's key",
            source=source,
        )
    if (
        emits is not None
        and emits.sink != ADD
        and sink.format.python
        and sink.name != "penstock"
        and mode in _takes(sink)
    ):
        yield Problem(
            "PENSTOCK_SINK_HAS_TO_REPLACE",
            f"in {mode} mode {sink.name} is asked for a writer with overwrite=True, and has to replace all that it has in one "
            "commit, which Spark cannot see to",
            WARNING,
        )


def unchecked(sink: Sink) -> Iterator[str]:
    """What could not be found out about a sink."""
    if sink.format.silent is not None:
        yield f"what the sink {sink.name} takes, of which Spark says without the query's options: {sink.format.silent}"
    if sink.format.missing is not None and sink.name in KNOWN_FROM:
        yield (
            f"whether the session that starts the query has the format {sink.name}; this one does not, and says: "
            f"{sink.format.missing.message}"
        )


def _shown(sink: Sink) -> str:
    return {"penstock": "a queue", "penstock table": "a table"}.get(sink.name, f"the sink {sink.name}")


def _takes(sink: Sink) -> tuple[str, ...]:
    if sink.format.files or sink.name == "penstock":
        return ("append",)
    if sink.name == "delta" or sink.format.python:
        return ("append", "complete")
    able = {"complete": sink.format.truncates, "update": sink.format.updates}
    return tuple(mode for mode in MODES if able.get(mode) is not False)


def _why(sink: Sink, mode: str) -> str:
    if mode == "complete" and sink.format.truncates is False:
        return ": it cannot be emptied"
    if mode == "update" and sink.format.updates is False:
        return ": it does not take new values of a row as a row more"
    return ""


def _continuous(sink: Sink) -> Iterator[Problem]:
    if sink.format.older:
        yield Problem(
            "PENSTOCK_SINK_NOT_CONTINUOUS",
            f"the sink {sink.name} cannot be written to under the continuous trigger",
            fix="a processing-time trigger",
        )
    elif sink.name == "foreach":
        yield Problem(
            "PENSTOCK_SINK_NOT_CONTINUOUS",
            "a Python function cannot be called under the continuous trigger: the query starts, and fails with its first rows",
            fix="a processing-time trigger",
        )
    elif sink.format.python or sink.name == "penstock table":
        yield Problem(
            "PENSTOCK_ROWS_LOST_CONTINUOUS",
            "Spark's continuous trigger never calls a Python sink's write(), and commits all the same: every row is lost, and "
            "the query looks healthy",
            UNSAFE,
            fix="a processing-time trigger",
        )


# ---- table_refusals: What a sink that is given as an object refuses itself, asked of the check that a pipeline's start makes.


def table_refusals(
    frame: DataFrame, sink: object, mode: str, *, continuous: bool = False
) -> Iterator[Problem]:
    """Why a pipeline of these rows into a ``ps.TableSink`` would not start in a mode."""
    ask = getattr(sink, "refusal", None)
    error = None if ask is None else ask(frame, mode, continuous=continuous)
    if error is not None:
        yield Problem(
            "PENSTOCK_TABLE_REFUSES",
            error.message,
            fix=_plain_keys(frame, getattr(sink, "keys", ())),
            condition=error.condition,
        )


def _plain_keys(frame: DataFrame, keys: tuple[str, ...]) -> str | None:
    """Fields of nested keys as columns of their own, such as the start of a window."""
    nested = {each.name: each.dataType for each in frame.schema if isinstance(each.dataType, StructType)}
    for key in keys:
        if key in nested:
            field = nested[key].names[0]
            return f"select('{key}.{field}', ...), with '{field}' among the keys in place of '{key}'"
    return None
