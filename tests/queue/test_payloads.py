"""Queues whose payloads are in object storage behave like other queues otherwise."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import (
    CommitRefusedError,
    InvalidUrlError,
    StoreError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from penstock.objects import storage
from penstock.objects.bundle import read_index
from penstock.objects.local import LocalStorage
from penstock.store.log import object_cleaning, payloads, reading
from penstock.store.log.reading import Range
from penstock.store.log.segmenting import to_segments
from penstock.store.staging import Attempt, discard, promote, stage_segments
from tests.support.object_queues import DAY, SCHEMA, age, large, objects, small
from tests.support.queues import await_maintenance, everything, numbers
from tests.support.raw_sql import raw_connection, run_sql


def test_large_appends_are_in_objects_and_small_ones_in_the_database(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1, 2, 3), 0)
    assert len(objects(folder)) == 1
    queue.append(small(4, 5), 0)
    queue.append(large(6), 1)
    assert len(objects(folder)) == 2
    kept = run_sql(store.database, "select length(data) from penstock.payload where data is not null")
    assert len(kept) == 1
    assert kept[0][0] < payloads.INLINE_BYTES
    assert everything(queue) == {0: [1, 2, 3, 4, 5], 1: [6]}
    assert numbers(queue.read(0, 2, 4)) == [3, 4]
    assert queue.read(0, 0, 5, columns=["text"])["text"][3].as_py() == ""


def test_an_append_to_many_partitions_is_one_object(store: penstock.Store, folder: Path) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=8, key=["n"], payloads=folder)
    queue.append(large(*range(40)))
    (path,) = objects(folder)
    index = read_index(path.read_bytes())
    assert sum(index["rows"].to_pylist()) == 40
    assert len(set(index["partition"].to_pylist())) > 4
    assert sorted(n for part in everything(queue).values() for n in part) == list(range(40))


def test_a_large_append_is_divided_among_several_objects(
    queue: penstock.Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "OBJECT_BYTES", 100 << 10)
    queue.append(pa.concat_tables([large(n) for n in range(6)]), 0)
    queue.append(large(6), 1)
    table = pa.concat_tables([large(n) for n in range(7, 13)])
    queue.append(table)
    assert len(objects(folder)) >= 3
    assert sorted(n for part in everything(queue).values() for n in part) == list(range(13))


def test_pages_of_payloads_in_objects_are_limited_in_size(
    queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        queue.append(large(n), 0)
    sizes: list[int] = []
    real = payloads.with_payloads

    def counting(database: Any, record: Any, pages: Any) -> Any:
        sizes.extend(len(rows) for _, rows in pages)
        return real(database, record, pages)

    monkeypatch.setattr("penstock.store.log.reading.with_payloads", counting)
    chunks = reading.read(queue.database, queue.record, [Range(0, 0, 6)], page_bytes=100 << 10)
    assert [n for chunk in chunks for n in chunk.batch.column("n").to_pylist()] == list(range(6))
    assert max(sizes) <= 2


def test_concurrent_readers_in_a_process_read_an_object_once(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        queue.append(large(n), 0)
    names: list[str] = []
    real = LocalStorage._read

    def counting(self: LocalStorage, name: str, ranges: Any) -> Any:
        names.append(name)
        return real(self, name, ranges)

    monkeypatch.setattr(LocalStorage, "_read", counting)
    readers = [threading.Thread(target=lambda: queue.read(0, 0)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert numbers(queue.read(0, 1)) == [1, 2]
    assert len(names) == len(set(names)) == 3


def test_a_repeated_append_of_a_producer_session_to_object_storage_is_skipped(
    store: penstock.Store, queue: penstock.Queue
) -> None:
    producer = store.producer("q", "session")
    producer.append(large(1), 0, partition=0)
    assert producer.append(large(1), 0, partition=0).skipped
    assert everything(queue) == {0: [1], 1: []}


def test_an_append_that_the_caller_rolls_back_leaves_only_an_orphan(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    connection = raw_connection(store.database)
    connection.execute("begin")
    queue.append(large(1), 0, connection=connection)
    connection.rollback()
    connection.close()
    assert everything(queue) == {0: [], 1: []}
    age(store, folder)
    assert store.clean_up_objects() == 1
    assert objects(folder) == []


def test_compaction_moves_small_payloads_to_objects(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    for n in range(50):
        queue.append(pa.table({"n": [n], "text": [os.urandom(2 << 10).hex()]}), 0)
    assert objects(folder) == []
    queue.compact()
    assert objects(folder) != []
    assert run_sql(store.database, "select count(*) from penstock.payload where data is not null") == [(0,)]
    assert everything(queue) == {0: list(range(50)), 1: []}
    # The timestamps of the rows are kept, for retention and for seeking.
    assert queue.trim(0, 10) == 10
    assert everything(queue)[0] == list(range(10, 50))


def test_compacted_objects_are_deleted_a_day_later(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    for n in range(3):
        queue.append(large(n), 0)
    before = objects(folder)
    queue.compact()
    assert len(objects(folder)) == 4
    assert store.clean_up_objects() == 0
    assert [(each.unused, each.orphans) for each in store.check_objects()] == [(3, 0)]
    age(store, folder)
    assert store.clean_up_objects() == 3
    assert set(before).isdisjoint(objects(folder))
    assert everything(queue)[0] == [0, 1, 2]


def test_retention_and_dropping_release_objects(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1), 0)
    queue.append(large(2), 0)
    queue.trim(0, 1)
    store.clean_up_objects()
    age(store, folder)
    assert store.clean_up_objects() == 1
    assert everything(queue)[0] == [2]
    store.drop_queue("q")
    store.clean_up_objects()
    assert [each.queue for each in store.check_objects()] == [None]
    age(store, folder)
    run_sql(store.database, f"update penstock.dropped_payloads set dropped_at = dropped_at - {2 * DAY}")
    assert store.clean_up_objects() == 1
    assert objects(folder) == []
    assert store.check_objects() == []


def test_an_object_that_is_used_again_is_kept(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1), 0)
    # This is the state after a repeated append that records its object while a cleanup marks the object.
    run_sql(
        store.database, f"update penstock.object set unused_at = {store.database.run(lambda tx: tx.now())}"
    )
    age(store, folder)
    assert store.clean_up_objects() == 0
    assert run_sql(store.database, "select unused_at from penstock.object") == [(None,)]
    assert everything(queue)[0] == [1]


def test_objects_that_are_not_penstocks_are_kept(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1), 0)
    other = folder / "another-store/1/0123.segments"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"rows")
    age(store, folder)
    assert store.clean_up_objects() == 0
    assert other.exists()


def test_background_maintenance_cleans_up_once_an_hour(store: penstock.Store, folder: Path) -> None:
    def cleaned() -> int:
        return int(run_sql(store.database, "select cleaned_at from penstock.location")[0][0])

    queue = store.create_queue("q", SCHEMA, payloads=folder)
    age(store, folder)
    created = cleaned()
    queue.append(large(1), 0)
    await_maintenance(store)
    first = cleaned()
    assert first > created
    # Another process would clean up at once without the interval of an hour.
    store.maintainer.cleanup_due = 0
    queue.append(large(2), 0)
    await_maintenance(store)
    assert cleaned() == first


def test_objects_with_staged_rows_are_kept_until_the_rows_are_published_or_dropped(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    for batch in range(2):
        segments = to_segments(large(batch), 0)
        stage_segments(store.database, queue.record, Attempt("app", batch, 0, "try"), segments, 0)
    age(store, folder)
    assert store.clean_up_objects() == 0
    store.database.run(lambda tx: promote(tx, queue.record, "app", 0, {"try": 1}))
    store.database.run(lambda tx: discard(tx, queue.record, "app", 1))
    assert run_sql(store.database, "select count(*) from penstock.staged_object") == [(0,)]
    age(store, folder)
    assert store.clean_up_objects() == 1
    assert everything(queue) == {0: [0], 1: []}


@pytest.mark.parametrize("shift", [-DAY * 2 // 3, DAY * 2 // 3], ids=["late", "clock-set-back"])
def test_a_commit_with_an_object_that_may_have_been_deleted_is_refused(
    store: penstock.Store, queue: penstock.Queue, folder: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    real = payloads.store_payloads

    def late(*arguments: object, **named: object) -> object:
        # The process was suspended after it had written the object, or the clock was set back.
        for segment in arguments[1]:  # type: ignore[attr-defined]
            made = segment.stored.object
            object.__setattr__(made, "begun_at", made.begun_at + shift)
        return real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.store.log.partition_log.store_payloads", late)
    with pytest.raises(CommitRefusedError) as refused:
        queue.append(pa.concat_tables([large(1), large(2)]))
    assert refused.value.condition == "COMMIT_REFUSED.OBJECT_TOO_OLD"
    assert everything(queue) == {0: [], 1: []}
    age(store, folder)
    assert store.clean_up_objects() == 1


# Damage.


def test_the_error_names_a_missing_object_and_its_rows(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(small(0), 0)
    queue.append(large(1), 0)
    queue.append(large(2), 1)
    first = next(
        path for path in objects(folder) if read_index(path.read_bytes())["partition"][0].as_py() == 0
    )
    first.unlink()
    with pytest.raises(StoreError, match=r"partition 0, rows \[1, 2\)") as missing:
        queue.read(0, 0)
    assert missing.value.condition == "STORE_ERROR.OBJECT_MISSING"
    assert numbers(queue.read(1, 0)) == [2]
    (checked,) = store.check_objects()
    assert checked.missing == [str(first.relative_to(folder))]
    assert checked.damaged == []


@pytest.mark.parametrize("kind", [StoreUnavailableError, StoreReadOnlyError])
def test_a_storage_that_cannot_be_read_is_named_with_the_rows(
    queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch, kind: type[StoreError]
) -> None:
    """And the error is of the same class as for an append, so that a program may try again."""
    queue.append(large(1), 0)

    def fails(*_: object) -> None:
        raise kind("it does not answer")

    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(LocalStorage, "_read", fails)
    with pytest.raises(kind, match=r"partition 0, rows \[0, 1\): it does not answer"):
        queue.read(0, 0)


@pytest.mark.parametrize("mount_point", [True, False])
def test_rows_are_not_written_beside_a_disk_that_is_not_mounted(
    store: penstock.Store,
    queue: penstock.Queue,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    mount_point: bool,
) -> None:
    """Other machines could not read them, and this one could not once its disk is mounted again."""
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.1)
    queue.append(large(1), 0)
    away = folder.rename(folder.with_name("away"))
    if mount_point:
        folder.mkdir()
    for refused in (
        lambda: queue.append(large(2), 0),
        lambda: queue.read(0, 0),
        lambda: store.create_queue("other", SCHEMA, payloads=folder),
        store.clean_up_objects,
    ):
        with pytest.raises(StoreUnavailableError, match="mount its disk") as gone:
            refused()
        assert gone.value.condition == "STORE_UNAVAILABLE.OBJECTS_FOLDER"
    (checked,) = store.check_objects()
    assert "mount its disk" in str(checked.error)
    queue.append(small(3), 0)
    assert objects(folder) == []
    if mount_point:
        folder.rmdir()
    away.rename(folder)
    queue.append(large(4), 0)
    assert everything(queue) == {0: [1, 3, 4], 1: []}


def test_a_folder_that_is_lost_for_good_is_made_again_on_demand(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1), 0)
    shutil.rmtree(folder)
    store.clean_up_objects(take_over=True)
    queue.append(large(2), 1)
    assert numbers(queue.read(1, 0)) == [2]
    with pytest.raises(StoreError) as missing:
        queue.read(0, 0)
    assert missing.value.condition == "STORE_ERROR.OBJECT_MISSING"


@pytest.mark.parametrize("how", ["changed", "cut off"])
def test_the_error_names_a_damaged_object(
    store: penstock.Store, queue: penstock.Queue, folder: Path, how: str
) -> None:
    queue.append(large(1), 0)
    (path,) = objects(folder)
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:] if how == "changed" else data[:1000])
    with pytest.raises(StoreError, match=r"rows \[0, 1\)") as damaged:
        queue.read(0, 0)
    assert damaged.value.condition == "STORE_ERROR.OBJECT_DAMAGED"
    assert store.check_objects()[0].damaged == ([] if how == "changed" else [str(path.relative_to(folder))])
    queue.append(large(2), 0)
    with pytest.raises(StoreError):
        queue.compact()
    assert len(objects(folder)) == 2


def test_object_places_that_penstock_did_not_write_are_refused(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1), 0)
    other = store.create_queue("other", SCHEMA, payloads=folder)
    other.append(large(2), 0)
    ours, theirs = (
        run_sql(
            store.database, f"select object_id from penstock.object where queue_id = {each.record.queue_id}"
        )
        for each in (queue, other)
    )
    for change in (
        f"object_id = {theirs[0][0]}",
        "object_id = 1",
        "start_byte = start_byte + 1",
        "start_byte = 1099511627776",
        "bytes = 1",
        "bytes = 1073741824",
        "checksum = 0",
    ):
        before = run_sql(
            store.database,
            "select queue_id, object_id, start_byte, bytes, checksum from penstock.segment "
            f"where object_id = {ours[0][0]}",
        )[0]
        run_sql(store.database, f"update penstock.segment set {change} where queue_id = {before[0]}")
        with pytest.raises(StoreError):
            queue.read(0, 0)
        run_sql(
            store.database,
            f"update penstock.segment set object_id = {before[1]}, start_byte = {before[2]}, "
            f"bytes = {before[3]}, checksum = {before[4]} where queue_id = {before[0]}",
        )
    assert everything(queue)[0] == [1]
    run_sql(store.database, "update penstock.queue set payloads = null where name = 'q'")
    with pytest.raises(StoreError, match="the queue has no object storage"):
        store.queue("q").read(0, 0)
    run_sql(store.database, "update penstock.queue set payloads = 'ftp://rows' where name = 'q'")
    with pytest.raises(StoreError, match="the location of the payloads of queue 'q'"):
        store.queue("q")


def test_a_store_has_a_default_location_for_payloads(store: penstock.Store, folder: Path) -> None:
    store.set_payloads(folder)
    store.create_queue("q", SCHEMA).append(large(1), 0)
    assert len(objects(folder)) == 1
    store.create_queue("r", SCHEMA, payloads="database").append(large(1), 0)
    assert len(objects(folder)) == 1
    store.set_payloads("database")
    store.create_queue("s", SCHEMA).append(large(1), 0)
    assert len(objects(folder)) == 1


def test_an_unusable_location_is_refused_immediately(store: penstock.Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidUrlError):
        store.create_queue("q", SCHEMA, payloads="s3://user:password@bucket")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError):
        store.create_queue("q", SCHEMA, payloads=file)
    assert store.queues() == []


def test_cleanup_of_objects_is_logged(
    store: penstock.Store, queue: penstock.Queue, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue.append(large(1), 0)
    queue.trim(0, 1)
    store.clean_up_objects()
    age(store, folder)
    with caplog.at_level(logging.INFO):
        store.clean_up_objects()
    (record,) = [each for each in caplog.records if getattr(each, "action", "") == "objects_cleaned"]
    assert record.__dict__["objects"] == 1
    assert object_cleaning.clean_up(store.database).objects == 0
