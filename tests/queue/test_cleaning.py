"""Cleanup of a store's objects: by several processes, with wrong clocks, and after failures."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import StoreError, StoreReadOnlyError, StoreUnavailableError
from penstock.objects.local import LocalStorage
from penstock.store.log import object_owner
from tests.support.object_queues import DAY, SCHEMA, date_back, large
from tests.support.queues import everything
from tests.support.raw_sql import run_sql


def test_a_location_may_be_written_in_several_ways(
    store: penstock.Store, folder: Path, tmp_path: Path
) -> None:
    folder.mkdir()
    (tmp_path / "alias").symlink_to(folder)
    queues = [
        store.create_queue(name, SCHEMA, payloads=place)
        for name, place in (("a", folder), ("b", tmp_path / "alias"))
    ]
    for n in range(3):
        for queue in queues:
            queue.append(large(n), 0)
        assert store.clean_up_objects() == 0
    for queue in queues:
        assert everything(queue)[0] == [0, 1, 2]


@pytest.mark.parametrize("step", ["read", "put"])
def test_a_process_that_was_suspended_for_days_during_a_cleanup_does_no_harm(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It was suspended before it read the existing token, or before it wrote its own."""
    go_on = getattr(LocalStorage, step)

    def late(*arguments: Any) -> object:
        monkeypatch.setattr(LocalStorage, step, go_on)
        days_of_cleaning(store)
        return go_on(*arguments)

    store.clean_up_objects()
    monkeypatch.setattr(LocalStorage, step, late)
    for _ in range(3):
        assert store.clean_up_objects() == 0


def days_of_cleaning(store: penstock.Store) -> None:
    for _ in range(3):
        date_back(store, 2 * DAY)
        store.clean_up_objects()


@pytest.mark.parametrize("take_over", [True, False])
def test_cleanup_works_after_a_clock_was_ahead(
    store: penstock.Store, queue: penstock.Queue, take_over: bool
) -> None:
    run_sql(store.database, f"update penstock.location set cleaned_at = cleaned_at + {1000 * DAY}")
    store.clean_up_objects(take_over=take_over)
    assert run_sql(store.database, "select count(*) from penstock.cleaning") == [(1,)]


def test_no_object_is_deleted_early_if_the_storages_clock_was_ahead(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    store.clean_up_objects()
    (token,) = folder.glob("*/cleaning/token")
    ahead = time.time() + 3 * 86_400
    os.utime(token, (ahead, ahead))
    own = folder / str(store.database.uuid) / str(queue.record.queue_id)
    own.mkdir()
    (own / f"{7:032x}.segments").write_bytes(b"of an append that has not ended")
    assert store.clean_up_objects() == 0


@pytest.mark.parametrize("text", [b"", b"short", b"x" * 1000])
def test_a_store_can_take_over_a_location_with_an_unknown_token(
    store: penstock.Store, queue: penstock.Queue, folder: Path, text: bytes
) -> None:
    store.clean_up_objects()
    (token,) = folder.glob("*/cleaning/token")
    token.write_bytes(text)
    with pytest.raises(StoreError, match="another copy"):
        store.clean_up_objects()
    store.clean_up_objects(take_over=True)
    assert store.clean_up_objects() == 0


@pytest.mark.parametrize("entry", ["token", ""])
def test_the_error_names_an_entry_that_is_in_place_of_the_tokens(
    store: penstock.Store, queue: penstock.Queue, folder: Path, entry: str
) -> None:
    store.clean_up_objects()
    (tokens,) = folder.glob("*/cleaning")
    there = tokens / entry
    if entry:
        there.unlink()
        there.mkdir()
    else:
        shutil.rmtree(there)
        there.write_bytes(b"")
    with pytest.raises(StoreError):
        store.clean_up_objects()
    with pytest.raises(StoreError, match=r"cleaning.* folder above it was changed.*delete it"):
        store.clean_up_objects(take_over=True)
    there.rmdir() if entry else there.unlink()
    store.clean_up_objects(take_over=True)
    assert store.clean_up_objects() == 0


def test_an_interrupted_cleanup_is_repeated(
    store: penstock.Store, queue: penstock.Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.clean_up_objects()
    for dies in ("put", "listed"):
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, dies, interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.clean_up_objects()
        assert store.clean_up_objects() == 0


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_processes_that_clean_up_concurrently_are_not_mistaken_for_copies(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.clean_up_objects()
    read = LocalStorage.read

    def late(*arguments: Any) -> object:
        monkeypatch.setattr(LocalStorage, "read", read)
        # The other cleanup begins and ends after this one has begun.
        store.clean_up_objects()
        return read(*arguments)

    monkeypatch.setattr(LocalStorage, "read", late)
    assert store.clean_up_objects() == 0
    assert store.clean_up_objects() == 0
    assert run_sql(store.database, "select count(*) from penstock.cleaning")[0][0] == 4


def test_records_of_old_tokens_are_deleted(store: penstock.Store, queue: penstock.Queue) -> None:
    for _ in range(3):
        store.clean_up_objects()
        date_back(store, 2 * DAY)
    assert run_sql(store.database, "select count(*) from penstock.cleaning") == [(2,)]
    assert store.clean_up_objects() == 0


def test_a_location_without_a_record_of_its_owner_is_not_cleaned_up(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1), 0)
    (database,) = folder.glob("*/cleaning/*.database")
    database.unlink()
    with pytest.raises(StoreError, match=r"record of which database owns the objects .* was deleted"):
        store.clean_up_objects()
    queue.append(large(2), 0)
    store.clean_up_objects(take_over=True)
    assert database.exists()
    assert store.clean_up_objects() == 0
    assert everything(queue)[0] == [1, 2]


def test_a_cleanup_that_failed_a_day_ago_is_not_mistaken_for_the_last_one(
    store: penstock.Store, queue: penstock.Queue, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that clean up at the same moment have both read the previous token."""
    store.clean_up_objects()
    for listed in (LocalStorage.listed, None):
        if listed is not None:
            monkeypatch.setattr(LocalStorage, "listed", _away)
            with pytest.raises(StoreUnavailableError):
                store.clean_up_objects()
            monkeypatch.setattr(LocalStorage, "listed", listed)
        date_back(store, 2 * DAY)
    at = object_owner.LocationMarkers.read_from

    def meanwhile(database: Any, storage: Any) -> object:
        found = at(database, storage)
        monkeypatch.setattr(object_owner.LocationMarkers, "read_from", at)
        other.clean_up_objects()
        return found

    monkeypatch.setattr(object_owner.LocationMarkers, "read_from", meanwhile)
    with penstock.connect(store_url) as other:
        for each in (store, other, store):
            assert each.clean_up_objects() == 0
    queue.append(large(1), 0)


def _away(storage: LocalStorage, prefix: str) -> object:
    raise storage.unavailable("it is away")


def test_a_token_is_read_again_if_its_record_was_deleted_in_between(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = object_owner.LocationMarkers.read_from

    def forgotten(database: Any, storage: Any) -> object:
        found = at(database, storage)
        monkeypatch.setattr(object_owner.LocationMarkers, "read_from", at)
        store.clean_up_objects()
        run_sql(store.database, f"delete from penstock.cleaning where token = '{found.token}'")
        return found

    store.clean_up_objects()
    monkeypatch.setattr(object_owner.LocationMarkers, "read_from", forgotten)
    for _ in range(2):
        assert store.clean_up_objects() == 0


def test_a_cleanup_that_died_after_writing_its_token_does_not_block_others(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may even have been suspended for days before it wrote the token."""
    put = object_owner.LocationMarkers.write_token

    def dies(*arguments: Any) -> int:
        monkeypatch.setattr(object_owner.LocationMarkers, "write_token", put)
        days_of_cleaning(store)
        put(*arguments)
        raise SystemExit

    store.clean_up_objects()
    monkeypatch.setattr(object_owner.LocationMarkers, "write_token", dies)
    with pytest.raises(SystemExit):
        store.clean_up_objects()
    assert store.clean_up_objects() == 0
    queue.append(large(1), 0)


def test_records_of_tokens_do_not_accumulate_if_the_location_is_read_only(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(storage: LocalStorage, name: str, parts: Any) -> None:
        raise StoreReadOnlyError("nothing may be written")

    store.clean_up_objects()
    monkeypatch.setattr(LocalStorage, "put", refused)
    for _ in range(3):
        with pytest.raises(StoreReadOnlyError):
            store.clean_up_objects()
    assert run_sql(store.database, "select count(*) from penstock.cleaning") == [(1,)]
