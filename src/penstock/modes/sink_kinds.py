"""What a sink is, and what the session knows of it (Spark 4.2, 4.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from penstock.errors import InvalidInput
from penstock.modes.verdict import Refusal, told_by
from penstock.names import in_quotes
from penstock.spark.data_sources import is_classic

FILES = ("parquet", "json", "csv", "orc", "text", "xml")
DEBUG = ("console", "memory", "noop")
FUNCTIONS = {"foreach": "foreach", "foreachbatch": "foreachBatch"}
_OLDER = (*FILES, "delta", "foreachbatch")
_KNOWN = (*DEBUG, *_OLDER, "foreach", "kafka", "penstock", "penstock table")
READ_IN_SOURCE = ("delta", "kafka")
"""Formats of packages that are known from their source, also where a session does not have them."""
_READ_ONLY = "binaryfile"
"""A format of files that says only when it has rows that it writes none."""
_TRUNCATES = "org.apache.spark.sql.connector.write.SupportsTruncate"
_UPDATES = "org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend"


@dataclass(frozen=True)
class Sink:
    """A sink and how Spark sees it."""

    name: str
    python: bool = False
    """Whether it is a Python data source."""
    older: bool = False
    """Whether it is of Spark's older interface, which knows no continuous trigger."""
    files: bool = False
    """Whether it adds files to a folder."""
    streams: bool = True
    """False of a format that takes no stream at all."""
    truncates: bool | None = None
    """Whether it can be emptied, as complete mode needs; None where it is not known."""
    updates: bool | None = None
    """Whether it takes new values of a row as a row more, as update mode needs; None where it is not known."""
    missing: Refusal | None = None
    """What Spark says of a format that the session does not have."""
    silent: str | None = None
    """What Spark said instead of an answer, when it was asked what the format takes."""
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
        return _looked_up(frame, given)
    itself = None if isinstance(sink, str) else sink
    known = Sink(name, python=name == "penstock", older=name in _OLDER, files=name in FILES, given=itself)
    return replace(known, missing=_looked_up(frame, name).missing) if name in READ_IN_SOURCE else known


def _looked_up(frame: DataFrame, name: str) -> Sink:
    """A format that only the session knows."""
    session: Any = frame.sparkSession
    if not is_classic(session):
        return Sink(name)
    state = session._jsparkSession.sessionState()
    sources = session._jvm.org.apache.spark.sql.execution.datasources.DataSource
    try:
        if state.dataSourceManager().dataSourceExists(name):
            return Sink(name, python=True)
        provider = sources.lookupDataSourceV2(name, state.conf())
        older = sources.lookupDataSource(name, state.conf()) if provider.isEmpty() else None
    except (Py4JError, PySparkException) as error:
        # A query's start looks it up in the same way.
        return Sink(name, missing=told_by(error))
    try:
        able = None if older is not None else abilities(frame, provider.get())
        if able is None:
            return _of_the_older_kind(session, name, older or sources.lookupDataSource(name, state.conf()))
    except (Py4JError, PySparkException) as error:
        # Its start has the query's options, which a check is not given.
        return Sink(name, silent=told_by(error).message)
    return Sink(name, truncates=able[0], updates=able[1])


def abilities(frame: Any, provider: Any) -> tuple[bool, bool] | None:
    """Whether a format's writer can empty the sink, and takes new values of a row as a row more; None where it takes no stream.

    A query's start asks the same of the same writer (``StreamExecution.createWrite``); it is made without the query's options.
    """
    session = frame.sparkSession
    jvm = session._jvm
    sql, empty = jvm.org.apache.spark.sql, jvm.java.util.Optional.empty()
    schema, options = frame._jdf.schema(), sql.util.CaseInsensitiveStringMap.empty()
    tables = sql.execution.datasources.v2.DataSourceV2Utils
    try:
        table = tables.getTableFromProvider(provider, options, jvm.scala.Some(schema))
    except (Py4JError, PySparkException):
        # It takes no schema from outside.
        table = tables.getTableFromProvider(provider, options, jvm.scala.Option.empty())
    if sql.connector.catalog.TableCapability.STREAMING_WRITE not in table.capabilities():
        return None
    info = sql.connector.write.LogicalWriteInfoImpl("", schema, options, empty, empty)
    builder, gateway = table.newWriteBuilder(info), session.sparkContext._gateway
    return is_instance_of(gateway, builder, _TRUNCATES), is_instance_of(gateway, builder, _UPDATES)


def _of_the_older_kind(session: Any, name: str, found: Any) -> Sink:
    if name.lower() == _READ_ONLY:
        return Sink(name, older=True, streams=False)

    def is_a(kind: str) -> bool:
        parent = session._jvm.java.lang.Class.forName(f"org.apache.spark.sql.{kind}")
        return bool(parent.isAssignableFrom(found))

    if is_a("execution.datasources.FileFormat"):
        return Sink(name, older=True, files=True)
    return Sink(name, older=True, streams=is_a("sources.StreamSinkProvider"))
