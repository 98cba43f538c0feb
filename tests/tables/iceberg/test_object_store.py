"""Iceberg tables in an object store, which executors write to with the credentials of the sink."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.testing import replay_last_batch
from tests.support.object_store import KEY, SECRET, ObjectStore, object_store, storage_properties
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed, totals
from tests.tables.iceberg.tables import IcebergTables


@pytest.fixture
def s3() -> Iterator[ObjectStore]:
    with object_store() as store:
        store.bucket("lake")
        yield store


@one_store
def test_a_table_in_an_object_store_is_updated_and_no_file_is_left_over(
    feed: Feed, tmp_path: Path, s3: ObjectStore
) -> None:
    tables = IcebergTables(
        feed,
        tmp_path / "catalog",
        {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog/catalog.db",
            "warehouse": "s3://lake/warehouse",
            **storage_properties(s3.endpoint),
        },
    )
    sink = tables.sink("totals", "k")
    feed.add({"id": 1, "k": "a", "v": 5}, {"id": 2, "k": "b/ü %", "v": 7}).run(sink, totals, mode="update")
    feed.add({"id": 3, "k": "a", "v": 1}).run(sink, totals, mode="update")
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, totals, mode="update")
    assert tables.rows("totals") == [("a", 6, 2), ("b/ü %", 7, 1)]
    assert tables.listed("totals") == {file.file_path for file in tables.ever("totals")}
    s3.refuse_everybody()
    feed.add({"id": 4, "k": "a", "v": 1})
    with pytest.raises(PenstockError) as caught:
        feed.run(sink, totals, mode="update")
    assert KEY not in str(caught.value)
    assert SECRET not in str(caught.value)
