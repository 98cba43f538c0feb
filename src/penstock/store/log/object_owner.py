"""Ownership of the objects at a location of object storage, so that copies of a store do not delete them.

A copy of a store refers to the same objects as the original. It does not know objects that were written
later, and it may have compacted or dropped rows that the original still has in objects, so it must not delete
any. Therefore:

* A location belongs to one database (:meth:`Transaction.instance`). A copy is another database, unless it is
  a copy of the whole disk of a server or machine. Both the store and an object at the location record the
  owner, since any store could claim to be the owner.
* Each cleanup records a new token in the store, and then writes it into an object at the location. If the
  token at the location is not in the store, another copy has cleaned up since. The store then writes an
  objection, an object named after that token, and refuses to write or delete. A store that finds an objection
  to one of its own tokens refuses as well, until the user chooses the copy to keep. That copy takes over the
  location: its token stays in another object, which tells all other copies that they were not chosen.
* An orphan is deleted if it was a day old when the token at the location was recorded and written. A copy of
  the store that has this token was made later, and has all objects of that age.
* An object without payloads is deleted if it was first seen without any at least a day ago, a token has been
  recorded since, and there is no objection.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from penstock.errors import PenstockError, StoreError, StoreFullError, StoreReadOnlyError
from penstock.objects.storage import ObjectStorage
from penstock.store.database import Database, Transaction
from penstock.store.log.payloads import ORPHAN_AGE
from penstock.store.records.locations import (
    differ,
    enter_location,
    not_of_this_database,
    of_nobody,
    require_own_location,
    require_same_store,
)

log = logging.getLogger("penstock.store")

_TOKEN_BYTES = 16
_TOKEN_TEXT = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TOKEN, _OWNER, _OBJECTION, _DATABASE = "token", ".owner", ".objection", ".database"
_MARK = b"\n"
"""The content of an object that matters only by its name; some services do not keep empty objects."""


@dataclass(frozen=True)
class OldEnough:
    """The times before which objects are old enough to be deleted, in microseconds since 1970."""

    written: int
    """For orphans: when they were written, by the storage's clock."""
    unused: int
    """For objects without payloads: when this was first seen, by the database's clock."""


def claim(database: Database, storage: ObjectStorage) -> None:
    """Record at a location that it belongs to this database, before the store refers to it.

    Raises
    ------
    StoreError
        When the location belongs to another copy of this store. The store records the location anyway, so
        that it can be taken over.
    """

    def read(tx: Transaction) -> str:
        require_own_location(tx, database.uuid, storage.url)
        return tx.instance()

    instance = database.run(read, write=False)
    found = Marks.at(database, storage)
    if not found.databases():
        found.write_database(instance)
    elif found.is_of_another(instance):

        def refuse(tx: Transaction) -> None:
            enter_location(tx, storage.url, tx.now())
            tx.run("refuse_location", payloads=storage.url, now=tx.now())

        database.run(refuse, idempotent=True)
        raise not_of_this_database(storage.url)


def begin_cleaning(
    database: Database, storage: ObjectStorage, older_than: int, interval: int, take_over: bool
) -> OldEnough | None:
    """Write a new token into the store and its location; return what is old enough to delete, or None if the
    location was cleaned up recently.
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
        found, own = _uncontested(database, storage, instance)
    except BaseException:
        _forget(database, storage, token)
        raise
    try:
        written = found.put(token)
    except (StoreReadOnlyError, StoreFullError):
        _forget(database, storage, token)
        raise
    earlier = [each for each in own.values() if each.begun_at < begun]
    _settle(database, storage, token, _kept(found, own, earlier, begun))
    if found.token is None or found.written is None:
        return OldEnough(0, 0)
    # Only tokens that other copies have had ``older_than`` microseconds to object to.
    stood = [
        each for each in earlier if each.settled_at is not None and each.settled_at <= begun - older_than
    ]
    unused = max((each.begun_at for each in stood), default=0)
    return OldEnough(min(found.written, written, own[found.token].begun_at) - older_than, unused)


def _uncontested(
    database: Database, storage: ObjectStorage, instance: str
) -> tuple[Marks, dict[str, _Cleaning]]:
    """Return the marks at a location, and the tokens that the store has.

    Raises
    ------
    StoreError
        When the location belongs to another database, or another copy of the store has cleaned it up or has
        objected.
    """
    found, own = _found(database, storage)
    if not found.databases():
        raise of_nobody(storage.url)
    if found.is_of_another(instance) or found.contest(own):
        database.run(
            lambda tx: tx.run("refuse_location", payloads=storage.url, now=tx.now()), idempotent=True
        )
        raise not_of_this_database(storage.url)
    return found, own


def _kept(found: Marks, own: Mapping[str, _Cleaning], earlier: Sequence[_Cleaning], begun: int) -> int:
    """Return the time from which on the store keeps its tokens."""
    if found.token is None:
        return 0
    # Another process may still be about to write a younger token, or may have read the previous one.
    kept = max((each.begun_at for each in earlier if each.begun_at <= begun - ORPHAN_AGE), default=0)
    return min(kept, own[found.token].begun_at)


def _settle(database: Database, storage: ObjectStorage, token: str, kept: int) -> None:
    """Record that a token was written, and delete the records of tokens from before ``kept``."""

    def settle(tx: Transaction) -> None:
        # In this order: by now this token may be that old itself.
        tx.run("forget_cleanings", payloads=storage.url, before=kept)
        tx.run("settle_cleaning", payloads=storage.url, token=token, now=tx.now())

    database.run(settle, idempotent=True)


def _take_over(
    database: Database, storage: ObjectStorage, token: str, begun: int, instance: str, older_than: int
) -> OldEnough:
    """Make a location belong to this database: first in the storage, so that no other database deletes what
    this one writes.
    """
    written = Marks.at(database, storage).take_over(token, instance)

    def own(tx: Transaction) -> None:
        tx.run("settle_cleaning", payloads=storage.url, token=token, now=tx.now())
        tx.run("own_location", payloads=storage.url, instance=instance)

    database.run(own, idempotent=True)
    log.info(
        "the objects at %s belong to this database from now on",
        storage.url,
        extra={"action": "objects_taken_over", "storage": storage.url},
    )
    return OldEnough(min(written, begun) - older_than, begun - older_than)


def _found(database: Database, storage: ObjectStorage) -> tuple[Marks, dict[str, _Cleaning]]:
    """Return the marks at a location, and the tokens that the store has."""
    # List before reading: if the token is replaced in between, the new one is taken to be older than it is.
    found = Marks.at(database, storage)
    # Query the store after reading the token: another process may have begun a cleanup meanwhile.
    own = _cleanings(database)
    while found.token is not None and found.token not in own:
        again = Marks.at(database, storage)
        if again.token == found.token:
            break
        # The token was replaced after it was read, and its record deleted.
        found, own = again, _cleanings(database)
    return found, own


def _forget(database: Database, storage: ObjectStorage, token: str) -> None:
    """Delete the record of a token that was not written; if that fails, the record stays, harmlessly."""
    with suppress(PenstockError):
        database.run(lambda tx: tx.run("forget_cleaning", payloads=storage.url, token=token), idempotent=True)


@dataclass(frozen=True)
class _Cleaning:
    """The store's record of a token."""

    begun_at: int
    settled_at: int | None
    """When the token was written to the location; None if it was not, or if that is not known."""


def _cleanings(database: Database) -> dict[str, _Cleaning]:
    rows = database.run(lambda tx: tx.all("list_cleanings"), write=False)
    return {row.token: _Cleaning(row.begun_at, row.settled_at) for row in rows}


@dataclass(frozen=True)
class Marks:
    """The marks that earlier cleanups have left at a location."""

    database: Database
    storage: ObjectStorage
    names: frozenset[str]
    """The names of the objects in the folder of tokens."""
    token: str | None
    written: int | None
    """When the token was written, in microseconds since 1970 by the storage's clock."""

    @classmethod
    def at(cls, database: Database, storage: ObjectStorage) -> Marks:
        folder = _token_folder(database)
        with _in_its_place(storage, folder):
            listed = {each.name[len(folder) :]: each.modified_at for each in storage.listed(folder)}
        return cls(
            database, storage, frozenset(listed), _token(storage, f"{folder}{_TOKEN}"), listed.get(_TOKEN)
        )

    def databases(self) -> list[str]:
        """Return the databases that the marks name as owners; several if a take-over was interrupted."""
        return [
            name.removesuffix(_DATABASE).replace("-", "/") for name in self.names if name.endswith(_DATABASE)
        ]

    def write_database(self, instance: str) -> None:
        self._write(_database_name(instance), _MARK)

    def is_of_another(self, instance: str) -> bool:
        """Whether the marks say that the location belongs to a different database."""
        return any(differ(each, instance) for each in self.databases())

    def contest(self, own: Mapping[str, _Cleaning]) -> bool:
        """Object if another copy of the store has cleaned up; return whether one has, or has objected to this
        copy.
        """
        owners = [name.removesuffix(_OWNER) for name in self.names if name.endswith(_OWNER)]
        if any(owner not in own for owner in owners):
            # The user has chosen another copy.
            return True
        if self.token is not None and self.token not in own:
            if _TOKEN_TEXT.fullmatch(self.token):
                self._write(f"{self.token}{_OBJECTION}", _MARK)
            return True
        since = max((own[owner].begun_at for owner in owners), default=0)
        objections = (name.removesuffix(_OBJECTION) for name in self.names if name.endswith(_OBJECTION))
        # Objections to tokens from before this copy was chosen are settled, and copies that see the choice no
        # longer object.
        return any(token in own and own[token].begun_at > since for token in objections)

    def put(self, token: str) -> int:
        """Write a token, and return when it was written."""
        self._write(_TOKEN, token.encode())
        folder = _token_folder(self.database)
        for each in self.storage.listed(folder):
            if each.name == f"{folder}{_TOKEN}":
                return each.modified_at
        raise self.storage.unavailable("an object that was just written is not listed")

    def take_over(self, token: str, instance: str) -> int:
        """Write a token and a mark that this database is the one to keep; return the time of the token."""
        self.write_database(instance)
        self._write(f"{token}{_OWNER}", _MARK)
        written = self.put(token)
        own = {f"{each}{_OWNER}" for each in _cleanings(self.database)}
        new = Marks.at(self.database, self.storage).names - self.names - own
        if any(name.endswith(_OWNER) for name in new):
            # Another database took over the location while this process was suspended.
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
    """Explain what to do if something other than a token is in a token's place."""
    try:
        yield
    except StoreError as error:
        if error.condition != "STORE_ERROR.OBJECT_DAMAGED":
            raise
        raise StoreError(
            f"{name} in {storage.url}, where Penstock records the owner of the objects, is not what it "
            f"wrote, or a folder above it is not ({error.message}). If a folder was moved, put it back; if "
            "only this entry is wrong, delete it and run `penstock store clean-up --take-over`",
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
            # A token of no store.
            return ""
        if error.condition != "STORE_ERROR.OBJECT_MISSING":
            raise
        return None
