"""What a task reports to its driver: the commits that it has seen; and the driver's answer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pyarrow as pa
from pyspark import TaskContext

from penstock.errors import PenstockError, error_class
from penstock.spark.driver_endpoint import Address

_KEY = b"penstock"


@dataclass(frozen=True)
class Scope:
    """Where commits were seen."""

    feed: str
    """The feed's name, the same in all runs of a query."""
    execution: str
    """Spark's execution id, for batch queries."""
    query: str | None = None
    run: str | None = None
    batch: int = 0
    delay_ms: int | None = None
    """How late a commit may be, in the watermark strategy."""


@dataclass(frozen=True)
class SeenCommits:
    """Commits seen in a scope: distinct pairs of a version and a timestamp in microseconds."""

    scope: Scope
    commits: pa.Table

    def to_bytes(self) -> bytes:
        header = {_KEY: json.dumps(asdict(self.scope)).encode()}
        return bytes(ipc_stream(self.commits.replace_schema_metadata(header)))

    @classmethod
    def from_bytes(cls, data: bytes) -> SeenCommits:
        commits = pa.ipc.open_stream(data).read_all()
        return cls(Scope(**json.loads(commits.schema.metadata[_KEY])), commits.replace_schema_metadata(None))


def ipc_stream(table: pa.Table) -> pa.Buffer:
    """Return a table as a stream of Arrow messages."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@dataclass(frozen=True)
class CommitReporter:
    """Reports the commits that a task has seen to the commit tracker in the driver."""

    address: Address
    feed: str
    delay_ms: int | None = None
    streaming: bool = True
    """False for a batch inside a stream's foreachBatch, which has the properties of the stream."""

    def report(self, commits: pa.Table) -> None:
        """Report commits; raises the error with which the driver refuses them."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") if self.streaming else None
        scope = Scope(
            feed=self.feed,
            execution=context.getLocalProperty("spark.sql.execution.id") or "",
            query=query,
            run=context.getLocalProperty("spark.jobGroup.id") if query else None,
            batch=int(context.getLocalProperty("streaming.sql.batchId") or 0) if query else 0,
            delay_ms=self.delay_ms,
        )
        raise_refusal(self.address.ask(SeenCommits(scope, commits).to_bytes()))


def commits_in(version: pa.ChunkedArray, timestamp: pa.ChunkedArray) -> pa.Table:
    """Return the distinct pairs of version and timestamp (microseconds) of some rows."""
    times = timestamp.cast(pa.int64())
    pairs = pa.table({"version": version, "timestamp": times})
    return pairs.group_by(["version", "timestamp"], use_threads=False).aggregate([])


def refusal(error: PenstockError) -> bytes:
    """Return an error as the driver's answer."""
    answer = {
        "kind": type(error).__name__,
        "message": error.message,
        "condition": error.condition,
        "parameters": error.parameters,
    }
    return json.dumps(answer, default=str).encode()


def raise_refusal(answer: bytes) -> None:
    """Raise the error in the driver's answer; an empty answer has none."""
    if answer:
        error = json.loads(answer)
        kind = error_class(error["kind"]) or PenstockError
        raise kind(error["message"], condition=error["condition"], **error["parameters"])
