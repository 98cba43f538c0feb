"""A check of objects can read them, which finds damage that their sizes do not show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import penstock
from penstock.errors import StoreUnavailableError
from penstock.objects import storage
from penstock.objects.bundle import PayloadRange
from penstock.objects.local import LocalStorage
from penstock.objects.storage import Buffer, ObjectStorage
from penstock.store.log import object_reading
from tests.support.object_queues import age, large, objects, small
from tests.support.raw_sql import run_sql


def checked(store: penstock.Store) -> tuple[int | None, list[str], list[str]]:
    (result,) = store.check_objects(read=True)
    assert result.error is None
    return result.read_bytes, result.missing, result.damaged


def stored_bytes(store: penstock.Store) -> int:
    ((size,),) = run_sql(
        store.database, "select coalesce(sum(bytes), 0) from penstock.segment where object_id is not null"
    )
    return int(size)


def test_all_rows_in_objects_are_read(store: penstock.Store, queue: penstock.Queue) -> None:
    for n in range(40):
        queue.append(large(n), n % 2)
    queue.append(small(40), 0)
    assert checked(store) == (stored_bytes(store), [], [])
    assert store.check_objects()[0].read_bytes is None


def test_the_objects_of_another_queue_are_not_mixed_up(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    other = store.create_queue("other", queue.schema, payloads=folder)
    for n in range(20):
        queue.append(large(n), 0)
        other.append(large(n))
    results = store.check_objects(read=True)
    assert sum(result.read_bytes or 0 for result in results) == stored_bytes(store)
    assert [result.damaged for result in results] == [[], []]


@pytest.mark.parametrize("how", ["first byte", "last byte of the rows", "cut off"])
def test_each_damaged_object_is_listed_once(
    store: penstock.Store, queue: penstock.Queue, folder: Path, how: str
) -> None:
    for n in range(5):
        queue.append(large(n), 0)
    path = objects(folder)[2]
    name = str(path.relative_to(folder))
    object_id = int(path.name[:16], 16)
    ((length,),) = run_sql(
        store.database, f"select bytes from penstock.segment where object_id = {object_id}"
    )
    data = bytearray(path.read_bytes())
    if how == "cut off":
        del data[-1]
    else:
        data[0 if how == "first byte" else length - 1] ^= 1
    path.write_bytes(data)
    size, missing, damaged = checked(store)
    assert (size, missing, damaged) == (stored_bytes(store) - length, [], [name])


def test_an_object_that_is_deleted_while_others_are_read_is_missing(
    store: penstock.Store, queue: penstock.Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.append(large(1), 0)
    (path,) = objects(folder)
    read = object_reading.read_verified

    def delete_first(storage: ObjectStorage, name: str, ranges: Sequence[PayloadRange]) -> list[Buffer]:
        path.unlink()
        return read(storage, name, ranges)

    monkeypatch.setattr(object_reading, "read_verified", delete_first)
    assert checked(store) == (0, [str(path.relative_to(folder))], [])


def test_an_object_that_compaction_replaces_during_the_check_is_not_missing(
    store: penstock.Store, queue: penstock.Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of many objects may take longer than the day after which such objects are deleted."""
    queue.append(large(1), 0)
    queue.append(large(2), 0)
    read = object_reading.read_verified
    monkeypatch.setattr(object_reading, "in_parallel", lambda work, items: [work(item) for item in items])

    def compact_first(storage: ObjectStorage, name: str, ranges: Sequence[PayloadRange]) -> list[Buffer]:
        monkeypatch.setattr(object_reading, "read_verified", read)
        queue.compact()
        store.clean_up_objects()
        age(store, folder)
        assert store.clean_up_objects() == 2
        return read(storage, name, ranges)

    monkeypatch.setattr(object_reading, "read_verified", compact_first)
    assert checked(store) == (0, [], [])


def test_a_storage_that_fails_in_between_is_reported_as_such(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.append(large(1), 0)

    def fails(*_: object) -> None:
        raise StoreUnavailableError("it does not answer")

    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(LocalStorage, "_read", fails)
    (result,) = store.check_objects(read=True)
    assert result.error == "it does not answer"
