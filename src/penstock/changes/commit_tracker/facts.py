"""Messages between a task and its driver: the commits that the task has seen, and the driver's refusal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import PenstockError, error_class

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
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.commits.schema.with_metadata(header)) as writer:
            writer.write_table(self.commits.replace_schema_metadata(header))
        return bytes(sink.getvalue().to_pybytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> SeenCommits:
        commits = pa.ipc.open_stream(data).read_all()
        return cls(Scope(**json.loads(commits.schema.metadata[_KEY])), commits.replace_schema_metadata(None))


def commits_in(version: pa.ChunkedArray, timestamp: pa.ChunkedArray) -> pa.Table:
    """Return the distinct pairs of version and timestamp (microseconds) of some rows."""
    times = timestamp.cast(pa.int64())
    pairs = pa.table({"version": version, "timestamp": times})
    return pairs.group_by(["version", "timestamp"], use_threads=False).aggregate([])


def refusal(error: PenstockError) -> bytes:
    """Return an error as the driver's answer."""
    answer: dict[str, Any] = {
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
