"""Payloads: the stored rows of segments, in the database or in objects of the queue's storage.

A queue may keep its payloads in object storage (``QueueRecord.payloads``). An append then writes them into
objects first, and the transaction that makes the append visible records where they are. Small payloads stay
in the database until they are compacted, which is faster.

An object that no transaction has recorded, because a process died or a commit was refused, is an orphan.
Cleanup deletes it when it is a day old (:mod:`penstock.store.log.object_cleaning`). So a transaction refuses
objects whose writing began more than half a day ago, such as those of a suspended process.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Protocol

import pyarrow as pa

from penstock.errors import CommitRefusedError, StoreError
from penstock.objects.bundle import PackedPayload, PayloadRange, pack
from penstock.objects.local import UNFINISHED_SUFFIX
from penstock.objects.storage import Buffer, ObjectStorage
from penstock.parallel import in_parallel
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.decode import unreadable
from penstock.store.log.segmenting import NewObject, Segment, StoredPayload, by_size
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.locations import require_own_location, require_same_store, store_replaced_error
from penstock.store.records.staged import NONE, StoredSegments

BLOCK_IDS = 4096
MESSAGE_BYTES = 1 << 20
"""The approximate size of the messages that send payloads to the database, in bytes."""
INLINE_BYTES = 64 << 10
"""An append whose payloads have fewer bytes than this keeps them in the database."""
OBJECT_BYTES = 8 << 20
"""The approximate size of the objects that an append's payloads are divided into, in bytes."""
ORPHAN_AGE = 24 * 3600 * 1_000_000
"""The age at which an object that no transaction has recorded is deleted, in microseconds."""
_OBJECT_NAME = re.compile(
    rf"[0-9a-f]{{32}}\.segments(\.[0-9a-f]{{16}}{re.escape(UNFINISHED_SUFFIX)})?", re.ASCII
)
_REREADS = 2


def object_name(store_uuid: str, queue_id: int, object_id: int, suffix: int) -> str:
    """Return the name of an object in object storage."""
    return f"{folder_of(store_uuid, queue_id)}{object_id:016x}{suffix:016x}.segments"


def is_object_name(name: str) -> bool:
    """Return whether a name in a queue's folder belongs to an object, finished or not."""
    return _OBJECT_NAME.fullmatch(name) is not None


def folder_of(store_uuid: str, queue_id: int) -> str:
    """Return the prefix of the names of a queue's objects."""
    return f"{store_uuid}/{queue_id}/"


class PayloadOwner(Protocol):
    """The owner of payloads: a queue, or something else whose id no queue has."""

    @property
    def queue_id(self) -> int: ...

    @property
    def payloads(self) -> str | None: ...


def write_objects(database: Database, owner: PayloadOwner, segments: Sequence[Segment]) -> None:
    """Write an append's payloads into objects, if the queue uses object storage and they are large enough.

    Call this before the transaction of the append, which must not wait for object storage.
    """
    if owner.payloads is None:
        return
    # A repeated append has already written its segments.
    segments = [segment for segment in segments if segment.stored is None]
    if not segments or fit_inline(segments):
        return
    storage = database.storages.at(owner.payloads)
    now = object_write_time(database, owner.payloads)
    write_segments_to_objects(storage, database.uuid, owner.queue_id, segments, now)


def object_write_time(database: Database, location: str) -> int:
    """Check that this database may write objects to a location; return the database's time in microseconds
    since 1970.

    Raises
    ------
    StoreError
        If the location belongs to another copy of the store.
    StoreNotFoundError
        If another store has replaced this one in the database.
    """

    def read(tx: Transaction) -> int:
        require_own_location(tx, database.uuid, location)
        return tx.now()

    return database.run(read, write=False)


def fit_inline(segments: Sequence[Segment]) -> bool:
    return sum(segment.bytes for segment in segments) < INLINE_BYTES


def write_segments_to_objects(
    storage: ObjectStorage, store_uuid: str, queue_id: int, segments: Sequence[Segment], begun_at: int
) -> None:
    """Write segments into objects, in parallel."""

    def put(group: Sequence[Segment]) -> None:
        parts, places = pack(
            [
                PackedPayload(
                    segment.partition, segment.rows, segment.columns_id, memoryview(segment.payload)
                )
                for segment in group
            ]
        )
        size = sum(memoryview(part).nbytes for part in parts)
        # Ids are below 2**62, so that both databases can calculate with them.
        new_object = NewObject(
            secrets.randbits(62), secrets.randbits(62), store_uuid, queue_id, size, begun_at
        )
        name = object_name(store_uuid, queue_id, new_object.object_id, new_object.suffix)
        storage.put(name, parts, existing=store_uuid)
        for segment, place in zip(group, places, strict=True):
            segment.move_to_object(StoredPayload(new_object, place))

    in_parallel(put, list(by_size(segments, attrgetter("bytes"), OBJECT_BYTES)))


def allocate_payloads(tx: Transaction, count: int) -> list[int]:
    """Return ascending ids for ``count`` payloads; later calls return higher ids."""
    blocks = tx.all_for_many("allocate_block", {"place": range(0, count, BLOCK_IDS)})
    first_ids = sorted(row.block * BLOCK_IDS for row in blocks)
    ids = chain.from_iterable(range(first_id, first_id + BLOCK_IDS) for first_id in first_ids)
    return [*islice(ids, count)]


def store_payloads(tx: Transaction, segments: Sequence[Segment]) -> StoredSegments:
    """Store the payloads of segments in the database, and record the objects of those that are in objects."""
    payload_ids = insert_payloads(tx, [segment for segment in segments if segment.stored is None])
    insert_objects(tx, [segment.stored.object for segment in segments if segment.stored is not None])
    next_id = iter(payload_ids)
    return _stored_segments(segments, [NONE if segment.stored else next(next_id) for segment in segments])


def store_compacted(tx: Transaction, segment: Segment, runs: pa.Buffer) -> StoredSegments:
    """Store the payload of a compacted segment like :func:`store_payloads`, with its runs."""
    (payload_id,) = allocate_payloads(tx, 1)
    data = None if segment.stored is not None else memoryview(segment.payload)
    tx.run("insert_payload", payload_id=payload_id, runs=memoryview(runs), data=data)
    if segment.stored is not None:
        insert_objects(tx, [segment.stored.object])
    return _stored_segments([segment], [payload_id])


def _stored_segments(segments: Sequence[Segment], payload_ids: Sequence[int]) -> StoredSegments:
    objects = [NONE if segment.stored is None else segment.stored.object.object_id for segment in segments]
    places = [None if segment.stored is None else segment.stored.place for segment in segments]
    return StoredSegments(
        [segment.partition for segment in segments],
        [segment.rows for segment in segments],
        [segment.bytes for segment in segments],
        [segment.columns_id for segment in segments],
        payload_ids,
        objects,
        [NONE if place is None else place.offset for place in places],
        [NONE if place is None else place.checksum for place in places],
    )


def insert_payloads(tx: Transaction, segments: Sequence[Segment]) -> list[int]:
    """Store payloads in the database, several in each message; return their ids."""
    payload_ids = allocate_payloads(tx, len(segments))
    first = size = 0
    data: list[memoryview] = []
    for count, segment in enumerate(segments, 1):
        data.append(memoryview(segment.payload))
        size += data[-1].nbytes
        if size >= MESSAGE_BYTES or count == len(segments):
            message: dict[str, Sequence[object]] = {"payload_id": payload_ids[first:count], "data": data}
            tx.run_many("insert_payload", message, runs=None)
            first, size, data = count, 0, []
    return payload_ids


def insert_objects(tx: Transaction, objects: Sequence[NewObject]) -> None:
    new_objects = list({new_object.object_id: new_object for new_object in objects}.values())
    if not new_objects:
        return
    columns = {
        "object_id": [new_object.object_id for new_object in new_objects],
        "suffix": [new_object.suffix for new_object in new_objects],
        "size": [new_object.size for new_object in new_objects],
    }
    recorded = tx.all_for_many(
        "insert_object", columns, queue_id=new_objects[0].queue_id, now=tx.write_time()
    )
    if len({row.store for row in recorded} | {new_object.store for new_object in new_objects}) > 1:
        raise store_replaced_error()
    if len(recorded) < len(new_objects):
        raise CommitRefusedError(
            "another object has the same random id: repeat the append",
            condition="COMMIT_REFUSED.OBJECT_EXISTS",
        )
    write_times = [new_object.begun_at for new_object in new_objects]
    # If the clock was set back since then, the objects are older than they seem.
    earliest, latest = max(write_times) - ORPHAN_AGE // 2, min(write_times) + ORPHAN_AGE // 2
    if any(not earliest <= row.created_at <= latest for row in recorded):
        raise CommitRefusedError(
            "these rows were written to object storage more than half a day ago by the database's clock, or "
            "that clock was set back by half a day since. Cleanup may have deleted them: repeat the append, "
            "or restart the query, which repeats the micro-batch",
            condition="COMMIT_REFUSED.OBJECT_TOO_OLD",
        )


def with_payloads(
    database: Database, queue: QueueRecord, pages: Sequence[tuple[int, Sequence[Row]]]
) -> list[list[Any]]:
    """Return the segments of pages with their payloads. Payloads in objects are read in parallel.

    Each page is a pair of a partition and its segments.
    """
    by_object: dict[tuple[int, int | None], list[tuple[int, Row]]] = {}
    for partition, rows in pages:
        for row in rows:
            if row.object_id is not None:
                by_object.setdefault((row.object_id, row.suffix), []).append((partition, row))
    if not by_object:
        return [list(rows) for _, rows in pages]
    if queue.payloads is None:
        partition, row = next(iter(by_object.values()))[0]
        raise _unreadable(
            queue, partition, row, "its rows are in an object, but the queue has no object storage"
        )
    storage = database.storages.at(queue.payloads)

    def read(group: Sequence[tuple[int, Row]]) -> list[tuple[tuple[int, int], Buffer]]:
        rows = [row for _, row in group]
        partition, first = group[0]
        if first.suffix is None:
            raise _unreadable(queue, partition, first, "the store has no record of its object")
        if any(None in (row.start_byte, row.checksum) for row in rows):
            raise _unreadable(queue, partition, first, "the record of where its rows are is incomplete")
        name = object_name(database.uuid, queue.queue_id, first.object_id, first.suffix)
        try:
            places = [PayloadRange(row.start_byte, row.bytes, row.checksum) for row in rows]
            data = database.storages.recent.read(
                [(storage.url, name, place) for place in places],
                lambda uncached: read_verified(storage, name, [places[each] for each in uncached]),
            )
        except StoreError as error:
            if error.condition == "STORE_ERROR.OBJECT_MISSING":
                database.run(lambda tx: require_same_store(tx, database.uuid), write=False)
                storage.require_folder(database.uuid)
            last = [row for other, row in group if other == partition][-1]
            raise unreadable(queue, partition, first.start_index, last.end_index, error) from error
        return [(_place_of(row), payload) for row, payload in zip(rows, data, strict=True)]

    payloads = dict(pair for pairs in in_parallel(read, list(by_object.values())) for pair in pairs)
    return [
        [row if row.object_id is None else row._replace(data=payloads[_place_of(row)]) for row in rows]
        for _, rows in pages
    ]


def _place_of(row: Row) -> tuple[int, int]:
    return row.object_id, row.start_byte


def read_verified(storage: ObjectStorage, name: str, places: Sequence[PayloadRange]) -> list[Buffer]:
    """Read payloads, and read them again if the checksum of one is wrong."""
    for _ in range(1 + _REREADS):
        data = storage.read(name, [(place.offset, place.length) for place in places])
        if all(place.matches(payload) for place, payload in zip(places, data, strict=True)):
            return data
    raise storage.damaged(name, "does not have the bytes that were written")


def _unreadable(queue: QueueRecord, partition: int, row: Row, reason: str) -> StoreError:
    error = StoreError(f"{reason}: the store is damaged; restore a backup", condition="SEGMENT_UNREADABLE")
    return unreadable(queue, partition, row.start_index, row.end_index, error)
