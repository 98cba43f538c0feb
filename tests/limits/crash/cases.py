"""A case with a limit: its rows are the first ones, and just so many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tests.crash.cases import Case
from tests.crash.queries import QueryKind, Row, chunk

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
class Transformed:
    transform: Any
    passes: Any
    last: int
    """The micro-batch that reaches the limit."""


KINDS = {
    "one to one": Transformed(_all, lambda number: True, 2),
    "filtered": Transformed(_even, lambda number: number % 2 == 0, 4),
}


@dataclass(frozen=True)
class LimitCase(Case):
    """Its source is one queue."""

    @property
    def query(self) -> QueryKind:
        return QueryKind(self.kind, lambda frames: frames[0], _OUTPUT, lambda chunks: Counter())

    @property
    def last(self) -> int:
        return KINDS[self.kind].last

    def write(self, stream: Stream) -> Pipeline:
        import penstock as ps

        options = {"maxRowsPerTrigger": SIZE}
        source = ps.QueueSource(self.sources[0], consumer=self.name, url=self.url, options=options)
        limited = ps.stream(stream.spark, source).transform(KINDS[self.kind].transform).limit(LIMIT)
        return limited.write(ps.QueueSink(self.name, url=self.url))

    def check(self) -> None:
        """Just the limit's rows, each once, of each partition the first ones; the consumer behind the last that counted."""
        found, passes = self.rows(), KINDS[self.kind].passes
        assert sorted(found.values()) == [1] * LIMIT, (self.name, found)
        rows = [each["id"] for each in chunk(0)]
        third, taken = len(rows) // 3, {row[0] for row in found}
        for part in (rows[:third], rows[third:]):
            of_it = [number for number in part if number in taken]
            assert of_it == [number for number in part if passes(number)][: len(of_it)], self.name
        read = sum(offset for offset, _, _ in self.positions())
        assert read == (LIMIT if self.kind == "one to one" else SIZE * (self.last + 1)), (self.name, read)

    def is_partial(self) -> bool:
        """Whether nothing is there twice, and no more than the limit."""
        found: Counter[Row] = self.rows()
        return set(found.values()) <= {1} and sum(found.values()) <= LIMIT
