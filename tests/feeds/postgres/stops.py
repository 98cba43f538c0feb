"""Queries that stop because their tables changed, and what they read after a restart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.errors import FeedUnavailableError
from tests.support.postgres_source import Row, Source, Stream

TIMES_OF_CHANGE = ["while it runs", "while it is down", "after its last micro-batch"]


def refused(condition: str, **parameters: object) -> pytest.RaisesExc[FeedUnavailableError]:
    def check(error: FeedUnavailableError) -> bool:
        return (
            error.condition == f"FEED_UNAVAILABLE.{condition}"
            and parameters.items() <= error.parameters.items()
        )

    return pytest.RaisesExc(FeedUnavailableError, check=check)


def keys(rows: list[Row], *names: str) -> list[tuple[object, ...]]:
    return [(row["_change_type"], *(row[name] for name in names)) for row in rows]


def started(source: Source, columns: Sequence[str] | None = None, **options: object) -> Stream:
    """A query that has read what is there."""
    stream = Stream()
    stream.start(source.feed(snapshot="initial", **options), columns)
    stream.drain()
    return stream


def rows_after_restart(stream: Stream, source: Source, condition: str, **options: object) -> list[Row]:
    """What a query that stops by name has after it was started again, once."""
    with refused(condition):
        stream.drain()
    before = len(stream.batches)
    stream.start(source.feed(snapshot="initial", **options))
    stream.drain()
    return [row for number in range(before, len(stream.batches)) for row in stream.batches[number]]
