"""Where tasks put the rows of a micro-batch for nobody to see, until the driver publishes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import CommitRefused
from penstock.store.database import Database, Transaction

CHUNK_ROWS = 131_072
CHUNK_BYTES = 32 << 20
"""What a task gathers before it sends it."""


@dataclass(frozen=True)
class Source:
    """Staged rows as SQL reads them, in the columns c0, c1 and so on."""

    relation: str
    where: str = "true"
    rows: int | None = None
    """How many there have to be; None where that has been seen to."""


@dataclass(frozen=True)
class Writes(ABC):
    """What tasks do with their rows; made on the driver, carried to the tasks."""

    columns: pa.Schema
    """Of rows that are ready for the database."""

    @abstractmethod
    def put(
        self, database: Database, task: int, attempt: int, chunks: Iterator[pa.RecordBatch]
    ) -> dict[str, int]:
        """Write the rows of one attempt of a task; what it staged, by names that no other attempt has.

        Parameters
        ----------
        attempt
            Spark's number of the attempt, which no other one of the application has.
        """


@dataclass(frozen=True)
class Stage(Writes):
    """One try of one micro-batch, whose rows nobody sees until they are published."""

    sink: str
    """The table's name in the ledger."""
    app_id: str
    batch_id: int

    @abstractmethod
    def take(self, tx: Transaction, attempts: Mapping[str, int]) -> Source:
        """The rows of the acknowledged attempts, for the transaction that publishes them.

        Raises
        ------
        CommitRefused
            When they are not all there any more.
        """

    @abstractmethod
    def drop(self, tx: Transaction) -> None:
        """Drop everything that was staged up to the micro-batch."""

    def swept(self) -> CommitRefused:
        return CommitRefused(
            f"the rows that {self.app_id!r} staged for its batch {self.batch_id} are not all there any more: they were swept, or "
            "another run of the query took over, or the server lost them in a crash; nothing of the batch is visible. Restart "
            "the query, it repeats the micro-batch",
            batch_id=self.batch_id,
        )


def chunked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are worth a transaction of their own."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)
