"""Reads change rows and dead letters in tests of Debezium feeds."""

from __future__ import annotations

from pyspark.sql import DataFrame

import penstock
from penstock.json_text import Json

ORDERS = "id bigint not null, name string"


def letters(url: str) -> list[Json]:
    with penstock.connect(url) as store:
        found: list[Json] = store.queue("dead").read(0, 0).to_pylist()
    return sorted(found, key=lambda letter: letter["offset"])


def kinds(df: DataFrame, *columns: str) -> list[tuple[object, ...]]:
    chosen = df.select("_change_type", "_commit_version", "_sequence", *columns)
    return [tuple(row) for row in chosen.orderBy("_commit_version", "_sequence").collect()]
