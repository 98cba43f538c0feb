"""Streaming listeners (Spark 4.2, 4.3): events of continuous queries are posted to them, and events are
received without PySpark's conversion.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Protocol, cast

from py4j.java_gateway import JavaObject, JavaPackage, JVMView
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from penstock.json_text import Json
from penstock.spark.internals.sessions import jvm_of


class ListenerBus:
    """Posts the events of one query to a classic session's listeners, including Spark's UI and event log.

    The events take the same path as those of Spark's own queries. Spark logs an error that a listener raises.
    """

    def __init__(self, spark: SparkSession, query_id: str, run_id: str) -> None:
        self._jvm = jvm_of(spark)
        self._manager = spark._jsparkSession.streams()
        self._ids = query_id, run_id

    def started(self, name: str | None, timestamp: str) -> None:
        """Post ``QueryStartedEvent``, and return when the listeners have handled it."""
        self._post("QueryStartedEvent", *self._uuids, name, timestamp)

    def progressed(self, progress: str) -> None:
        """Post ``QueryProgressEvent`` with the JSON of a ``StreamingQueryProgress``."""
        self._post("QueryProgressEvent", self._progress_class.fromJson(progress))

    def terminated(self, exception: str | None, condition: str | None) -> None:
        """Post ``QueryTerminatedEvent`` with the error that ended the query, if any, and its condition."""
        option = self._jvm.scala.Option.apply
        self._post("QueryTerminatedEvent", *self._uuids, option(exception), option(condition))

    @property
    def _uuids(self) -> list[JavaObject]:
        return [self._jvm.java.util.UUID.fromString(text) for text in self._ids]

    def _post(self, kind: str, *arguments: JavaObject | str | None) -> None:
        event = getattr(self._package, f"StreamingQueryListener${kind}")
        self._manager.postListenerEvent(event(*arguments))

    # Cached, because each part of a class name is a call to the JVM.
    @cached_property
    def _package(self) -> JavaPackage:
        return self._jvm.org.apache.spark.sql.streaming

    @cached_property
    def _progress_class(self) -> JavaObject:
        return getattr(getattr(self._package, "StreamingQueryProgress$"), "MODULE$")


class QueryListener(Protocol):
    """A receiver of events of a session's queries, called in Spark's threads."""

    def started(self, query_id: str, run_id: str, name: str | None) -> None: ...

    def progressed(self, progress: Json) -> None: ...

    def terminated(self, run_id: str, exception: str | None, condition: str | None) -> None: ...


def add_listener(spark: SparkSession, listener: QueryListener) -> None:
    """Send the events of a session's queries to a listener from now on, also over Spark Connect."""
    spark.streams.addListener(_PythonListener(listener))


class _PythonListener(StreamingQueryListener):
    """Adapter that Spark Connect calls."""

    def __init__(self, listener: QueryListener) -> None:
        self._listener = listener

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._listener.started(str(event.id), str(event.runId), event.name)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self._listener.progressed(json.loads(event.progress.json))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Ignore the event."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._listener.terminated(str(event.runId), event.exception, event.errorClassOnException)

    @property
    def _jlistener(self) -> JavaObject:
        """Return a classic session's listener; it converts no events, as that calls the JVM per value."""
        if not hasattr(self, "_jlistenerobj"):
            jvm = cast(JVMView, SparkContext._jvm)
            self._jlistenerobj = jvm.PythonStreamingQueryListenerWrapper(_JvmListener(self._listener))
        return self._jlistenerobj


class _JvmListener:
    """Adapter that the JVM of a classic session calls."""

    def __init__(self, listener: QueryListener) -> None:
        self._listener = listener

    def onQueryStarted(self, event: JavaObject) -> None:
        self._listener.started(event.id().toString(), event.runId().toString(), event.name())

    def onQueryProgress(self, event: JavaObject) -> None:
        self._listener.progressed(json.loads(event.progress().json()))

    def onQueryIdle(self, event: JavaObject) -> None:
        """Ignore the event."""

    def onQueryTerminated(self, event: JavaObject) -> None:
        exception, condition = event.exception(), event.errorClassOnException()
        self._listener.terminated(
            event.runId().toString(),
            exception.get() if exception.isDefined() else None,
            condition.get() if condition.isDefined() else None,
        )

    class Java:
        """The interface that py4j implements."""

        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)
