"""A feed read in batch and in micro-batches that fall by chance, and its changes played onto a table."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.feeds.protocol import Feed
from tests.support.change_frames import Sink, tuples
from tests.support.postgres_source import Row, apply

State = dict[object, Row]
_SEQUENCES = ("_commit_sequence", "_sequence")
_ORDER = {"delete": 0, "update_preimage": 1, "update_postimage": 2, "insert": 3}


def read_both_ways(
    spark: SparkSession, feed: Feed, folder: Path, chance: random.Random, versions: Sequence[int]
) -> Iterator[list[Row]]:
    """All changes of a feed: as a batch, then as a stream that is stopped once, with limits of both kinds."""
    updates = chance.random() < 0.5
    batch = penstock.changes.read(
        spark, feed, compute_updates=updates, options={"rowsPerTask": chance.randint(5, 40)}
    )
    first = {"starting_version": feed.open().oldest() + 1, "ending_version": chance.choice(list(versions))}
    streams = [
        penstock.changes.read_stream(
            spark, feed.url, compute_updates=updates, options=_limits(chance), **bounds
        )
        for bounds in (first, {})
    ]
    yield from same_rows(batch, streams, folder)


def same_rows(batch: DataFrame, streams: Sequence[DataFrame], folder: Path) -> Iterator[list[Row]]:
    """The rows of a batch, then those of streams on one checkpoint: the same, and each commit in one
    micro-batch."""
    expected = _ordered(batch.columns, tuples(batch.toArrow()))
    yield expected
    sink = Sink(folder)
    for stream in streams:
        sink.drain(stream)
    batches = [_ordered(batch.columns, rows) for _, rows in sorted(sink.batches.items()) if rows]
    for one, other in pairwise(batches):
        assert one[-1]["_commit_version"] < other[0]["_commit_version"]
    found = [row for rows in batches for row in rows]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    yield found


def check_states(
    rows: Sequence[Row], states: Mapping[int, State], key: Sequence[str], columns: Sequence[str]
) -> None:
    """Played in their order, the changes up to a version make the table of that version, for each that is
    known."""
    state: State = {}
    done = 0
    for version in sorted(states):
        upto = done
        while upto < len(rows) and rows[upto]["_commit_version"] <= version:
            upto += 1
        apply(rows[done:upto], key, columns, state)
        assert state == states[version], version
        done = upto
    assert done == len(rows) > 0


def _limits(chance: random.Random) -> dict[str, int]:
    limits = {"rowsPerTask": chance.randint(5, 40), "maxCommitsPerTrigger": chance.randint(1, 3)}
    if chance.random() < 0.5:
        limits["maxRowsPerTrigger"] = chance.randint(1, 20)
    return limits


def _ordered(columns: Sequence[str], rows: Sequence[tuple[object, ...]]) -> list[Row]:
    sequence = next((name for name in _SEQUENCES if name in columns), None)
    found = [dict(zip(columns, row, strict=True)) for row in rows]

    def place(row: Row) -> tuple[object, ...]:
        return row["_commit_version"], row[sequence] if sequence else 0, _ORDER[row["_change_type"]]

    return sorted(found, key=place)
