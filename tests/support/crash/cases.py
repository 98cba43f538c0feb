"""A case: one query on one store with one guarantee, as the parent and its children know it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.crash.queries import KINDS, PARTITIONS, SOURCE, QueryKind, Row, chunk

if TYPE_CHECKING:
    from penstock import Pipeline, Store, Stream


@dataclass(frozen=True)
class Case:
    """Its name is its consumer's and its sink's too."""

    name: str
    url: str
    kind: str
    guarantee: str
    folder: str
    sink_url: str | None = None
    checkpoint_name: str = "checkpoint"
    options: Mapping[str, str] = field(default_factory=dict)
    sink_options: Mapping[str, str] = field(default_factory=dict)
    payloads: str | None = None
    """Where the rows of its queues are, if not in the database."""

    @property
    def query(self) -> QueryKind:
        return KINDS[self.kind]

    @property
    def checkpoint(self) -> str:
        return str(Path(self.folder, self.checkpoint_name, self.name))

    @property
    def marker(self) -> str:
        return str(Path(self.folder, "markers", self.name))

    @property
    def sources(self) -> list[str]:
        return [f"{self.name}.{number}" for number in range(self.query.sources)]

    @property
    def target(self) -> str:
        return self.sink_url or self.url

    def write(self, stream: Stream) -> Pipeline:
        """The query's transformed stream into its sink."""
        import penstock

        sink = penstock.QueueSink(self.name, url=self.target, options=dict(self.sink_options))
        return stream.write(sink, guarantee=self.guarantee)

    def to_json(self) -> str:
        return json.dumps({**asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))

    def stores(self) -> tuple[Store, Store]:
        import penstock

        return penstock.connect(self.url), penstock.connect(self.target)

    def create(self) -> None:
        """Its queues and its vital consumer."""
        source, sink = self.stores()
        consumer = source.create_consumer(self.name)
        for queue in self.sources:
            source.create_queue(queue, SOURCE, partitions=PARTITIONS, payloads=self.payloads)
            consumer.register(queue, vital=True)
        sink.create_queue(self.name, self.query.output, partitions=PARTITIONS, payloads=self.payloads)
        Path(self.marker).parent.mkdir(exist_ok=True, parents=True)
        self._close(source, sink)

    def append(self, number: int) -> None:
        """One chunk into each source, over both partitions."""
        source, sink = self.stores()
        for place, queue in enumerate(self.sources):
            rows = chunk(number, place)
            half = len(rows) // 3
            source.queue(queue).append(rows[:half], partition=0)
            source.queue(queue).append(rows[half:], partition=1)
        self._close(source, sink)

    def rows(self) -> Counter[Row]:
        """What is in the sink."""
        source, sink = self.stores()
        queue = sink.queue(self.name)
        tables = [queue.read(partition, 0) for partition in range(queue.partitions)]
        self._close(source, sink)
        return Counter(tuple(row.values()) for table in tables for row in table.to_pylist())

    def beyond(self, chunks: int) -> Counter[Row]:
        """Return the wrong rows in the sink, and the repeats where the guarantee forbids them."""
        expected, found = self.query.expected(chunks), self.rows()
        if self.guarantee == "at_least_once":
            return Counter({row: count for row, count in found.items() if row not in expected})
        return found - expected

    def positions(self) -> list[tuple[int, int, int]]:
        """(offset, safe offset, newest row) of every partition of every source."""
        source, sink = self.stores()
        found = []
        for queue in self.sources:
            keys = source.consumer(self.name).registration(queue).keys
            ends = [part.next_index for part in source.queue(queue).info().partitions]
            rows = source.database.run(lambda tx, keys=keys: tx.all("read_positions", **keys), write=False)
            found += [(row.next_index, row.safe_index, end) for row, end in zip(rows, ends, strict=True)]
        self._close(source, sink)
        return found

    def logged(self) -> list[tuple[int, ...]]:
        """The end of each source in the newest micro-batch of the checkpoint's commit log."""
        from penstock.commit.offsets import QueueOffset
        from penstock.spark.checkpoint import Checkpoint

        checkpoint = Checkpoint(self.checkpoint)
        last = checkpoint.last_commit()
        assert last is not None
        offsets = map(QueueOffset.of, checkpoint.offsets(last))
        return [offset.end for offset in offsets if offset is not None]

    def _close(self, *stores: Store) -> None:
        for store in stores:
            store.close()


def check_complete(case: Case, chunks: int) -> None:
    """Every row, as often as the guarantee says; consumer, safe offset and checkpoint level."""
    lost, beyond = case.query.expected(chunks) - case.rows(), case.beyond(chunks)
    assert (lost, beyond) == (Counter(), Counter()), case.name
    positions = case.positions()
    assert all(offset == safe == end for offset, safe, end in positions), (case.name, positions)
    assert [end for ends in case.logged() for end in ends] == [end for _, _, end in positions]
