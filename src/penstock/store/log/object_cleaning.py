"""Cleaning of object storage, and the comparison of the objects there with the store.

Two kinds of objects are deleted, both when they have been so for a day: those whose payloads are all gone, by
compaction or retention, and orphans, which no transaction has entered. Until then a backup of the store can
be restored whose rows are in them, and a reader can finish. A commit refuses objects that were begun more
than half a day ago (:mod:`penstock.store.log.payloads`), so that none is deleted that a suspended process is
about to enter.

A copy of a store has the same objects. It does not know those that were written since, and it may have
compacted or dropped rows that the original still has in objects: it must not delete any. So

* a location belongs to one database (:meth:`Transaction.instance`), and a copy is another one, unless it is a
  copy of a server's or a machine's whole disk. The store says which, and so does an object at the location,
  since anybody may make a store that says that it is another one;
* whoever cleans up enters a new token into the store, and then writes it into an object beside the others. If
  the store does not have the token that is there, another copy has cleaned up since. It then objects, by an
  object that is named after that token, and refuses to write or delete. Whoever finds an objection to a token
  of its own refuses, too, until somebody says which is the one to keep. That one takes the location over: its
  token stays in another object, so that every other copy knows that it is not the one;
* an orphan is deleted if it was a day old when the token that is there was entered and written. A copy that
  knows this token was made later, and has all objects of that age;
* an object without payloads is deleted if a token has been entered since it was seen without any, a day ago,
  and nobody has objected.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter

from penstock.errors import (
    PenstockError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from penstock.objects.location import stored_location
from penstock.objects.storage import ListedObject, ObjectStorage
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.payloads import ORPHAN_AGE, folder_of, is_object_name, object_name
from penstock.store.records.locations import (
    differ,
    enter_location,
    not_of_this_database,
    of_nobody,
    require_own_location,
    require_same_store,
)

log = logging.getLogger("penstock.store")

CLEANING_INTERVAL = 3600 * 1_000_000
"""Microseconds between two times that background maintenance cleans up a location."""
_AT_ONCE = 1000
_TOKEN_BYTES = 16
_TOKEN_TEXT = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TOKEN, _OWNER, _OBJECTION, _DATABASE = "token", ".owner", ".objection", ".database"
_MARK = b"\n"
"""What is in an object whose name says all; some services do not keep empty ones."""


@dataclass(frozen=True)
class Cleaned:
    """What was deleted."""

    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Cleaned) -> Cleaned:
        return Cleaned(self.objects + other.objects, self.bytes + other.bytes)


@dataclass(frozen=True)
class _Before:
    """What is old enough to be deleted."""

    written: int
    """Orphans that were written before, in microseconds since 1970 by the storage's clock."""
    unused: int
    """Objects that have been without payloads since before, in microseconds since 1970 by the database's
    clock."""


@dataclass(frozen=True)
class _Folder:
    """Where the objects of a queue, or of a dropped one, are."""

    queue_id: int
    queue: str | None
    """Its name; None if it was dropped."""
    location: str
    """As it is in the store, where somebody else may have written it."""


def clean_up(
    database: Database, *, older_than: int = ORPHAN_AGE, interval: int = 0, take_over: bool = False
) -> Cleaned:
    """Delete objects that have been without payloads, or without any entry, for ``older_than`` microseconds
    and since before the last cleaning.

    Locations that were cleaned less than ``interval`` microseconds ago are left out. ``take_over`` makes this
    database the one that a location belongs to: other copies of the store are refused from then on, and what
    is old enough is deleted at once.

    Raises
    ------
    StoreError
        When a location belongs to another copy of this store, or another one has cleaned it up; the other
        locations are cleaned.
    """
    by_location: dict[str, list[_Folder]] = {}
    if take_over:
        # Also those without a queue yet, or any more.
        rows = database.run(lambda tx: tx.all("list_locations"), write=False)
        by_location = {row.payloads: [] for row in rows}
    for folder in database.run(_folders, write=False):
        by_location.setdefault(folder.location, []).append(folder)
    cleaned = Cleaned()
    errors: list[PenstockError] = []
    for location, folders in by_location.items():
        try:
            storage = database.storages.at(stored_location(location))
            before = _begin(database, storage, older_than, interval, take_over)
        except PenstockError as error:
            errors.append(error)
            continue
        if before is None:
            continue
        for folder in folders:
            try:
                cleaned += _clean(database, storage, folder, before)
            except PenstockError as error:
                errors.append(error)
    if errors:
        # Missing rights are ordinary, and must not hide another error.
        raise min(errors, key=lambda error: isinstance(error, StoreReadOnlyError))
    return cleaned


def _folders(tx: Transaction) -> list[_Folder]:
    return [_Folder(row.queue_id, row.name, row.payloads) for row in tx.all("queues_with_objects")]


def _begin(
    database: Database, storage: ObjectStorage, older_than: int, interval: int, take_over: bool
) -> _Before | None:
    """Write a new token into the store and its location; return what is old enough now. None if the location
    was cleaned just now.
    """
    token = secrets.token_hex(_TOKEN_BYTES)

    def begin(tx: Transaction) -> tuple[int, str] | None:
        now = tx.now()
        enter_location(tx, storage.url, now - interval)
        if take_over:
            require_same_store(tx, database.uuid)
        else:
            require_own_location(tx, database.uuid, storage.url)
        before = now if take_over else now - interval
        if not tx.run("begin_cleaning", payloads=storage.url, now=now, before=before):
            return None
        tx.run("insert_cleaning", payloads=storage.url, token=token, now=now, taken_over=int(take_over))
        return now, tx.instance()

    begins = database.run(begin)
    if begins is None:
        return None
    begun, instance = begins
    if take_over:
        return _take_over(database, storage, token, begun, instance, older_than)
    try:
        found, own = _found(database, storage)
        if not found.databases():
            raise of_nobody(storage.url)
        if found.is_of_another(instance) or found.contest(own):
            database.run(
                lambda tx: tx.run("refuse_location", payloads=storage.url, now=tx.now()), idempotent=True
            )
            raise not_of_this_database(storage.url)
    except BaseException:
        _forget(database, storage, token)
        raise
    try:
        written = found.put(token)
    except (StoreReadOnlyError, StoreFullError):
        _forget(database, storage, token)
        raise
    earlier = [each for each in own.values() if each.begun_at < begun]
    # Another process may still be about to write one that is younger, or have read the one that was there.
    kept = max((each.begun_at for each in earlier if each.begun_at <= begun - ORPHAN_AGE), default=0)
    kept = min(kept, own[found.token].begun_at) if found.token is not None else 0

    def settle(tx: Transaction) -> None:
        # In this order: its own token may be as old by now.
        tx.run("forget_cleanings", payloads=storage.url, before=kept)
        tx.run("settle_cleaning", payloads=storage.url, token=token, now=tx.now())

    database.run(settle, idempotent=True)
    if found.token is None or found.written is None:
        return _Before(0, 0)
    # One could object to it since it was written.
    stood = [
        each for each in earlier if each.settled_at is not None and each.settled_at <= begun - older_than
    ]
    unused = max((each.begun_at for each in stood), default=0)
    return _Before(min(found.written, written, own[found.token].begun_at) - older_than, unused)


def _take_over(
    database: Database, storage: ObjectStorage, token: str, begun: int, instance: str, older_than: int
) -> _Before:
    """Make a location this database's: first in the storage, so that no other one deletes what this one
    writes.
    """
    written = _Found.at(database, storage).take_over(token, instance)

    def own(tx: Transaction) -> None:
        tx.run("settle_cleaning", payloads=storage.url, token=token, now=tx.now())
        tx.run("own_location", payloads=storage.url, instance=instance)

    database.run(own, idempotent=True)
    log.info(
        "the objects at %s belong to this database from now on",
        storage.url,
        extra={"action": "objects_taken_over", "storage": storage.url},
    )
    return _Before(min(written, begun) - older_than, begun - older_than)


def _found(database: Database, storage: ObjectStorage) -> tuple[_Found, dict[str, _Cleaning]]:
    """Return what there is at a location, and the tokens that the store has."""
    # Listed before anything is read: a token that is exchanged in between is taken for older than it is.
    found = _Found.at(database, storage)
    # Asked after it was read: another process may have begun meanwhile.
    own = _cleanings(database)
    while found.token is not None and found.token not in own:
        again = _Found.at(database, storage)
        if again.token == found.token:
            break
        # Forgotten since it was read, after another one was written.
        found, own = again, _cleanings(database)
    return found, own


def _forget(database: Database, storage: ObjectStorage, token: str) -> None:
    """Forget a token that was not written. If that fails, it stays, which does no harm."""
    with suppress(PenstockError):
        database.run(lambda tx: tx.run("forget_cleaning", payloads=storage.url, token=token), idempotent=True)


def claim(database: Database, storage: ObjectStorage) -> None:
    """Write to a location that it belongs to this database, before the store refers to it.

    Raises
    ------
    StoreError
        When it belongs to another copy of this store. The store refers to it from then on, so that it can be
        taken over.
    """

    def read(tx: Transaction) -> str:
        require_own_location(tx, database.uuid, storage.url)
        return tx.instance()

    instance = database.run(read, write=False)
    found = _Found.at(database, storage)
    if not found.databases():
        found.write_database(instance)
    elif found.is_of_another(instance):

        def refuse(tx: Transaction) -> None:
            enter_location(tx, storage.url, tx.now())
            tx.run("refuse_location", payloads=storage.url, now=tx.now())

        database.run(refuse, idempotent=True)
        raise not_of_this_database(storage.url)


@dataclass(frozen=True)
class _Cleaning:
    """A token that the store has."""

    begun_at: int
    settled_at: int | None
    """When it was written; None if it was not, or nobody knows."""


def _cleanings(database: Database) -> dict[str, _Cleaning]:
    rows = database.run(lambda tx: tx.all("list_cleanings"), write=False)
    return {row.token: _Cleaning(row.begun_at, row.settled_at) for row in rows}


@dataclass(frozen=True)
class _Found:
    """What those who have cleaned a location up before have left there."""

    database: Database
    storage: ObjectStorage
    names: frozenset[str]
    """In the folder of tokens."""
    token: str | None
    written: int | None
    """When the token was written, in microseconds since 1970 by the storage's clock."""

    @classmethod
    def at(cls, database: Database, storage: ObjectStorage) -> _Found:
        folder = _token_folder(database)
        with _in_its_place(storage, folder):
            listed = {each.name[len(folder) :]: each.modified_at for each in storage.listed(folder)}
        return cls(
            database, storage, frozenset(listed), _token(storage, f"{folder}{_TOKEN}"), listed.get(_TOKEN)
        )

    def databases(self) -> list[str]:
        """Return whose the location is said to be; there are several if a take-over was interrupted."""
        return [
            name.removesuffix(_DATABASE).replace("-", "/") for name in self.names if name.endswith(_DATABASE)
        ]

    def write_database(self, instance: str) -> None:
        self._write(_database_name(instance), _MARK)

    def is_of_another(self, instance: str) -> bool:
        """Whether the location is said to belong to another database than this one."""
        return any(differ(each, instance) for each in self.databases())

    def contest(self, own: Mapping[str, _Cleaning]) -> bool:
        """Object to another copy of the store if it has cleaned up; return whether it has, or objects to this
        one.
        """
        owners = [name.removesuffix(_OWNER) for name in self.names if name.endswith(_OWNER)]
        if any(owner not in own for owner in owners):
            # Somebody has chosen the other one.
            return True
        if self.token is not None and self.token not in own:
            if _TOKEN_TEXT.fullmatch(self.token):
                self._write(f"{self.token}{_OBJECTION}", _MARK)
            return True
        since = max((own[owner].begun_at for owner in owners), default=0)
        objections = (name.removesuffix(_OBJECTION) for name in self.names if name.endswith(_OBJECTION))
        # One to a token from before it was chosen is settled, and those who did not know of it do not object
        # any more.
        return any(token in own and own[token].begun_at > since for token in objections)

    def put(self, token: str) -> int:
        """Write a token; return when it was written."""
        self._write(_TOKEN, token.encode())
        folder = _token_folder(self.database)
        for each in self.storage.listed(folder):
            if each.name == f"{folder}{_TOKEN}":
                return each.modified_at
        raise self.storage.unavailable("an object that was just written is not listed")

    def take_over(self, token: str, instance: str) -> int:
        """Write a token, and that its database is the one to keep; return when it was written."""
        self.write_database(instance)
        self._write(f"{token}{_OWNER}", _MARK)
        written = self.put(token)
        own = {f"{each}{_OWNER}" for each in _cleanings(self.database)}
        new = _Found.at(self.database, self.storage).names - self.names - own
        if any(name.endswith(_OWNER) for name in new):
            # Another one took it over while this process was suspended.
            raise not_of_this_database(self.storage.url)
        settled = [name for name in self.names if name.endswith((_OWNER, _OBJECTION, _DATABASE))]
        settled = [name for name in settled if name != _database_name(instance)]
        self.storage.delete([f"{_token_folder(self.database)}{name}" for name in settled])
        return written

    def _write(self, name: str, data: bytes) -> None:
        name = f"{_token_folder(self.database)}{name}"
        with _in_its_place(self.storage, name):
            self.storage.put(name, [data])


@contextmanager
def _in_its_place(storage: ObjectStorage, name: str) -> Iterator[None]:
    """Say what to do if something else is where tokens are."""
    try:
        yield
    except StoreError as error:
        if error.condition != "STORE_ERROR.OBJECT_DAMAGED":
            raise
        raise StoreError(
            f"there is something else at {name} in {storage.url}, where Penstock notes whose the objects "
            f"are, or at a folder above it ({error.message}). If a folder was moved, put it back; if only "
            "this entry is wrong, delete it and run `penstock store clean-up --take-over`",
            condition="STORE_ERROR.OBJECT_DAMAGED",
            storage=storage.url,
            object=name,
        ) from error


def _database_name(instance: str) -> str:
    return f"{instance.replace('/', '-')}{_DATABASE}"


def _token_folder(database: Database) -> str:
    return f"{database.uuid}/cleaning/"


def _token(storage: ObjectStorage, name: str) -> str | None:
    try:
        return bytes(storage.read(name, [(0, 2 * _TOKEN_BYTES)])[0]).decode("ascii", "replace")
    except StoreError as error:
        if error.condition == "STORE_ERROR.OBJECT_DAMAGED":
            # Nobody's.
            return ""
        if error.condition != "STORE_ERROR.OBJECT_MISSING":
            raise
        return None


def _clean(database: Database, storage: ObjectStorage, folder: _Folder, before: _Before) -> Cleaned:
    cleaned = Cleaned()
    _mark_unused(database, folder)
    for rows in _unused(database, folder, before.unused):
        storage.delete([_name(database, folder, row) for row in rows])
        cleaned += Cleaned(len(rows), sum(row.size for row in rows))
    listed = _objects(database, storage, folder)
    orphans = _orphans(database, folder, listed, before.written)
    storage.delete([each.name for each in orphans])
    if folder.queue is None and len(orphans) == len(listed):

        def forget(tx: Transaction) -> int:
            return tx.run("forget_dropped_payloads", queue_id=folder.queue_id, before=before.unused)

        database.run(forget, idempotent=True)
    return cleaned + Cleaned(len(orphans), sum(each.size for each in orphans))


def _objects(database: Database, storage: ObjectStorage, folder: _Folder) -> list[ListedObject]:
    """Return the objects of a queue in the storage. Anything else there is somebody else's."""
    prefix = folder_of(database.uuid, folder.queue_id)
    return [each for each in storage.listed(prefix) if is_object_name(each.name[len(prefix) :])]


def _mark_unused(database: Database, folder: _Folder) -> None:
    def mark(tx: Transaction) -> int:
        # An append that is repeated may enter its object at the moment in which it is marked.
        tx.run("mark_used", queue_id=folder.queue_id)
        return tx.run("mark_unused", queue_id=folder.queue_id, now=tx.now(), most=_AT_ONCE)

    while database.run(mark, idempotent=True) == _AT_ONCE:
        pass


def _unused(database: Database, folder: _Folder, before: int) -> Iterator[list[Row]]:
    """Forget objects that have been without payloads since before a time, and yield them.

    An object that is forgotten and not deleted, since the process died, is an orphan.
    """

    def delete(tx: Transaction) -> list[Row]:
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


def _entered_and_used(tx: Transaction, folder: _Folder) -> tuple[list[Row], set[int]]:
    """Return the objects that the store has, and the ids of those that have payloads, whatever is noted of
    them.
    """
    rows = list(_entered(tx, folder))
    used: set[int] = set()
    for start in range(0, len(rows), _AT_ONCE):
        page = rows[start : start + _AT_ONCE]
        where = {"queue_id": folder.queue_id, "first": page[0].object_id, "last": page[-1].object_id}
        used.update(row.object_id for row in tx.all("used_objects", **where))
    return rows, used


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
    error: str | None = None
    """Why they could not be compared; nothing else is known of them then."""


def check(database: Database) -> list[ObjectsCheck]:
    """Compare the objects in the storage with the store, queue by queue; those of dropped queues last.

    A queue whose objects cannot be listed does not hide the others.
    """
    folders = database.run(_folders, write=False)
    # Each attempt waits for a storage that does not answer.
    away: dict[str, ObjectsCheck] = {}
    found = []
    for folder in sorted(folders, key=lambda each: (each.queue is None, each.queue)):
        checked = away.get(folder.location)
        if checked is None:
            checked = _checked(database, folder, away)
        found.append(replace(checked, queue=folder.queue))
    return found


def _checked(database: Database, folder: _Folder, away: dict[str, ObjectsCheck]) -> ObjectsCheck:
    # Listed after the store is read: an object is there before it is entered. One that is deleted meanwhile
    # has been without payloads for a day.
    rows, used = database.run(lambda tx: _entered_and_used(tx, folder), write=False)
    try:
        storage = database.storages.at(stored_location(folder.location))
        listed = {each.name: each for each in _objects(database, storage, folder)}
    except PenstockError as error:
        checked = ObjectsCheck(folder.queue, str(folder.location), error=error.message)
        if isinstance(error, StoreUnavailableError):
            away[folder.location] = checked
        return checked
    return _compared(database, folder, rows, used, listed)


def _compared(
    database: Database, folder: _Folder, rows: list[Row], used: set[int], listed: dict[str, ListedObject]
) -> ObjectsCheck:
    checked = ObjectsCheck(folder.queue, folder.location, len(rows), sum(map(attrgetter("size"), rows)))
    for row in rows:
        name = _name(database, folder, row)
        there = listed.pop(name, None)
        if row.object_id not in used:
            checked.unused += 1
        elif there is None:
            checked.missing.append(name)
        elif there.size != row.size:
            checked.damaged.append(name)
    checked.orphans = len(listed)
    checked.orphan_bytes = sum(each.size for each in listed.values())
    return checked
