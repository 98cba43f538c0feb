"""Queries with a limit, of either trigger: what is passed to a child process, and the expected result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa

import penstock

SCHEMA = pa.schema([("id", pa.int64())])
CONTINUOUS, MICRO_BATCHES = "continuous", "micro-batches"
STRIDE = 1_000_000
"""Row i of partition p has the id p * STRIDE + i."""


@dataclass
class Plan:
    """A query, its queues and its consumer, which all have its name."""

    name: str
    url: str
    folder: str
    trigger: str
    partitions: int
    limit: int
    size: int
    """Rows of a micro-batch."""
    filtered: bool
    there: list[int] = field(default_factory=list)
    """How many rows each partition has."""

    def create(self) -> None:
        """What it reads from and writes to."""
        with penstock.connect(self.url, create=True) as store:
            store.create_queue(f"{self.name} in", SCHEMA, partitions=self.partitions)
            store.create_queue(self.name, SCHEMA, partitions=2)
            store.create_consumer(self.name).register(f"{self.name} in")
        self.there = [0] * self.partitions

    def append(self, rows: int) -> None:
        """So many to each partition, and one more to each than to the one before it."""
        with penstock.connect(self.url) as store:
            queue = store.queue(f"{self.name} in")
            for partition, count in enumerate(self.there):
                first, more = partition * STRIDE + count, rows + partition
                if more:
                    queue.append([{"id": first + i} for i in range(more)], partition=partition)
                    self.there[partition] += more

    @property
    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / self.name

    def passing(self) -> list[list[int]]:
        """The rows of each partition that may come out, in their order."""
        return [
            [number for number in range(p * STRIDE, p * STRIDE + count) if not self.filtered or number % 3]
            for p, count in enumerate(self.there)
        ]

    def enough(self) -> bool:
        """Whether there are as many rows as the limit."""
        return sum(map(len, self.passing())) >= self.limit

    def found(self) -> list[int]:
        """What has come out."""
        with penstock.connect(self.url) as store:
            sink = store.queue(self.name)
            return [row for part in range(sink.partitions) for row in sink.read(part, 0)["id"].to_pylist()]

    def check(self) -> None:
        """Just the limit's rows, each once, of each partition the first ones; the checkpoint says so."""
        found = self.found()
        assert len(found) == self.limit, (self, sorted(found))
        for passing in self.passing():
            of_it = sorted(set(found).intersection(passing))
            assert of_it == passing[: len(of_it)], self
        assert len(set(found)) == len(found), self
        assert str(penstock.limits.limit_progress(self.checkpoint)) == f"{self.limit} of {self.limit}", self

    def check_partial(self) -> None:
        """Nothing twice, and no more than the limit."""
        found = self.found()
        assert len(set(found)) == len(found) <= self.limit, self
