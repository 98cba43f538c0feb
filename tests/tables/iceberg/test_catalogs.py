"""Iceberg tables in the catalogs that users have: REST catalogs and AWS Glue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from pyiceberg.catalog.glue import GlueCatalog
from pyspark.sql import types as spark

from penstock.errors import MissingDependencyError, StoreUnavailableError, TableRefusedError
from penstock.feeds.iceberg import IcebergFeed
from penstock.tables.compaction import TableCompaction
from penstock.tables.iceberg.compaction import compact
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.schema import evolve, rows_layout, table_schema
from penstock.testing import replay_last_batch
from tests.support.feed_reading import changes
from tests.support.iceberg_catalogs import CATALOGS, Glue, ServedCatalog
from tests.support.object_proxy import Exchange, unavailable
from tests.support.object_store import KEY, SECRET
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed, totals
from tests.tables.delta.driver import FIRST, FOLDS, SECOND
from tests.tables.iceberg.changes_driver import ChangesDriver
from tests.tables.iceberg.driver import ROWS, Driver
from tests.tables.iceberg.tables import IcebergTables


@pytest.fixture(scope="module", params=CATALOGS)
def catalog(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedCatalog]:
    with CATALOGS[request.param](tmp_path_factory.mktemp(request.param)) as served:
        yield served


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCatalog]:
    with CATALOGS["glue"](tmp_path_factory.mktemp("glue")) as served:
        yield served


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_a_micro_batch_is_written_once_although_a_reply_is_lost(
    catalog: ServedCatalog, tmp_path: Path, mode: str
) -> None:
    keys = ["k"] if mode == "update" else []
    driver = Driver(tmp_path, mode, *keys, name=mode, catalog=catalog.properties)
    driver.write(0, [(1, "a"), (2, "b")])
    catalog.lose_reply()
    driver.write(1, [(2, "c"), (3, "d")])
    Driver(tmp_path, mode, *keys, name=mode, catalog=catalog.properties).write(1, [(2, "c"), (3, "d")])
    expected = {
        "append": [(1, "a"), (2, "b"), (2, "c"), (3, "d")],
        "update": [(1, "a"), (2, "c"), (3, "d")],
        "complete": [(2, "c"), (3, "d")],
    }
    assert driver.rows() == expected[mode]
    assert driver.orphans == []


@pytest.mark.parametrize("scd_type", [1, 2])
def test_changes_are_applied_once_although_a_reply_is_lost(
    catalog: ServedCatalog, tmp_path: Path, scd_type: int
) -> None:
    name = f"changes{scd_type}"
    driver = ChangesDriver(tmp_path, scd_type, name=name, catalog=catalog.properties)
    driver.apply(0, FIRST)
    catalog.lose_reply()
    driver.apply(1, SECOND)
    ChangesDriver(tmp_path, scd_type, name=name, catalog=catalog.properties).apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type]([*FIRST, *SECOND])
    assert driver.orphans == []


def test_a_commit_that_another_writer_overtakes_is_repeated_on_the_changed_table(
    catalog: ServedCatalog, tmp_path: Path
) -> None:
    driver, other = (
        Driver(tmp_path, "update", "k", name="two", app_id=app, catalog=catalog.properties)
        for app in ("one", "other")
    )
    driver.write(0, [(1, "a"), (2, "b")])
    catalog.before_commit(lambda: other.write(0, [(2, "from another app"), (3, "c")]))
    driver.write(1, [(1, "d"), (2, "e")])
    assert driver.rows() == [(1, "d"), (2, "e"), (3, "c")]
    assert driver.orphans == []


def test_two_runs_of_a_query_commit_a_micro_batch_once(catalog: ServedCatalog, tmp_path: Path) -> None:
    driver, other = (Driver(tmp_path, name="runs", catalog=catalog.properties) for _ in range(2))
    catalog.before_commit(lambda: other.write(0, [(1, "a")]))
    driver.write(0, [(1, "a")])
    assert driver.rows() == [(1, "a")]
    assert driver.orphans == []


def test_columns_come_and_get_wider_types(catalog: ServedCatalog, tmp_path: Path) -> None:
    narrow = spark.StructType().add("k", spark.LongType()).add("v", spark.IntegerType())
    wide = (
        spark.StructType().add("k", spark.LongType()).add("v", spark.LongType()).add("w", spark.StringType())
    )
    Driver(tmp_path, name="wider", schema=narrow, catalog=catalog.properties).write(0, [(1, 1)])
    location = IcebergLocation("lake", ("shop", "wider"), catalog.properties)
    catalog.lose_reply()
    evolve(location, rows_layout(wide, ()))
    driver = Driver(tmp_path, name="wider", schema=wide, catalog=catalog.properties)
    driver.write(1, [(2, 1 << 40, "x")])
    assert driver.rows() == [(1, 1, None), (2, 1 << 40, "x")]
    replaced = spark.StructType().add("other", "string")
    complete = Driver(tmp_path, "complete", name="wider", schema=replaced, catalog=catalog.properties)
    catalog.lose_reply()
    complete.write(2, [("y",)])
    assert driver.rows() == [("y",)]


def test_small_files_are_merged_once_although_a_reply_is_lost(catalog: ServedCatalog, tmp_path: Path) -> None:
    driver = Driver(tmp_path, name="small", catalog=catalog.properties)
    driver.write(0, *[[(number, "v")] for number in range(8)])
    before = driver.rows()
    catalog.lose_reply()
    assert compact(driver.location, 1 << 20, 5).merged_files == 8
    assert compact(driver.location, 1 << 20, 5) == TableCompaction()
    assert driver.rows() == before


def test_a_feed_reads_what_was_written(catalog: ServedCatalog, tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k", name="fed", catalog=catalog.properties)
    driver.write(0, [(1, "a")])
    driver.write(1, [(1, "b")])
    rows = changes(IcebergFeed("shop.fed", "lake", catalog.properties).open(), 0, 2)
    assert sorted(rows["v"].to_pylist()) == ["a", "a", "b"]


@one_store
@pytest.mark.few(1)
def test_a_query_of_spark(catalog: ServedCatalog, feed: Feed, tmp_path: Path) -> None:
    tables = IcebergTables(feed, tmp_path, catalog.properties)
    sink = tables.sink("totals", "k")
    feed.add({"id": 1, "k": "a", "v": 5}, {"id": 2, "k": "b", "v": 7}).run(sink, totals, mode="update")
    catalog.lose_reply()
    feed.add({"id": 3, "k": "a", "v": 1}).run(sink, totals, mode="update")
    replay_last_batch(feed.folder / "ck")
    feed.run(sink, totals, mode="update")
    assert tables.rows("totals") == [("a", 6, 2), ("b", 7, 1)]
    assert catalog.secret not in f"{sink!r} {sink}"


def test_glue_is_asked_again_when_it_is_busy(glue: Glue, tmp_path: Path) -> None:
    driver = Driver(tmp_path, name="busy", catalog=glue.properties)
    for operation in ("GetTable", "UpdateTable"):
        glue.proxy.fail(operation, unavailable, unavailable)
    driver.write(0, [(1, "a")])
    assert driver.rows() == [(1, "a")]


def test_a_table_of_another_format_in_glue_is_refused(glue: Glue) -> None:
    location = IcebergLocation("lake", ("formats", "t"), glue.properties)
    location.catalog.create_namespace("formats")
    for number, parameters in enumerate([{"classification": "parquet"}, {"table_type": "DELTA"}]):
        cast(GlueCatalog, location.catalog).glue.create_table(
            DatabaseName="formats", TableInput={"Name": f"t{number}", "Parameters": parameters}
        )
        with pytest.raises(TableRefusedError) as caught:
            IcebergLocation("lake", ("formats", f"t{number}"), glue.properties).find()
        assert caught.value.condition == "TABLE_REFUSED.NOT_ICEBERG"


@pytest.mark.parametrize(
    "kind", ["AccessDeniedException", "UnrecognizedClientException", "ExpiredTokenException"]
)
def test_glue_that_refuses_access_is_reported_without_secrets(glue: Glue, tmp_path: Path, kind: str) -> None:
    def refused(exchange: Exchange) -> None:
        body = json.dumps({"__type": kind, "Message": f"not for {KEY} {SECRET}"})
        exchange.answer(400, [("Content-Type", "application/x-amz-json-1.1")], body.encode())

    location = IcebergLocation("lake", ("shop", "denied"), glue.properties)
    glue.proxy.fail("GetTable", refused)
    with pytest.raises(StoreUnavailableError, match=kind) as caught:
        location.find()
    assert caught.value.condition == "STORE_UNAVAILABLE.ACCESS_DENIED"
    for secret in (KEY, SECRET):
        assert secret not in f"{caught.value} {caught.value!r}"


def test_glue_has_no_nested_namespaces(glue: Glue) -> None:
    with pytest.raises(TableRefusedError, match="hierarchical") as caught:
        IcebergLocation("lake", ("a", "b", "t"), glue.properties).create(table_schema(rows_layout(ROWS, ())))
    assert caught.value.condition == "TABLE_REFUSED.ICEBERG"


def test_glue_without_its_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "pyiceberg.catalog.glue", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pyiceberg\[glue\]'"):
        IcebergLocation("lake", ("shop", "t"), {"type": "glue"}).find()
