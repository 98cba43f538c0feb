"""Spark's streaming listeners, told of a query that Spark does not run as a stream."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pyspark.sql import SparkSession


class Listeners:
    """The ``StreamingQueryListener``s of a session, Spark's own page and its event log among them (Spark 4.2 and 4.3).

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
