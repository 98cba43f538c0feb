"""Tables in an object store, through its own protocol: read with the credentials that were given, and refused
without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.delta import DeltaFeed
from penstock.feeds.iceberg import IcebergFeed
from penstock.feeds.urls import parse
from tests.feeds.delta.tables import History, check_replay, rows
from tests.feeds.iceberg import lake
from tests.support.feed_reading import changes, passed
from tests.support.object_store import KEY, SECRET, ObjectStore, object_store

_NUMBERS = count()


def made(storage: dict[str, str], *, feed: bool) -> History:
    """A table with appended, merged, updated and deleted rows."""
    path = f"s3://lake/orders-{next(_NUMBERS)}"
    history = History(path, feed=feed, partitioned=True, storage=storage)
    history.append(rows((1, "a", 1.0), (2, "b/ c=%25", 2.0), (3, None, 0.0)))
    history.merge(rows((1, "a", 1.5), (4, "a", 0.0)))
    history.update(rows((1, "a", 1.0)))
    history.delete(rows((1, "a", 1.0), (2, "a", 1.0)))
    return history


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
def test_a_delta_table_is_read_with_storage_options_given_separately_or_in_the_url(
    storage: dict[str, str], feed_on: bool
) -> None:
    history = made(storage, feed=feed_on)
    feed = DeltaFeed(history.path, "id", storage)
    opened = feed.open()
    again = parse(feed.url)
    assert isinstance(again, DeltaFeed)
    for each in (feed, again):
        there = each.open()
        check_replay(history.path, passed(there, changes(there, per_task=2)), storage=storage)
        assert not [text for text in (repr(each), each.name) if KEY in text or SECRET in text]
    history.append(rows((9, "new", 9.0)))
    assert opened.newest(4) == 5
    assert changes(opened, 4)["id"].to_pylist() == [9]


def test_vacuumed_files_of_an_object_store_are_named_as_lost(storage: dict[str, str]) -> None:
    history = made(storage, feed=False)
    feed = DeltaFeed(history.path, "id", storage).open()
    history.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    with pytest.raises(DataLostError, match=r"versions \d+ to \d+ can be read"):
        feed.tasks(-1, 10, 10)
    assert feed.oldest() == 4


def iceberg(tmp_path: Path, store: ObjectStore) -> tuple[IcebergFeed, Any]:
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": "s3://lake/iceberg",
        "s3.endpoint": store.endpoint,
        "s3.access-key-id": KEY,
        "s3.secret-access-key": SECRET,
        "s3.region": "us-east-1",
    }
    catalog = SqlCatalog("default", **properties)
    catalog.create_namespace("shop")
    name = f"shop.orders{next(_NUMBERS)}"
    table = catalog.create_table(name, lake.SCHEMA)
    table.append(lake.rows((1, "a", 1), (2, "b", 2)))
    table.delete("id = 2")
    return IcebergFeed(name, properties=properties, row_id="id"), table


def test_an_iceberg_table_is_read_from_an_object_store(tmp_path: Path, s3: ObjectStore) -> None:
    feed, table = iceberg(tmp_path, s3)
    again = parse(feed.url)
    held = lake.states(table)
    for version, state in lake.replayed(changes(again.open(), 0, 2), Counter()):
        assert state == held[version]
    assert SECRET not in repr(again)


def test_refused_credentials_are_reported_and_not_shown(tmp_path: Path, storage: dict[str, str]) -> None:
    with object_store() as store:
        store.bucket("lake")
        delta = DeltaFeed("s3://lake/t", "id", {**storage, "AWS_ENDPOINT_URL": store.endpoint})
        opened_delta = delta.open()
        History(delta.path, feed=True, partitioned=False, storage=delta.storage_options)
        made = DeltaFeed(delta.path, delta.row_id, delta.storage_options).open()
        made.oldest()
        feed, _ = iceberg(tmp_path, store)
        opened = feed.open()
        (task, *_) = opened.tasks(0, 1, 10)
        schema = opened.describe().schema
        store.refuse_everybody()

        def check(ask: Callable[[], object], where: str) -> None:
            with pytest.raises(
                FeedUnavailableError, match=f"refuses access.* set valid ones in .*{where}"
            ) as error:
                ask()
            assert error.value.condition == "FEED_UNAVAILABLE.ACCESS_DENIED"
            assert KEY not in str(error.value)
            assert SECRET not in str(error.value)
            assert error.value.__cause__ is None

        check(opened_delta.describe, "storage_options")
        check(lambda: made.newest(-1), "storage_options")
        check(IcebergFeed(feed.table, properties=feed.properties).open().describe, "properties")
        check(lambda: opened.tasks(0, 1, 10), "properties")
        check(lambda: list(opened.read(task, schema)), "properties")
