"""A micro-batch as its sink sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.commit.offsets import QueueOffset
from penstock.store.catalog import QueueRecord
from penstock.store.ledger import LedgerKey


@dataclass(frozen=True)
class BatchCommit:
    """A micro-batch whose tasks are done."""

    sink: QueueRecord
    app_id: str
    batch_id: int
    rows: int
    origin: str = ""
    """The checkpoint's own id: an app id that was given may meet another checkpoint, whose batch ids begin anew."""
    sources: Sequence[QueueOffset] = ()
    """What it covers of each source of ours."""
    others: Sequence[Any] = ()
    """The offsets of sources that are not ours, whatever they look like."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """The number of segments that each acknowledged attempt staged."""
    tasks: Mapping[int, int] | None = None
    """The rows of each task, where the tasks have appended for themselves; None where they staged."""
    stateful: bool = False
    """Whether the query keeps state, so that another checkpoint could not carry it on."""
    rebind: bool = False
    """Whether a stateful query may take a consumer over from another checkpoint all the same."""

    @property
    def key(self) -> LedgerKey:
        return LedgerKey(sink_name(self.sink), self.app_id, self.batch_id)

    def ranges(self) -> str:
        """What the ledger remembers of the input."""
        lines = sorted([*source.identity, list(source.start), list(source.end)] for source in self.sources)
        return json.dumps([self.origin, lines, *([_digest(self.others)] if self.others else [])])


def _digest(others: Sequence[Any]) -> str:
    """Only whether they are the same matters, and some sources write pages of them."""
    texts = sorted(json.dumps(other, sort_keys=True) for other in others)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def sink_name(sink: QueueRecord) -> str:
    """The sink in the ledger; a queue that is made anew is another sink."""
    return f"queue:{sink.name}:{sink.generation}"
