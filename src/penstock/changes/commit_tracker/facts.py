"""What a task has seen of a feed's commits, as it tells its driver."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import PenstockError, error_class

_KEY = b"penstock"


@dataclass(frozen=True)
class Scope:
    """Where the commits were seen."""

    feed: str
    """The feed's name, the same over all runs of a query."""
    execution: str
    """Spark's number of the execution, for batch."""
    query: str | None = None
    run: str | None = None
    batch: int = 0
    delay_ms: int | None = None
    """How late a commit may come, in the watermark strategy."""


@dataclass(frozen=True)
class Facts:
    """Distinct pairs of a commit's version and its timestamp in microseconds."""

    scope: Scope
    commits: pa.Table

    def to_bytes(self) -> bytes:
        header = {_KEY: json.dumps(asdict(self.scope)).encode()}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.commits.schema.with_metadata(header)) as writer:
            writer.write_table(self.commits.replace_schema_metadata(header))
        return bytes(sink.getvalue().to_pybytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Facts:
        commits = pa.ipc.open_stream(data).read_all()
        return cls(Scope(**json.loads(commits.schema.metadata[_KEY])), commits.replace_schema_metadata(None))


def commits_in(version: pa.ChunkedArray, timestamp: pa.ChunkedArray) -> pa.Table:
    """The distinct pairs of version and timestamp (microseconds) among some rows."""
    times = timestamp.cast(pa.int64())
    pairs = pa.table({"version": version, "timestamp": times})
    return pairs.group_by(["version", "timestamp"], use_threads=False).aggregate([])


def refusal(error: PenstockError) -> bytes:
    """An error as the driver's answer."""
    told: dict[str, Any] = {
        "kind": type(error).__name__,
        "message": error.message,
        "condition": error.condition,
        "parameters": error.parameters,
    }
    return json.dumps(told, default=str).encode()


def raise_refusal(answer: bytes) -> None:
    """Raise the error in the driver's answer, if it is one."""
    if answer:
        told = json.loads(answer)
        kind = error_class(told["kind"]) or PenstockError
        raise kind(told["message"], condition=told["condition"], **told["parameters"])
