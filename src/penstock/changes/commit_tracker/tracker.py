"""The driver remembers which commits a feed has had, so that tasks learn what other tasks and micro-batches have seen."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.changes.commit_tracker.facts import Facts, Scope, refusal
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
"""Batch queries that are remembered at a time."""
_STREAMS = 1024
"""Feeds of streaming queries that are; what is forgotten is still on disk."""

_guard = Guard()
_running: dict[str, tuple[Witness, DriverEndpoint]] = {}


def address_of_witness(spark: SparkSession) -> Address:
    """Where the tasks of a session find their driver's witness; it is started at the first call."""
    application = spark.sparkContext.applicationId
    with _guard:
        if application not in _running:
            for _, endpoint in _running.values():
                endpoint.close()
            _running.clear()
            witness = Witness(spark)
            _running[application] = witness, DriverEndpoint(spark, witness.answer)
        return _running[application][1].address


class Witness:
    """What tasks have told of the feeds of one session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._guard = threading.Lock()
        self._executions: OrderedDict[tuple[str, str], Commits] = OrderedDict()
        self._feeds: OrderedDict[tuple[str, str], FeedMemory] = OrderedDict()

    def answer(self, question: bytes) -> bytes:
        """Nothing when the facts may be, or the error to raise."""
        facts = Facts.from_bytes(question)
        try:
            if facts.scope.query is None:
                with self._guard:
                    self._execution(facts.scope).note(facts.commits)
            else:
                self._feed(facts.scope).note(facts)
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
                # A run may go back to an earlier micro-batch, so each begins with what is on disk.
                self._feeds[key] = FeedMemory(scope, journal_of(self._spark, scope.query, scope.feed))
            self._feeds.move_to_end(key)
            if len(self._feeds) > _STREAMS:
                self._feeds.popitem(last=False)
            return self._feeds[key]


class FeedMemory:
    """What is known of one feed in one run of a streaming query."""

    def __init__(self, scope: Scope, journal: Journal | None) -> None:
        self.run = scope.run
        self._guard = threading.Lock()
        self._journal = journal
        self._in_hand: dict[Any, int] = {}
        self._commits = WholeCommits() if scope.delay_ms is None else LateCommits(scope.delay_ms)
        for batch, commits in journal.read() if journal else ():
            if batch <= scope.batch:
                self._turn_to(batch)
                self._remember(commits)

    def note(self, facts: Facts) -> None:
        """Take note of what a task of a micro-batch has seen; it is on disk when this returns."""
        batch = facts.scope.batch
        with self._guard:
            if batch < self._commits.batch:
                # A task that nobody waits for any more.
                return
            if batch > self._commits.batch:
                self._turn_to(batch)
                if self._journal is not None:
                    self._journal.compact(batch)
            self._commits.note(facts.commits)
            self._keep(facts.commits)

    def _turn_to(self, batch: int) -> None:
        self._commits.turn_to(batch)
        self._in_hand = {}

    def _remember(self, commits: pa.Table) -> None:
        self._commits.times.update(_pairs(commits))
        self._in_hand.update(_pairs(commits))

    def _keep(self, commits: pa.Table) -> None:
        known = len(self._in_hand)
        self._in_hand.update(_pairs(commits))
        if self._journal is not None and len(self._in_hand) > known:
            versions = pa.array(self._in_hand.keys(), commits.schema.field(0).type)
            times = pa.array(self._in_hand.values(), pa.int64())
            self._journal.write(
                self._commits.batch, pa.table([versions, times], names=["version", "timestamp"])
            )


def _pairs(commits: pa.Table) -> zip[tuple[Any, int]]:
    return zip(*(column.to_pylist() for column in commits.columns), strict=True)


def refuse_watermarks(plan: Any) -> None:
    """Refuse a plan with a watermark behind that of the commits, which would wait for rows while these wait for it.

    All watermarks of a query are one, the least of them, and that of an operator begins with its first row (Spark 4.2, 4.3).

    Raises
    ------
    InvalidChangeOption
        SECOND_WATERMARK.
    """
    behind = [] if plan is None else watermarks_above(plan, EVENT_TIME)
    if behind:
        raise InvalidChangeOption(
            f"withWatermark on {behind[-1]!r} stands behind the watermark strategy, and a query has one watermark: neither would "
            "move. Use keep_watermark=True and windows of _commit_timestamp; or whole_commits=True, where the source keeps commits "
            "together; or write the changes to a queue, and the rest as a query of its own",
            condition="INVALID_CDC_OPTION.SECOND_WATERMARK",
            column=behind[-1],
        )


def _plan(spark: SparkSession, query_id: str) -> Any:
    """The JVM's logical plan of a running query; None where it has gone already."""
    try:
        return running_plan(spark, query_id)
    except Exception as error:
        log.warning(
            "the plan of query %s cannot be seen: %s",
            query_id,
            type(error).__name__,
            extra={"action": "plan_unseen", "query_id": query_id, "error": condition_of(error)},
        )
        return None


def journal_of(spark: SparkSession, query_id: str, feed: str) -> Journal | None:
    """The journal in the checkpoint of a running query; None, with a warning, where Python does not reach it."""
    try:
        return Journal(Checkpoint(running_checkpoint(spark, query_id)), feed)
    except Exception as error:
        log.warning(
            "the checkpoint of query %s cannot be reached from Python (%s): commits that turn up again are found out only "
            "while this driver lives",
            query_id,
            type(error).__name__,
            extra={
                "action": "witness_without_journal",
                "query_id": query_id,
                "error": condition_of(error),
            },
        )
        return None
