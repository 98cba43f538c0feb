"""Streaming listeners: told of queries that Spark does not run as a stream, and heard without Spark's own conversion (Spark 4.2, 4.3)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener


class ListenerBus:
    """The ``StreamingQueryListener``s of a session, Spark's own page and its event log among them.

    What it posts takes the way of the events of Spark's own queries; an error of a listener stays with Spark, which logs it.

    Parameters
    ----------
    spark
        A classic session.
    query_id, run_id
        UUIDs as text.
    """

    def __init__(self, spark: SparkSession, query_id: str, run_id: str) -> None:
        self._jvm: Any = spark._jvm
        self._manager = spark._jsparkSession.streams()
        self._ids = query_id, run_id

    def started(self, name: str | None, timestamp: str) -> None:
        """Post ``QueryStartedEvent``; the listeners have heard it when this returns.

        Parameters
        ----------
        timestamp
            When, such as 2026-11-22T17:15:00.000Z.
        """
        self._post("QueryStartedEvent", *self._uuids, name, timestamp)

    def progressed(self, progress: str) -> None:
        """Post ``QueryProgressEvent``.

        Parameters
        ----------
        progress
            As Spark's ``StreamingQueryProgress`` has it in JSON.
        """
        self._post("QueryProgressEvent", self._form.fromJson(progress))

    def terminated(self, exception: str | None, condition: str | None) -> None:
        """Post ``QueryTerminatedEvent``.

        Parameters
        ----------
        exception
            What ended it; None when it was stopped.
        condition
            The name of the error's condition, where it has one.
        """
        option = self._jvm.scala.Option.apply
        self._post("QueryTerminatedEvent", *self._uuids, option(exception), option(condition))

    @property
    def _uuids(self) -> list[Any]:
        return [self._jvm.java.util.UUID.fromString(text) for text in self._ids]

    def _post(self, kind: str, *what: Any) -> None:
        event = getattr(self._package, f"StreamingQueryListener${kind}")
        self._manager.postListenerEvent(event(*what))

    # Each step to a class is a call to the JVM: they are gone once.
    @cached_property
    def _package(self) -> Any:
        return self._jvm.org.apache.spark.sql.streaming

    @cached_property
    def _form(self) -> Any:
        return getattr(getattr(self._package, "StreamingQueryProgress$"), "MODULE$")


class QueryListener(Protocol):
    """What wants to hear of a session's queries, in threads of Spark's."""

    def started(self, query_id: str, run_id: str, name: str | None) -> None: ...

    def progressed(self, told: Mapping[str, Any]) -> None: ...

    def terminated(self, run_id: str, exception: str | None, condition: str | None) -> None: ...


def add_listener(spark: SparkSession, hears: QueryListener) -> None:
    """Tell something of the queries of a session from now on.

    Parameters
    ----------
    spark
        A session, classic or Spark Connect.
    """
    spark.streams.addListener(_Listener(hears))


class _Listener(StreamingQueryListener):
    def __init__(self, hears: QueryListener) -> None:
        self._hears = hears

    def onQueryStarted(self, event: Any) -> None:
        """A query has started."""
        self._hears.started(str(event.id), str(event.runId), event.name)

    def onQueryProgress(self, event: Any) -> None:
        """A query has come further."""
        self._hears.progressed(json.loads(event.progress.json))

    def onQueryIdle(self, event: Any) -> None:
        """A query has nothing to do; its process tells that it is there."""

    def onQueryTerminated(self, event: Any) -> None:
        """A query has ended."""
        self._hears.terminated(str(event.runId), event.exception, event.errorClassOnException)

    @property
    def _jlistener(self) -> Any:
        """For a classic session: the listener without PySpark's conversion, which calls the JVM once for each value of an event."""
        if not hasattr(self, "_jlistenerobj"):
            jvm: Any = SparkContext._jvm
            self._jlistenerobj = jvm.PythonStreamingQueryListenerWrapper(_InJvm(self._hears))
        return self._jlistenerobj


class _InJvm:
    """What the JVM calls."""

    def __init__(self, hears: QueryListener) -> None:
        self._hears = hears

    def onQueryStarted(self, event: Any) -> None:
        """A query has started."""
        self._hears.started(event.id().toString(), event.runId().toString(), event.name())

    def onQueryProgress(self, event: Any) -> None:
        """A query has come further."""
        self._hears.progressed(json.loads(event.progress().json()))

    def onQueryIdle(self, event: Any) -> None:
        """A query has nothing to do."""

    def onQueryTerminated(self, event: Any) -> None:
        """A query has ended."""
        found, condition = event.exception(), event.errorClassOnException()
        self._hears.terminated(
            event.runId().toString(),
            found.get() if found.isDefined() else None,
            condition.get() if condition.isDefined() else None,
        )

    class Java:
        """For py4j."""

        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)
