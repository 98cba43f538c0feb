"""A case with a limit: its rows are the first ones, and exactly that many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from tests.support.crash.cases import Case
from tests.support.crash.queries import CHUNK_ROWS, QueryKind, Row, chunk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock import Pipeline, Stream

LIMIT = 25
SIZE = 10
"""Rows of a micro-batch."""
_OUTPUT = pa.schema([("id", pa.int64()), ("v", pa.int64())])


def _all(df: DataFrame) -> DataFrame:
    return df.selectExpr("id", "k * 10 as v")


def _even(df: DataFrame) -> DataFrame:
    return _all(df.where("id % 2 = 0"))


@dataclass(frozen=True)
class Limited:
    """A transformation and its limit."""

    transform: Callable[[DataFrame], DataFrame]
    groups: Sequence[Callable[[int], bool]]
    """What is limited together, by the rows' ids."""
    last: int
    """The last micro-batch: the one that reaches the limit, or that has the last rows."""
    read: int
    """How many rows the query has read in the end."""
    rows: int = LIMIT
    """How many rows of each group pass."""
    per: tuple[str, ...] | None = None


KINDS = {
    "one to one": Limited(_all, [lambda number: True], 2, LIMIT),
    "filtered": Limited(_even, [lambda number: number % 2 == 0], 4, 5 * SIZE),
    "of each key": Limited(
        _all, [lambda number, k=k: number % 3 == k for k in range(3)], 5, CHUNK_ROWS, 9, ("v",)
    ),
}


@dataclass(frozen=True)
class LimitCase(Case):
    """Its source is one queue."""

    @property
    def query(self) -> QueryKind:
        return QueryKind(self.kind, lambda frames: frames[0], _OUTPUT, lambda chunks: Counter())

    @property
    def limited(self) -> Limited:
        return KINDS[self.kind]

    def write(self, stream: Stream) -> Pipeline:
        import penstock

        options = {"maxRowsPerTrigger": SIZE}
        source = penstock.QueueSource(self.sources[0], consumer=self.name, url=self.url, options=options)
        rows = penstock.stream(stream.spark, source).transform(self.limited.transform)
        return rows.limit(self.limited.rows, per=self.limited.per).write(
            penstock.QueueSink(self.name, url=self.url)
        )

    def check(self) -> None:
        """Just the limit's rows, each once, and of each partition the first ones.

        The consumer stands behind the last row that counted.
        """
        from penstock.limits import limit_progress

        found = self.rows()
        assert set(found.values()) == {1}, (self.name, found)
        rows = [each["id"] for each in chunk(0)]
        third, taken = len(rows) // 3, {row[0] for row in found}
        for passes in self.limited.groups:
            assert sum(map(passes, taken)) == self.limited.rows, (self.name, found)
            for part in (rows[:third], rows[third:]):
                passing = [number for number in part if passes(number)]
                of_it = [number for number in passing if number in taken]
                assert of_it == passing[: len(of_it)], self.name
        assert taken <= {number for number in rows if any(passes(number) for passes in self.limited.groups)}
        read = sum(offset for offset, _, _ in self.positions())
        assert read == self.limited.read, (self.name, read)
        if self.limited.per is None:
            assert str(limit_progress(self.checkpoint)) == f"{LIMIT} of {LIMIT}"

    def is_partial(self) -> bool:
        """Whether nothing is there twice, and no more than the limit."""
        found: Counter[Row] = self.rows()
        most = self.limited.rows * len(self.limited.groups)
        return set(found.values()) <= {1} and sum(found.values()) <= most
