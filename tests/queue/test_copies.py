"""Only one of several copies of a store may write and delete the objects that they share."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

import penstock
from penstock.errors import StoreError
from penstock.objects.local import LocalStorage
from penstock.store.log import object_owner
from penstock.store.sqlite.database import SqliteTransaction
from tests.support.object_queues import DAY, SCHEMA, age, large, objects, small
from tests.support.queues import everything
from tests.support.raw_sql import run_sql


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Iterator[tuple[penstock.Store, penstock.Store]]:
    """A SQLite store with a queue, and a copy of its file that was made before its last append."""
    path, copy = tmp_path / "a.db", tmp_path / "b.db"
    with penstock.connect(f"sqlite:///{path}") as store:
        store.create_queue("q", SCHEMA, payloads=folder)
        store.clean_up_objects()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("vacuum into ?", (str(copy),))
        store.queue("q").append(large(1), 0)
        copy.chmod(0o600)
        with penstock.connect(f"sqlite:///{copy}") as other:
            yield store, other


def test_a_copy_of_a_store_does_not_delete_the_originals_objects(
    copied: tuple[penstock.Store, penstock.Store], folder: Path
) -> None:
    store, copy = copied
    store.clean_up_objects()
    age(store, folder)
    with pytest.raises(StoreError, match="--take-over") as refused:
        copy.clean_up_objects()
    assert refused.value.condition == "STORE_ERROR.OBJECTS_OF_A_COPY"
    assert len(objects(folder)) == 1
    assert store.clean_up_objects() == 0
    assert everything(store.queue("q")) == {0: [1]}


def test_a_copy_is_refused_even_if_there_was_no_cleanup_since_it_was_made(
    copied: tuple[penstock.Store, penstock.Store], folder: Path
) -> None:
    store, copy = copied
    age(store, folder)
    run_sql(copy.database, "update penstock.location set cleaned_at = 0")
    for refused in (copy.clean_up_objects, lambda: copy.queue("q").append(large(2), 0)):
        with pytest.raises(StoreError, match="--take-over") as caught:
            refused()
        assert caught.value.condition == "STORE_ERROR.OBJECTS_OF_A_COPY"
    copy.queue("q").append(small(3), 0)
    assert everything(copy.queue("q")) == {0: [3]}
    assert everything(store.queue("q")) == {0: [1]}
    store.queue("q").append(large(2), 0)


def test_a_location_of_another_database_is_refused(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    """This is the case in a copy that was made by dumping and restoring."""
    queue.append(large(1), 0)
    run_sql(store.database, "update penstock.location set instance = 'another'")
    with pytest.raises(StoreError, match="another copy of this store"):
        store.clean_up_objects()
    with pytest.raises(StoreError, match="another copy of this store"):
        queue.append(large(2), 0)
    assert everything(queue)[0] == [1]
    store.clean_up_objects(take_over=True)
    queue.append(large(2), 0)
    assert store.clean_up_objects() == 0
    assert everything(queue)[0] == [1, 2]


@pytest.fixture
def cloned(
    copied: tuple[penstock.Store, penstock.Store], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[penstock.Store, penstock.Store]:
    """A store and an indistinguishable copy, like one of a whole disk."""
    (database,) = folder.glob("*/cleaning/*.database")
    database.rename(database.with_name("the same.database"))
    monkeypatch.setattr(SqliteTransaction, "instance", lambda self: "the same")
    for each in copied:
        run_sql(each.database, "update penstock.location set instance = 'the same'")
    return copied


def stops(*stores: penstock.Store) -> None:
    for store in stores:
        with pytest.raises(StoreError, match="another copy"):
            store.clean_up_objects()


def test_a_store_that_has_lost_a_location_writes_nothing_there(
    copied: tuple[penstock.Store, penstock.Store], folder: Path
) -> None:
    """The store that owns the location would delete it."""
    store, copy = copied
    copy.clean_up_objects(take_over=True)
    for _ in range(2):
        stops(store)
        with pytest.raises(StoreError, match="another copy"):
            store.queue("q").append(large(2), 0)
        with pytest.raises(StoreError, match="another copy"):
            store.create_queue("other", SCHEMA, payloads=folder)
    copy.queue("q").append(large(3), 0)


def test_a_copy_of_a_whole_disk_deletes_none_of_the_originals_objects(
    cloned: tuple[penstock.Store, penstock.Store], folder: Path
) -> None:
    """The two databases cannot be distinguished until both have cleaned up."""
    store, copy = cloned
    store.queue("q").append(large(2), 0)
    two_days = time.time() - 2 * 86_400
    for path in (*objects(folder), *folder.glob("*/cleaning/token")):
        os.utime(path, (two_days, two_days))
    # The original has been idle since.
    assert copy.clean_up_objects() == 0
    assert len(objects(folder)) == 2
    stops(store, copy, copy, store)
    assert store.clean_up_objects(take_over=True) == 0
    assert store.clean_up_objects() == 0
    stops(copy)
    assert store.clean_up_objects() == 0
    assert everything(store.queue("q")) == {0: [1, 2]}


@pytest.mark.parametrize("late", ["put", "objection"])
def test_an_objection_is_not_lost_when_both_clean_up_at_the_same_moment(
    cloned: tuple[penstock.Store, penstock.Store], monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    store, copy = cloned
    copy.clean_up_objects()
    put = LocalStorage.put

    def both(self: LocalStorage, name: str, parts: Any) -> None:
        monkeypatch.setattr(LocalStorage, "put", put)
        if late == "put":
            # The copy has read its own token, and now the original objects.
            stops(store)
        else:
            # The original has read the copy's token, and the copy writes another one.
            copy.clean_up_objects()
        put(self, name, parts)

    monkeypatch.setattr(LocalStorage, "put", both)
    if late == "put":
        copy.clean_up_objects()
    else:
        stops(store)
    stops(copy, store, copy)


def test_the_chosen_copy_is_not_stopped_by_one_that_does_not_know_of_the_choice(
    cloned: tuple[penstock.Store, penstock.Store], folder: Path
) -> None:
    store, copy = cloned
    copy.clean_up_objects(take_over=True)
    for _ in range(2):
        copy.clean_up_objects()
    stops(store)
    for _ in range(2):
        copy.clean_up_objects()
    stops(store)
    with pytest.raises(StoreError, match="another copy"):
        store.queue("q").append(large(2), 0)
    copy.queue("q").append(large(3), 0)
    # Users may change their minds.
    store.clean_up_objects(take_over=True)
    stops(copy)
    store.clean_up_objects()
    assert len(list(folder.glob("*/cleaning/*.owner"))) == 1


def test_objects_that_a_copy_has_compacted_are_kept_for_the_original(
    cloned: tuple[penstock.Store, penstock.Store],
) -> None:
    store, copy = cloned
    copy.drop_queue("q")
    run_sql(copy.database, "update penstock.cleaning set begun_at = 0")
    assert copy.clean_up_objects() == 0
    run_sql(copy.database, f"update penstock.object set unused_at = unused_at - {2 * DAY}")
    assert copy.clean_up_objects() == 0
    stops(store)
    run_sql(copy.database, f"update penstock.cleaning set begun_at = begun_at - {2 * DAY} where begun_at > 0")
    stops(copy)
    assert everything(store.queue("q")) == {0: [1]}


def test_a_copy_from_a_template_is_refused(pg_url: str, folder: Path) -> None:
    """The copy has the same tables with the same numbers in another database of the server."""
    names = [f"template_{uuid.uuid4().hex[:8]}" for _ in range(2)]
    urls = [urlsplit(pg_url)._replace(path=f"/{name}").geturl() for name in names]
    original, copy = map(sql.Identifier, names)
    with psycopg.connect(pg_url, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(original))
        try:
            with penstock.connect(urls[0]) as store:
                store.create_queue("q", SCHEMA, payloads=folder).append(large(1), 0)
                store.clean_up_objects()
                age(store, folder)
            admin.execute(sql.SQL("create database {} template {}").format(copy, original))
            with penstock.connect(urls[1]) as other:
                other.drop_queue("q")
                for refused in (
                    other.clean_up_objects,
                    lambda: other.create_queue("r", SCHEMA, payloads=folder),
                ):
                    with pytest.raises(StoreError, match="--take-over") as caught:
                        refused()
                    assert caught.value.condition == "STORE_ERROR.OBJECTS_OF_A_COPY"
            with penstock.connect(urls[0]) as store:
                store.clean_up_objects()
                assert everything(store.queue("q")) == {0: [1]}
        finally:
            for name in (copy, original):
                admin.execute(sql.SQL("drop database if exists {} with (force)").format(name))


def test_a_restored_store_takes_over(copied: tuple[penstock.Store, penstock.Store], folder: Path) -> None:
    store, restored = copied
    store.clean_up_objects()
    age(store, folder)
    assert restored.clean_up_objects(take_over=True) == 1
    assert restored.clean_up_objects() == 0
    with pytest.raises(StoreError, match="another copy"):
        store.clean_up_objects()


def test_a_store_with_the_identity_of_another_store_is_refused(
    store: penstock.Store, queue: penstock.Queue, folder: Path, tmp_path: Path
) -> None:
    """A user who may write to a store can enter the identity, queues and locations of another store.
    Maintenance may then run with credentials for both.
    """
    queue.append(large(1), 0)
    for path in objects(folder):
        os.utime(path, (0, 0))
    with penstock.connect(f"sqlite:///{tmp_path}/false.db") as false:
        run_sql(false.database, f"update penstock.store set uuid = '{store.uuid}'")
        run_sql(
            false.database,
            f"insert into penstock.dropped_payloads values ({queue.record.queue_id}, 'file://{folder}', 0)",
        )
    with penstock.connect(f"sqlite:///{tmp_path}/false.db") as false:
        for _ in range(3):
            stops(false)
        with pytest.raises(StoreError, match="another copy"):
            false.create_queue("q", SCHEMA, payloads=folder)
        assert everything(queue)[0] == [1]
        queue.append(large(2), 0)
        assert store.clean_up_objects() == 0
        # A user who runs a take-over has the credentials and the right to do so.
        false.clean_up_objects(take_over=True)
    stops(store)


@pytest.mark.parametrize("step", ["read_from", "write_database", "write_token"])
def test_an_interrupted_take_over_is_repeated(
    copied: tuple[penstock.Store, penstock.Store], monkeypatch: pytest.MonkeyPatch, step: str, folder: Path
) -> None:
    """Until the take-over is complete, the new owner writes nothing that the other copy would delete."""
    store, copy = copied

    def dies(*_: Any) -> object:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(object_owner.LocationMarkers, step, dies)
        with pytest.raises(SystemExit):
            copy.clean_up_objects(take_over=True)
    with pytest.raises(StoreError, match="another copy"):
        copy.queue("q").append(large(2), 0)
    copy.clean_up_objects(take_over=True)
    copy.queue("q").append(large(3), 0)
    stops(store)
    assert copy.clean_up_objects() == 0
    assert everything(copy.queue("q"))[0] == [3]


def test_the_age_of_a_token_counts_from_when_it_was_written(
    cloned: tuple[penstock.Store, penstock.Store], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a process was suspended for a day before it wrote its token, other copies had no time to object."""
    store, _ = cloned
    store.clean_up_objects()
    store.queue("q").trim(0, 1)
    store.clean_up_objects()
    run_sql(store.database, f"update penstock.object set unused_at = unused_at - {2 * DAY}")
    put = object_owner.LocationMarkers.write_token

    def late(*arguments: Any) -> object:
        monkeypatch.setattr(object_owner.LocationMarkers, "write_token", put)
        run_sql(store.database, f"update penstock.cleaning set begun_at = begun_at - {2 * DAY}")
        return put(*arguments)

    monkeypatch.setattr(object_owner.LocationMarkers, "write_token", late)
    for _ in range(2):
        assert store.clean_up_objects() == 0
    assert len(objects(folder)) == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_location_without_a_queue_can_be_taken_over(tmp_path: Path, folder: Path, known: bool) -> None:
    """The store was moved after the location became its default, or restored from an earlier backup."""
    path, copy = tmp_path / "a.db", tmp_path / "b.db"

    def copied() -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("vacuum into ?", (str(copy),))
        copy.chmod(0o600)

    with penstock.connect(f"sqlite:///{path}") as store:
        if not known:
            copied()
        store.set_payloads(folder)
        if known:
            copied()
    with penstock.connect(f"sqlite:///{copy}") as moved:
        with pytest.raises(StoreError, match="another copy"):
            moved.create_queue("q", SCHEMA, payloads=folder)
        moved.clean_up_objects(take_over=True)
        moved.create_queue("q", SCHEMA, payloads=folder).append(large(1), 0)
        assert moved.clean_up_objects() == 0
