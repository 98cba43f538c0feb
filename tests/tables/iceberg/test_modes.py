"""Iceberg tables as sinks: each mode equals a fold in plain Python, and each micro-batch is written once."""

from __future__ import annotations

from itertools import chain
from typing import Any

from pyspark.sql import DataFrame

from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import totals
from tests.tables.iceberg.tables import IcebergTables


def row(number: int, k: str | None = "a", v: int = 1) -> dict[str, Any]:
    return {"id": number, "k": k, "v": v}


def folded(given: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    groups: dict[str, list[int]] = {}
    for each in given:
        groups.setdefault(each["k"], []).append(each["v"])
    return sorted((k, sum(values), len(values)) for k, values in groups.items())


def test_append_creates_the_table_and_adds_rows_once(tables: IcebergTables) -> None:
    feed, sink = tables.feed, tables.sink("plain")
    feed.add(row(1), row(2, "b")).run(sink)
    assert tables.snapshots("plain") == 1
    replay_last_batch(feed.folder / "ck")
    feed.run(sink)
    assert tables.snapshots("plain") == 1
    feed.add(row(3)).run(sink)
    assert tables.rows("plain") == [(1, "a", 1), (2, "b", 1), (3, "a", 1)]
    assert tables.orphans("plain") == []
    assert feed.store.consumer("c").lag("in").rows == 0


def test_update_replaces_rows_with_the_same_key(tables: IcebergTables) -> None:
    feed, sink = tables.feed, tables.sink("totals", "K")
    given = [[row(1, "a", 5), row(2, "b", 7)], [row(3, "a", 1), row(4, "c", 2)], [row(5, "b", 3)]]
    for number, part in enumerate(given):
        feed.add(*part).run(sink, totals, mode="update")
        assert tables.rows("totals") == folded([*chain(*given[: number + 1])])
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, totals, mode="update")
    assert tables.rows("totals") == folded([*chain(*given)])
    assert tables.orphans("totals") == []
    feed.add(row(6, "a", 1)).run(sink, totals, mode="update")
    assert tables.rows("totals")[0] == ("a", 7, 3)
    assert feed.store.consumer("c").lag("in").rows == 0


@one_store
def test_complete_replaces_all_rows_in_one_snapshot_and_readers_keep_the_old_one(
    tables: IcebergTables,
) -> None:
    feed, sink = tables.feed, tables.sink("top", "k")

    def few(frame: DataFrame) -> DataFrame:
        return totals(frame).where("total < 10")

    feed.add(row(1, "a", 5), row(2, "b", 7)).run(sink, few, mode="complete")
    before = tables.table("top")
    feed.add(row(3, "a", 9)).run(sink, few, mode="complete")
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, few, mode="complete")
    assert tables.rows("top") == [("b", 7, 1)]
    assert tables.snapshots("top") == len(before.metadata.snapshots) + 1
    assert sorted(before.scan().to_arrow()["k"].to_pylist()) == ["a", "b"]
    feed.add(row(4, "b", 9)).run(sink, few, mode="complete")
    assert tables.rows("top") == []
    assert tables.orphans("top") == []
