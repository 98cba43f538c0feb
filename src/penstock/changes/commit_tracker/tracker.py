"""The commit tracker in the driver: checks reported commits against other tasks and micro-batches."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.changes.commit_tracker.facts import Scope, SeenCommits, refusal
from penstock.changes.commit_tracker.history import Commits, LateCommits, WholeCommits
from penstock.changes.commit_tracker.journal import Journal
from penstock.changes.passes.rows import EVENT_TIME
from penstock.errors import InvalidChangeOption, PenstockError, condition_of
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.driver_endpoint import Address, DriverEndpoint
from penstock.spark.internals.plans import watermarks_above
from penstock.spark.internals.sessions import running_checkpoint, running_plan
from penstock.store.forks import Guard

log = logging.getLogger("penstock.changes")

_EXECUTIONS = 64
"""How many batch queries are remembered."""
_STREAMS = 1024
"""How many feeds of streaming queries are remembered; the journal still has the others."""

_guard = Guard()
_running: dict[str, DriverEndpoint] = {}


def commit_tracker_address(spark: SparkSession) -> Address:
    """Return the address of the driver's commit tracker for a session's tasks; the first call starts it."""
    application = spark.sparkContext.applicationId
    with _guard:
        if application not in _running:
            for endpoint in _running.values():
                endpoint.close()
            _running.clear()
            _running[application] = DriverEndpoint(spark, CommitTracker(spark).answer)
        return _running[application].address


class CommitTracker:
    """The commits that tasks have reported for the feeds of one session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._guard = threading.Lock()
        self._executions: OrderedDict[tuple[str, str], Commits] = OrderedDict()
        self._feeds: OrderedDict[tuple[str, str], FeedMemory] = OrderedDict()

    def answer(self, question: bytes) -> bytes:
        """Add reported commits; return nothing, or the error for the task to raise."""
        seen = SeenCommits.from_bytes(question)
        try:
            if seen.scope.query is None:
                with self._guard:
                    self._execution(seen.scope).add_commits(seen.commits)
            else:
                self._feed(seen.scope).add(seen)
        except PenstockError as error:
            return refusal(error)
        return b""

    def _execution(self, scope: Scope) -> Commits:
        key = (scope.feed, scope.execution)
        commits = self._executions.setdefault(key, Commits())
        self._executions.move_to_end(key)
        if len(self._executions) > _EXECUTIONS:
            self._executions.popitem(last=False)
        return commits

    def _feed(self, scope: Scope) -> FeedMemory:
        assert scope.query is not None
        with self._guard:
            key = (scope.query, scope.feed)
            if key not in self._feeds or self._feeds[key].run != scope.run:
                if scope.delay_ms is not None:
                    refuse_watermarks(_plan(self._spark, scope.query))
                # A run may repeat an earlier micro-batch, so each begins with the journal.
                self._feeds[key] = FeedMemory(scope, journal_of(self._spark, scope.query, scope.feed))
            self._feeds.move_to_end(key)
            if len(self._feeds) > _STREAMS:
                self._feeds.popitem(last=False)
            return self._feeds[key]


class FeedMemory:
    """The commits of one feed in one run of a streaming query."""

    def __init__(self, scope: Scope, journal: Journal | None) -> None:
        self.run = scope.run
        self._guard = threading.Lock()
        self._journal = journal
        self._in_flight: dict[Any, int] = {}
        self._commits = WholeCommits() if scope.delay_ms is None else LateCommits(scope.delay_ms)
        for batch, commits in journal.read() if journal else ():
            if batch <= scope.batch:
                self._begin_batch(batch)
                self._remember(commits)

    def add(self, seen: SeenCommits) -> None:
        """Add the commits that a task has seen; they are in the journal when this returns."""
        batch = seen.scope.batch
        with self._guard:
            if batch < self._commits.batch:
                # A task of an earlier micro-batch, whose result is no longer needed.
                return
            if batch > self._commits.batch:
                self._begin_batch(batch)
                if self._journal is not None:
                    self._journal.compact(batch)
            self._commits.add_commits(seen.commits)
            self._keep(seen.commits)

    def _begin_batch(self, batch: int) -> None:
        self._commits.begin_batch(batch)
        self._in_flight = {}

    def _remember(self, commits: pa.Table) -> None:
        self._commits.times.update(_pairs(commits))
        self._in_flight.update(_pairs(commits))

    def _keep(self, commits: pa.Table) -> None:
        known = len(self._in_flight)
        self._in_flight.update(_pairs(commits))
        if self._journal is not None and len(self._in_flight) > known:
            versions = pa.array(self._in_flight.keys(), commits.schema.field(0).type)
            times = pa.array(self._in_flight.values(), pa.int64())
            self._journal.write(
                self._commits.batch, pa.table([versions, times], names=["version", "timestamp"])
            )


def _pairs(commits: pa.Table) -> zip[tuple[Any, int]]:
    return zip(*(column.to_pylist() for column in commits.columns), strict=True)


def refuse_watermarks(plan: Any) -> None:
    """Refuse a plan with a second watermark after that of the commits: each would wait for the other.

    A query has one watermark, the least of all, and that of an operator begins with its first row (Spark 4.2,
    4.3).
    """
    second = [] if plan is None else watermarks_above(plan, EVENT_TIME)
    if second:
        raise InvalidChangeOption(
            f"withWatermark on {second[-1]!r} follows the watermark strategy, and a query has one watermark: "
            "neither would advance. Use keep_watermark=True and windows of _commit_timestamp, or "
            "whole_commits=True if the source keeps commits together; or split the query with a queue",
            condition="INVALID_CDC_OPTION.SECOND_WATERMARK",
            column=second[-1],
        )


def _plan(spark: SparkSession, query_id: str) -> Any:
    """Return the JVM's logical plan of a running query; None if it has ended."""
    try:
        return running_plan(spark, query_id)
    except Exception as error:
        log.warning(
            "the plan of query %s cannot be inspected: %s",
            query_id,
            type(error).__name__,
            extra={"action": "plan_unseen", "query_id": query_id, "error": condition_of(error)},
        )
        return None


def journal_of(spark: SparkSession, query_id: str, feed: str) -> Journal | None:
    """Return the journal in a query's checkpoint; None, with a warning, if Python cannot access it."""
    try:
        return Journal(Checkpoint(running_checkpoint(spark, query_id)), feed)
    except Exception as error:
        log.warning(
            "the checkpoint of query %s cannot be accessed from Python (%s): repeated commits are detected "
            "only while this driver runs",
            query_id,
            type(error).__name__,
            extra={
                "action": "commit_tracker_without_journal",
                "query_id": query_id,
                "error": condition_of(error),
            },
        )
        return None
