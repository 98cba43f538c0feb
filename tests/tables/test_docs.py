"""The functions in docs/how-to/foreach-batch.md write each micro-batch once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from penstock.store.url import parse_url
from penstock.testing import replay_last_batch
from tests.support.sql_tables import Feed, query, rows, sql_name

DOCS = Path(__file__).resolve().parents[2] / "docs/how-to/foreach-batch.md"
_SECTION = DOCS.read_text().partition("## Your own `foreachBatch`")[2].partition("\n## ")[0]
BLOCKS = dict(
    zip(("psycopg", "sqlalchemy"), re.findall(r"```python\n(.*?)```", _SECTION, re.DOTALL), strict=True)
)


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("driver", BLOCKS)
def test_a_user_defined_function_writes_once(
    spark: SparkSession, store_url: str, tmp_path: Path, driver: str
) -> None:
    parsed = parse_url(store_url)
    feed = Feed(spark, store_url, tmp_path, pa.schema([("k", pa.string())]))
    query(store_url, f"create table {sql_name(store_url, 'counts')} (k text primary key, n bigint)")
    dsn = f"{parsed.target}?options=-csearch_path%3D{parsed.options['schema']}"
    url = dsn.replace("postgresql:", "postgresql+psycopg:", 1)
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    names: dict[str, Any] = {}
    exec(BLOCKS[driver], names)
    names |= {"dsn": dsn, "engine": engine}

    def run(checkpoint: str = "ck") -> None:
        frame = spark.readStream.format("penstock").options(url=store_url, consumer="c").load("in")
        writer = frame.writeStream.foreachBatch(names["write"])
        writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(
            availableNow=True
        ).start().awaitTermination()

    feed.add({"k": "a"}, {"k": "a"}, {"k": "b"})
    run()
    replay_last_batch(tmp_path / "ck")
    run()
    feed.add({"k": "a"})
    run()
    assert rows(store_url, "counts") == [("a", 3), ("b", 1)]
    with pytest.raises(StreamingQueryException, match=r"CHECKPOINT_MISMATCH\.OTHER_QUERY"):
        run("another checkpoint")
    assert rows(store_url, "counts") == [("a", 3), ("b", 1)]
