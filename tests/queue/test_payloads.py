"""Queues whose payloads are in object storage: everything else is as for other queues."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import CommitRefusedError, InvalidUrlError, StoreError
from penstock.objects.bundle import index_of
from penstock.objects.local import LocalStorage
from penstock.store.log import object_cleaning, partition_log, payloads
from penstock.store.sqlite.database import SqliteTransaction
from tests.support.queues import everything, numbers, settle
from tests.support.raw_sql import raw_connection, run_sql

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
DAY = payloads.ORPHAN_AGE


def large(*values: int) -> pa.Table:
    """Rows that do not compress."""
    return pa.table({"n": values, "text": [os.urandom(80 << 10).hex() for _ in values]})


def small(*values: int) -> pa.Table:
    return pa.table({"n": values, "text": [""] * len(values)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def queue(store: penstock.Store, folder: Path) -> penstock.Queue:
    return store.create_queue("q", SCHEMA, partitions=2, payloads=folder)


def objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/*.segments"))


def age(store: penstock.Store, folder: Path, *, days: int = 2) -> None:
    """Make everything that is in the storage or marked in the store older; it was cleaned up meanwhile, and
    just now.
    """
    store.clean_up_objects()
    run_sql(store.database, f"update penstock.cleaning set begun_at = begun_at - {days * DAY - DAY // 2}")
    store.clean_up_objects()
    for path in objects(folder):
        then = time.time() - days * 86_400
        os.utime(path, (then, then))
    run_sql(store.database, f"update penstock.object set unused_at = unused_at - {days * DAY}")
    run_sql(store.database, f"update penstock.location set cleaned_at = cleaned_at - {days * DAY}")


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
    index = index_of(path.read_bytes())
    assert sum(index["rows"].to_pylist()) == 40
    assert len(set(index["partition"].to_pylist())) > 4
    assert sorted(n for part in everything(queue).values() for n in part) == list(range(40))


def test_a_large_append_is_divided_into_several_objects(
    queue: penstock.Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "OBJECT_BYTES", 100 << 10)
    queue.append(pa.concat_tables([large(n) for n in range(6)]), 0)
    queue.append(large(6), 1)
    table = pa.concat_tables([large(n) for n in range(7, 13)])
    queue.append(table)
    assert len(objects(folder)) >= 3
    assert sorted(n for part in everything(queue).values() for n in part) == list(range(13))


def test_pages_of_objects_are_bounded(queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        queue.append(large(n), 0)
    sizes: list[int] = []
    real = payloads.with_payloads

    def counting(database: Any, record: Any, pages: Any) -> Any:
        sizes.extend(len(rows) for _, rows in pages)
        return real(database, record, pages)

    monkeypatch.setattr("penstock.store.log.partition_log.with_payloads", counting)
    chunks = partition_log.read(queue.database, queue.record, 0, 0, 6, page_bytes=100 << 10)
    assert [n for chunk in chunks for n in chunk.batch.column("n").to_pylist()] == list(range(6))
    assert max(sizes) <= 2


def test_a_producer_session_appends_once(store: penstock.Store, queue: penstock.Queue) -> None:
    producer = store.producer("q", "session")
    producer.append(large(1), 0, partition=0)
    assert producer.append(large(1), 0, partition=0).skipped
    assert everything(queue) == {0: [1], 1: []}


def test_an_append_that_the_caller_rolls_back(
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


def test_compaction_moves_small_appends_out(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    for n in range(50):
        queue.append(pa.table({"n": [n], "text": [os.urandom(2 << 10).hex()]}), 0)
    assert objects(folder) == []
    queue.compact()
    assert objects(folder) != []
    assert run_sql(store.database, "select count(*) from penstock.payload where data is not null") == [(0,)]
    assert everything(queue) == {0: list(range(50)), 1: []}
    # The times of its rows stay, for retention and for seeking.
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


def test_an_object_that_is_used_again_stays(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(large(1), 0)
    # As a repeated append leaves it that enters its object at the moment in which it is marked.
    run_sql(
        store.database, f"update penstock.object set unused_at = {store.database.run(lambda tx: tx.now())}"
    )
    age(store, folder)
    assert store.clean_up_objects() == 0
    assert run_sql(store.database, "select unused_at from penstock.object") == [(None,)]
    assert everything(queue)[0] == [1]


def test_objects_of_others_are_left_alone(store: penstock.Store, queue: penstock.Queue, folder: Path) -> None:
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
    settle(store)
    first = cleaned()
    assert first > created
    # Another process would do it at once, if it were not for the hour.
    store.maintainer.cleaning_due = 0
    queue.append(large(2), 0)
    settle(store)
    assert cleaned() == first


def test_a_late_object_is_refused(
    store: penstock.Store, queue: penstock.Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = payloads.store_payloads

    def late(*arguments: object, **named: object) -> object:
        # The process was suspended after it had written the object.
        for segment in arguments[1]:  # type: ignore[attr-defined]
            made = segment.stored.object
            object.__setattr__(made, "begun_at", made.begun_at - DAY * 2 // 3)
        return real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.store.log.partition_log.store_payloads", late)
    with pytest.raises(CommitRefusedError) as refused:
        queue.append(pa.concat_tables([large(1), large(2)]))
    assert refused.value.condition == "COMMIT_REFUSED.OBJECT_TOO_OLD"
    assert everything(queue) == {0: [], 1: []}
    age(store, folder)
    assert store.clean_up_objects() == 1


# Damage.


def test_a_missing_object_is_named_with_its_rows(
    store: penstock.Store, queue: penstock.Queue, folder: Path
) -> None:
    queue.append(small(0), 0)
    queue.append(large(1), 0)
    queue.append(large(2), 1)
    first = next(path for path in objects(folder) if index_of(path.read_bytes())["partition"][0].as_py() == 0)
    first.unlink()
    with pytest.raises(StoreError, match=r"partition 0, rows \[1, 2\)") as missing:
        queue.read(0, 0)
    assert missing.value.condition == "STORE_ERROR.OBJECT_MISSING"
    assert numbers(queue.read(1, 0)) == [2]
    (checked,) = store.check_objects()
    assert checked.missing == [str(first.relative_to(folder))]
    assert checked.damaged == []


@pytest.mark.parametrize("how", ["changed", "cut off"])
def test_a_damaged_object_is_named(
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


def test_planted_places_are_refused(store: penstock.Store, queue: penstock.Queue, folder: Path) -> None:
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
        "length = 1",
        "length = 1073741824",
        "checksum = 0",
    ):
        before = run_sql(
            store.database,
            "select payload_id, object_id, start_byte, length, checksum from penstock.payload "
            f"where object_id = {ours[0][0]}",
        )[0]
        run_sql(store.database, f"update penstock.payload set {change} where payload_id = {before[0]}")
        with pytest.raises(StoreError):
            queue.read(0, 0)
        run_sql(
            store.database,
            f"update penstock.payload set object_id = {before[1]}, start_byte = {before[2]}, "
            f"length = {before[3]}, checksum = {before[4]} where payload_id = {before[0]}",
        )
    assert everything(queue)[0] == [1]
    run_sql(store.database, "update penstock.queue set payloads = null where name = 'q'")
    with pytest.raises(StoreError, match="no place for any"):
        store.queue("q").read(0, 0)
    run_sql(store.database, "update penstock.queue set payloads = 'ftp://rows' where name = 'q'")
    with pytest.raises(StoreError, match="the location of the payloads of queue 'q'"):
        store.queue("q")


# Copies.


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


def test_a_copy_of_a_store_does_not_delete_the_objects_of_the_other(
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


def test_a_copy_is_refused_although_nobody_has_cleaned_up_since(
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
    """As in a copy that was made by dumping and restoring."""
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
    copied: tuple[penstock.Store, penstock.Store], monkeypatch: pytest.MonkeyPatch
) -> tuple[penstock.Store, penstock.Store]:
    """A store and a copy that nothing tells apart, as of a whole disk."""
    monkeypatch.setattr(SqliteTransaction, "instance", lambda self: "the same")
    for each in copied:
        run_sql(each.database, "update penstock.location set instance = 'the same'")
    return copied


def stops(*stores: penstock.Store) -> None:
    for store in stores:
        with pytest.raises(StoreError, match="another copy"):
            store.clean_up_objects()


def test_a_copy_of_a_whole_disk_deletes_nothing_that_the_original_has(
    cloned: tuple[penstock.Store, penstock.Store], folder: Path
) -> None:
    """Nothing tells the two databases apart until both have cleaned up."""
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


def test_who_is_chosen_is_not_stopped_by_one_that_does_not_know_yet(
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
    # Anybody may change their mind.
    store.clean_up_objects(take_over=True)
    stops(copy)
    store.clean_up_objects()
    assert len(list(folder.glob("*/cleaning/*.owner"))) == 1


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


def test_a_process_that_was_suspended_for_days_while_it_cleans_up_harms_nobody(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LocalStorage.read

    def late(*arguments: Any) -> object:
        monkeypatch.setattr(LocalStorage, "read", read)
        for _ in range(2):
            run_sql(store.database, f"update penstock.cleaning set begun_at = begun_at - {2 * DAY}")
            store.clean_up_objects()
        return read(*arguments)

    store.clean_up_objects()
    monkeypatch.setattr(LocalStorage, "read", late)
    assert store.clean_up_objects() == 0
    assert store.clean_up_objects() == 0


@pytest.mark.parametrize("take_over", [True, False])
def test_cleaning_goes_on_after_a_clock_was_ahead(
    store: penstock.Store, queue: penstock.Queue, take_over: bool
) -> None:
    run_sql(store.database, f"update penstock.location set cleaned_at = cleaned_at + {1000 * DAY}")
    store.clean_up_objects(take_over=take_over)
    assert run_sql(store.database, "select count(*) from penstock.cleaning") == [(1,)]


def test_a_clock_of_the_storage_that_was_ahead_deletes_nothing(
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


def test_what_a_copy_has_compacted_stays_for_the_original(
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


@pytest.mark.parametrize("text", [b"", b"short", b"x" * 1000])
def test_a_token_that_nobody_wrote_is_taken_over(
    store: penstock.Store, queue: penstock.Queue, folder: Path, text: bytes
) -> None:
    store.clean_up_objects()
    (token,) = folder.glob("*/cleaning/token")
    token.write_bytes(text)
    with pytest.raises(StoreError, match="another copy"):
        store.clean_up_objects()
    store.clean_up_objects(take_over=True)
    assert store.clean_up_objects() == 0


def test_a_restored_store_takes_over(copied: tuple[penstock.Store, penstock.Store], folder: Path) -> None:
    store, restored = copied
    store.clean_up_objects()
    age(store, folder)
    assert restored.clean_up_objects(take_over=True) == 1
    assert restored.clean_up_objects() == 0
    with pytest.raises(StoreError, match="another copy"):
        store.clean_up_objects()


def test_cleaning_that_died_goes_on(
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


def test_two_that_clean_up_at_once_do_not_take_each_other_for_a_copy(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.clean_up_objects()
    read = LocalStorage.read

    def late(*arguments: Any) -> object:
        monkeypatch.setattr(LocalStorage, "read", read)
        # The other one begins, and ends, after this one has begun.
        store.clean_up_objects()
        return read(*arguments)

    monkeypatch.setattr(LocalStorage, "read", late)
    assert store.clean_up_objects() == 0
    assert store.clean_up_objects() == 0
    assert run_sql(store.database, "select count(*) from penstock.cleaning")[0][0] == 4


def test_tokens_are_forgotten(store: penstock.Store, queue: penstock.Queue) -> None:
    for _ in range(3):
        store.clean_up_objects()
        run_sql(store.database, f"update penstock.cleaning set begun_at = begun_at - {2 * DAY}")
    assert run_sql(store.database, "select count(*) from penstock.cleaning") == [(2,)]
    assert store.clean_up_objects() == 0


# Where new queues keep them.


def test_a_store_has_a_default(store: penstock.Store, folder: Path) -> None:
    store.set_payloads(folder)
    store.create_queue("q", SCHEMA).append(large(1), 0)
    assert len(objects(folder)) == 1
    store.create_queue("r", SCHEMA, payloads="database").append(large(1), 0)
    assert len(objects(folder)) == 1
    store.set_payloads("database")
    store.create_queue("s", SCHEMA).append(large(1), 0)
    assert len(objects(folder)) == 1


def test_a_place_that_cannot_be_used_is_refused_at_once(store: penstock.Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidUrlError):
        store.create_queue("q", SCHEMA, payloads="s3://user:password@bucket")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError):
        store.create_queue("q", SCHEMA, payloads=file)
    assert store.queues() == []


def test_cleaning_is_logged(
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
