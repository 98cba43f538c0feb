"""Crash test cases: a query on a store with a guarantee, as the parent and its children describe it."""

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
    """Case of a crash test. Its name is also that of its consumer and its sink."""

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
    """The location of the payloads of its queues, if not the database."""

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
        """Return the pipeline that writes the transformed stream to the sink."""
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
        """Create the queues and the vital consumer."""
        source, sink = self.stores()
        consumer = source.create_consumer(self.name)
        for queue in self.sources:
            source.create_queue(queue, SOURCE, partitions=PARTITIONS, payloads=self.payloads)
            consumer.register(queue, vital=True)
        sink.create_queue(self.name, self.query.output, partitions=PARTITIONS, payloads=self.payloads)
        Path(self.marker).parent.mkdir(exist_ok=True, parents=True)
        self._close(source, sink)

    def append(self, number: int) -> None:
        """Append a chunk to each source, over both partitions."""
        source, sink = self.stores()
        for index, queue in enumerate(self.sources):
            rows = chunk(number, index)
            half = len(rows) // 3
            source.queue(queue).append(rows[:half], partition=0)
            source.queue(queue).append(rows[half:], partition=1)
        self._close(source, sink)

    def rows(self) -> Counter[Row]:
        """Return the rows in the sink."""
        source, sink = self.stores()
        queue = sink.queue(self.name)
        tables = [queue.read(partition, 0) for partition in range(queue.partitions)]
        self._close(source, sink)
        return Counter(tuple(row.values()) for table in tables for row in table.to_pylist())

    def beyond(self, chunks: int) -> Counter[Row]:
        """Return wrong rows in the sink, and repeated rows if the guarantee forbids them."""
        expected, rows = self.query.expected(chunks), self.rows()
        if self.guarantee == "at_least_once":
            return Counter({row: count for row, count in rows.items() if row not in expected})
        return rows - expected

    def positions(self) -> list[tuple[int, int, int]]:
        """Return the offset, the safe offset and the end of every partition of every source."""
        source, sink = self.stores()
        positions = []
        for queue in self.sources:
            keys = source.consumer(self.name).registration(queue).keys
            ends = [part.next_index for part in source.queue(queue).info().partitions]
            rows = source.database.run(lambda tx, keys=keys: tx.all("read_positions", **keys), write=False)
            positions += [(row.next_index, row.safe_index, end) for row, end in zip(rows, ends, strict=True)]
        self._close(source, sink)
        return positions

    def logged(self) -> list[tuple[int, ...]]:
        """Return the end offset of each source in the newest micro-batch of the commit log."""
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
    """Check that the sink has all rows, and that consumer, safe offset and checkpoint agree."""
    lost, beyond = case.query.expected(chunks) - case.rows(), case.beyond(chunks)
    assert (lost, beyond) == (Counter(), Counter()), case.name
    positions = case.positions()
    assert all(offset == safe == end for offset, safe, end in positions), (case.name, positions)
    assert [end for ends in case.logged() for end in ends] == [end for _, _, end in positions]
