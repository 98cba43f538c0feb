"""SQL tables in a PostgreSQL server that commits, and whose reply is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.testing import temporary_store_url
from tests.support.postgres_proxy import Proxy, proxied
from tests.support.sql_tables import Feed, named, rows

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])


@pytest.fixture
def server(pg_url: str) -> Iterator[Proxy]:
    with proxied(pg_url) as proxy:
        yield proxy


@pytest.fixture
def table_url(server: Proxy) -> Iterator[str]:
    with temporary_store_url(server.url) as url:
        penstock.connect(url, create=True).close()
        yield url


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_query_goes_on_whichever_reply_is_lost(
    spark: SparkSession, server: Proxy, table_url: str, tmp_path: Path, guarantee: str
) -> None:
    feed = Feed(spark, f"sqlite:///{tmp_path}/feed.db", tmp_path, SCHEMA)
    sink = penstock.TableSink(named(table_url, "t"), (), table_url)
    expected = []
    for number in server.losing_each_commit():
        feed.add({"k": "a", "v": number}).run(sink, guarantee=guarantee)
        expected.append(("a", number))
    written = rows(table_url, "t")
    assert sorted(set(written)) == expected
    if guarantee == "exactly_once":
        assert len(written) == len(expected)
