"""Cleaning of object storage, and the comparison of the objects there with the store.

Two kinds of objects are deleted, both when they have been so for a day: those whose payloads are all gone, by
compaction or retention, and orphans, which no transaction has entered. Until then a backup of the store can
be restored whose rows are in them, and a reader can finish. A commit refuses objects that were begun more
than half a day ago (:mod:`penstock.store.log.payloads`), so that none is deleted that a suspended process is
about to enter.

A copy of a store does not know the objects that were written after it was made, and must not delete them.
Whoever cleans up enters a new token into the store, and then writes it into an object beside the others. If
the store does not have the token that is there, another copy of the store has cleaned up since.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from penstock.errors import StoreError
from penstock.objects.location import parse_location
from penstock.objects.storage import ListedObject, ObjectStorage
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.payloads import ORPHAN_AGE, folder_of, object_name

CLEANING_INTERVAL = 3600 * 1_000_000
"""Microseconds between two times that background maintenance cleans up a location."""
_AT_ONCE = 1000
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Cleaned:
    """What was deleted."""

    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Cleaned) -> Cleaned:
        return Cleaned(self.objects + other.objects, self.bytes + other.bytes)


@dataclass(frozen=True)
class _Folder:
    """Where the objects of a queue, or of a dropped one, are."""

    queue_id: int
    queue: str | None
    """Its name; None if it was dropped."""
    location: str


def clean_up(
    database: Database, *, older_than: int = ORPHAN_AGE, interval: int = 0, take_over: bool = False
) -> Cleaned:
    """Delete objects that have been without payloads, or without any entry, for ``older_than`` microseconds.

    Locations that were cleaned less than ``interval`` microseconds ago are left out. ``take_over`` cleans
    also where another copy of the store has cleaned last: that copy is refused from then on.

    Raises
    ------
    StoreError
        When another copy of the store has cleaned up a location since this one was made; the others are
        cleaned.
    """
    by_location: dict[str, list[_Folder]] = {}
    for folder in database.run(_folders, write=False):
        by_location.setdefault(folder.location, []).append(folder)
    cleaned = Cleaned()
    errors: list[StoreError] = []
    for location, folders in by_location.items():
        try:
            storage = database.storages.at(location)
            begun_at = _begin(database, storage, interval, take_over)
            if begun_at is not None:
                for folder in folders:
                    cleaned += _clean(database, storage, folder, begun_at, older_than)
        except StoreError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return cleaned


def _folders(tx: Transaction) -> list[_Folder]:
    return [
        _Folder(row.queue_id, row.name, parse_location(row.payloads)) for row in tx.all("queues_with_objects")
    ]


def _begin(database: Database, storage: ObjectStorage, interval: int, take_over: bool) -> int | None:
    """Write a new token into the store and its location; return when that was, by the storage's clock in
    microseconds since 1970. None if the location was cleaned just now.
    """
    token = secrets.token_hex(_TOKEN_BYTES)

    def begin(tx: Transaction) -> int | None:
        now = tx.now()
        tx.run("insert_location", payloads=storage.url, now=now - interval)
        if not tx.run("begin_cleaning", payloads=storage.url, now=now, before=now - interval):
            return None
        tx.run("insert_cleaning", payloads=storage.url, token=token, now=now)
        return now

    begun = database.run(begin)
    if begun is None:
        return None
    name = _token_name(database)
    there = _token(storage, name)
    if there is not None and not take_over and not _is_known(database, storage, there):
        raise StoreError(
            f"another copy of this store has cleaned up {storage.url} since this one was copied or backed "
            "up, so this one does not know which objects are in use, and deletes none. If it is the one to "
            "keep, run `penstock store clean-up --take-over`; give a copy locations of its own",
            condition="STORE_ERROR.OBJECTS_OF_A_COPY",
            storage=storage.url,
        )
    storage.put(name, [token.encode()])
    # Earlier ones could still be written by a cleaning that has begun before this one.
    database.run(
        lambda tx: tx.run("forget_cleanings", payloads=storage.url, before=begun - ORPHAN_AGE),
        idempotent=True,
    )
    listed = [each for each in storage.listed(_token_folder(database)) if each.name == name]
    if not listed:
        raise storage.unavailable("an object that was just written is not listed")
    return listed[0].modified_at


def _is_known(database: Database, storage: ObjectStorage, token: str) -> bool:
    """Whether a token is of this store. Asked after it was read: another process may have begun meanwhile."""
    rows = database.run(lambda tx: tx.all("list_cleanings", payloads=storage.url), write=False)
    return token in {row.token for row in rows}


def _token_folder(database: Database) -> str:
    return f"{database.uuid}/cleaning/"


def _token_name(database: Database) -> str:
    return f"{_token_folder(database)}token"


def _token(storage: ObjectStorage, name: str) -> str | None:
    try:
        return bytes(storage.read(name, [(0, 2 * _TOKEN_BYTES)])[0]).decode("ascii", "replace")
    except StoreError as error:
        if error.condition != "STORE_ERROR.OBJECT_MISSING":
            raise
        return None


def _clean(
    database: Database, storage: ObjectStorage, folder: _Folder, begun_at: int, older_than: int
) -> Cleaned:
    cleaned = Cleaned()
    _mark_unused(database, folder)
    for rows in _unused(database, folder, older_than):
        storage.delete([_name(database, folder, row) for row in rows])
        cleaned += Cleaned(len(rows), sum(row.size for row in rows))
    listed = storage.listed(folder_of(database.uuid, folder.queue_id))
    orphans = _orphans(database, folder, listed, begun_at - older_than)
    storage.delete([each.name for each in orphans])
    if folder.queue is None and len(orphans) == len(listed):

        def forget(tx: Transaction) -> int:
            return tx.run("forget_dropped_payloads", queue_id=folder.queue_id, before=tx.now() - older_than)

        database.run(forget, idempotent=True)
    return cleaned + Cleaned(len(orphans), sum(each.size for each in orphans))


def _mark_unused(database: Database, folder: _Folder) -> None:
    def mark(tx: Transaction) -> int:
        # An append that is repeated may enter its object at the moment in which it is marked.
        tx.run("mark_used", queue_id=folder.queue_id)
        return tx.run("mark_unused", queue_id=folder.queue_id, now=tx.now(), most=_AT_ONCE)

    while database.run(mark, idempotent=True) == _AT_ONCE:
        pass


def _unused(database: Database, folder: _Folder, older_than: int) -> Iterator[list[Row]]:
    """Forget objects that have been without payloads for long, and yield them.

    An object that is forgotten and not deleted, since the process died, is an orphan.
    """

    def delete(tx: Transaction) -> list[Row]:
        before = tx.now() - older_than
        return tx.all("delete_unused", queue_id=folder.queue_id, before=before, most=_AT_ONCE)

    while rows := database.run(delete):
        yield rows


def _orphans(
    database: Database, folder: _Folder, listed: list[ListedObject], before: int
) -> list[ListedObject]:
    """The listed objects that were written before a time by the storage's clock, and that the store does not
    have.
    """
    old = [each for each in listed if each.modified_at < before]
    if not old:
        return []
    # A transaction that writes: in SQLite it waits for one that is about to enter an object.
    names = database.run(
        lambda tx: {_name(database, folder, row) for row in _entered(tx, folder)}, idempotent=True
    )
    return [each for each in old if each.name not in names]


def _entered(tx: Transaction, folder: _Folder) -> Iterator[Row]:
    after = -1
    while rows := tx.all("list_objects", queue_id=folder.queue_id, after=after, most=_AT_ONCE):
        yield from rows
        after = rows[-1].object_id


def _name(database: Database, folder: _Folder, row: Row) -> str:
    return object_name(database.uuid, folder.queue_id, row.object_id, row.suffix)


@dataclass
class ObjectsCheck:
    """What a queue's objects are like in the storage."""

    queue: str | None
    """The queue's name; None if it was dropped."""
    location: str
    objects: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    """The names of objects that rows are in, and that are not there."""
    damaged: list[str] = field(default_factory=list)
    """The names of those that have another size than they were written with."""
    unused: int = 0
    """Objects without payloads, which are deleted when they have been so for a day."""
    orphans: int = 0
    """Objects that no transaction has entered; new ones may be about to be."""
    orphan_bytes: int = 0


def check(database: Database) -> list[ObjectsCheck]:
    """Compare the objects in the storage with the store, queue by queue; those of dropped queues last."""
    folders = database.run(_folders, write=False)
    return [
        _checked(database, each)
        for each in sorted(folders, key=lambda each: (each.queue is None, each.queue))
    ]


def _checked(database: Database, folder: _Folder) -> ObjectsCheck:
    # Listed after the store is read: an object is there before it is entered. One that is deleted meanwhile
    # has been without payloads for a day.
    rows = database.run(lambda tx: list(_entered(tx, folder)), write=False)
    storage = database.storages.at(folder.location)
    listed = {each.name: each for each in storage.listed(folder_of(database.uuid, folder.queue_id))}
    return _compared(database, folder, rows, listed)


def _compared(
    database: Database, folder: _Folder, rows: list[Row], listed: dict[str, ListedObject]
) -> ObjectsCheck:
    checked = ObjectsCheck(folder.queue, folder.location, len(rows), sum(map(attrgetter("size"), rows)))
    for row in rows:
        name = _name(database, folder, row)
        there = listed.pop(name, None)
        if row.unused_at is not None:
            checked.unused += 1
        elif there is None:
            checked.missing.append(name)
        elif there.size != row.size:
            checked.damaged.append(name)
    checked.orphans = len(listed)
    checked.orphan_bytes = sum(each.size for each in listed.values())
    return checked
