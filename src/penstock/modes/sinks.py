"""What sinks take, and which promises they keep (Spark 4.2, 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from penstock.errors import InvalidInput
from penstock.modes.emits import ADD, REPLACE_BY_KEY, Emits
from penstock.modes.report import MODES, UNSAFE, WARNING, Problem
from penstock.names import in_quotes

FILES = ("parquet", "json", "csv", "orc", "text", "avro", "xml")
_DEBUG = ("console", "memory", "noop")
_OLDER = (*FILES, "delta", "foreachbatch")
"""Sinks of Spark's older interface, which knows no continuous trigger."""
_SOURCES = {
    "delta": "the source of Delta Lake 4.0 (DeltaDataSource, DeltaSink), not tried here",
    "kafka": "the source of Spark 4.3 (KafkaTable, KafkaWriteBuilder), not tried here",
}
_FUNCTIONS = {"foreach": "foreach", "foreachbatch": "foreachBatch"}


@dataclass(frozen=True)
class Sink:
    """A sink and how Spark sees it."""

    name: str
    python: bool = False
    """Whether it is a Python data source."""
    truncates: bool | None = None
    """Whether it says that it can be emptied; None where it is not known."""


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
    if name in (*_DEBUG, *_OLDER, "foreach", "kafka", "penstock", "penstock table"):
        return Sink(name, python=name == "penstock")
    return _looked_up(frame, name)


def _looked_up(frame: DataFrame, name: str) -> Sink:
    """A format that only the session knows; of one that is not there the start of a query tells."""
    session: Any = frame.sparkSession
    if not hasattr(session, "_jsparkSession"):
        return Sink(name)
    state = session._jsparkSession.sessionState()
    try:
        if state.dataSourceManager().dataSourceExists(name):
            return Sink(name, python=True)
        jvm = session._jvm.org.apache.spark.sql
        provider = jvm.execution.datasources.DataSource.lookupDataSourceV2(name, state.conf())
        if provider.isEmpty():
            return Sink(name)
        nothing = jvm.util.CaseInsensitiveStringMap.empty()
        table = jvm.execution.datasources.v2.DataSourceV2Utils.getTableFromProvider(
            provider.get(), nothing, session._jvm.scala.Option.empty()
        )
        able = str(table.capabilities())
    except (Py4JError, PySparkException):
        return Sink(name)
    return Sink(name, truncates="TRUNCATE" in able)


def sink_problems(sink: Sink, mode: str, trigger: str, emits: Emits | None) -> Iterator[Problem]:
    """What a sink does not take, or does not keep."""
    source = _SOURCES.get(sink.name)
    if mode not in _takes(sink):
        yield Problem(
            "STREAMING_OUTPUT_MODE.UNSUPPORTED_DATASOURCE"
            if sink.name in (*FILES, "delta")
            else "PENSTOCK_SINK_MODE",
            f"{_shown(sink)} takes {' and '.join(_takes(sink))} mode, not {mode}",
            fix="ps.TableSink(name, keys=[...]), which takes every mode; or foreachBatch",
            condition="STREAMING_OUTPUT_MODE.UNSUPPORTED_DATASOURCE" if sink.name in FILES else None,
            source=source,
        )
    if trigger == "continuous":
        yield from _continuous(sink)
    elif sink.name in _FUNCTIONS:
        yield Problem(
            "PENSTOCK_SINK_REPEATS",
            f"{_FUNCTIONS[sink.name]} is called again with rows that it had, when a query restarts in the middle of a micro-batch",
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
        and sink.python
        and sink.name != "penstock"
        and mode in _takes(sink)
    ):
        yield Problem(
            "PENSTOCK_SINK_HAS_TO_REPLACE",
            f"in {mode} mode {sink.name} is asked for a writer with overwrite=True, and has to replace all that it has in one "
            "commit, which Spark cannot see to",
            WARNING,
        )


def _shown(sink: Sink) -> str:
    return {"penstock": "a queue", "penstock table": "a table"}.get(sink.name, f"the sink {sink.name}")


def _takes(sink: Sink) -> tuple[str, ...]:
    if sink.name in FILES or sink.name == "penstock":
        return ("append",)
    if sink.name == "delta" or sink.python:
        return ("append", "complete")
    if sink.truncates is False:
        return ("append", "update")
    return MODES


def _continuous(sink: Sink) -> Iterator[Problem]:
    if sink.name in _OLDER:
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
    elif sink.python or sink.name == "penstock table":
        yield Problem(
            "PENSTOCK_ROWS_LOST_CONTINUOUS",
            "Spark's continuous trigger never calls a Python sink's write(), and commits all the same: every row is lost, and "
            "the query looks healthy",
            UNSAFE,
            fix="a processing-time trigger",
        )
