"""Ownership of the objects at a location of object storage, so that copies of a store do not delete them.

A copy of a store refers to the same objects as the original. The copy does not know about objects that the
original has written since, and it may have compacted or dropped rows that the original still has in objects.
So a copy must not delete any objects. These rules prevent it:

* A location belongs to one database (:meth:`Transaction.instance`). A copy is a different database, unless
  the whole disk of a server or machine was copied. Both the store and an object at the location record the
  owner, since any store could claim to be the owner.
* Each cleanup records a new token in the store, and then writes it into an object at the location. If the
  token at the location is not in the store, another copy has cleaned up since. The store then writes an
  objection, which is an object named after that token, and refuses to write or delete. A store that finds an
  objection to one of its own tokens also refuses, until the user chooses the copy to keep. That copy takes
  over the location. Its token stays in another object, from which all other copies learn that they were not
  chosen.
* An orphan is deleted if it was a day old when the token at the location was recorded and written. A copy of
  the store that has this token was made later, and so has recorded all objects of that age.
* An object without segments is deleted if a cleanup first found it without any at least a day ago, a token
  has been recorded since, and there is no objection.
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
    are_different_databases,
    other_owner_error,
    owner_unknown_error,
    record_location,
    require_own_location,
    require_same_store,
)

log = logging.getLogger("penstock.store")

_TOKEN_BYTES = 16
_TOKEN_TEXT = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TOKEN, _OWNER, _OBJECTION, _DATABASE = "token", ".owner", ".objection", ".database"
_MARKER_CONTENT = b"\n"
"""The content of markers of which only the name matters. Some services do not store empty objects."""


@dataclass(frozen=True)
class DeletionBounds:
    """The times, in microseconds since 1970, that objects must be older than to be deleted."""

    written: int
    """For orphans: the time when they were written, by the storage's clock."""
    unused: int
    """For objects without segments: the time when a cleanup first found them, by the database's clock."""


def claim(database: Database, storage: ObjectStorage) -> None:
    """Check that a location is usable, and record there that it belongs to this database. Call it before the
    store refers to the location.

    Raises
    ------
    StoreError
        If the location belongs to another copy of this store. The store records the location anyway, so that
        it can take it over later.
    """

    def read(tx: Transaction) -> tuple[str, bool]:
        require_own_location(tx, database.uuid, storage.url)
        return tx.instance(), tx.one("find_location", payloads=storage.url).instance is not None

    instance, is_known = database.run(read, write=False)
    if is_known:
        storage.require_folder(database.uuid)
    storage.check(f"{database.uuid}/check")
    markers = LocationMarkers.read_from(database, storage)
    if not markers.owning_databases():
        markers.write_database(instance)
    elif markers.belongs_to_another(instance):

        def refuse(tx: Transaction) -> None:
            record_location(tx, storage.url, tx.now())
            tx.run("refuse_location", payloads=storage.url, now=tx.now())

        database.run(refuse, idempotent=True)
        raise other_owner_error(storage.url)


def begin_cleanup(
    database: Database, storage: ObjectStorage, older_than: int, interval: int, take_over: bool
) -> DeletionBounds | None:
    """Write a new token to the store and the location. Return the bounds for deletion, or None if the
    location was cleaned up recently.
    """
    token = secrets.token_hex(_TOKEN_BYTES)

    def begin(tx: Transaction) -> tuple[int, str] | None:
        now = tx.now()
        record_location(tx, storage.url, now - interval)
        if take_over:
            require_same_store(tx, database.uuid)
        else:
            require_own_location(tx, database.uuid, storage.url)
        due_before = now if take_over else now - interval
        if not tx.run("begin_cleaning", payloads=storage.url, now=now, before=due_before):
            return None
        tx.run("insert_cleaning", payloads=storage.url, token=token, now=now, taken_over=int(take_over))
        return now, tx.instance()

    started = database.run(begin)
    if started is None:
        return None
    started_at, instance = started
    if take_over:
        return _take_over(database, storage, token, started_at, instance, older_than)
    try:
        markers, records = _require_uncontested(database, storage, instance)
    except BaseException:
        _forget_token(database, storage, token)
        raise
    try:
        written_at = markers.write_token(token)
    except (StoreReadOnlyError, StoreFullError):
        _forget_token(database, storage, token)
        raise
    earlier = [record for record in records.values() if record.begun_at < started_at]
    _settle_token(database, storage, token, _oldest_kept_token(markers, records, earlier, started_at))
    if markers.token is None or markers.written is None:
        return DeletionBounds(0, 0)
    # Use only tokens that other copies have had at least ``older_than`` microseconds to object to.
    uncontested = [
        record
        for record in earlier
        if record.settled_at is not None and record.settled_at <= started_at - older_than
    ]
    unused_before = max((record.begun_at for record in uncontested), default=0)
    return DeletionBounds(
        min(markers.written, written_at, records[markers.token].begun_at) - older_than, unused_before
    )


def _require_uncontested(
    database: Database, storage: ObjectStorage, instance: str
) -> tuple[LocationMarkers, dict[str, _CleanupRecord]]:
    """Return the markers at a location, and the tokens that the store has.

    Raises
    ------
    StoreError
        If the location belongs to another database, or another copy of the store has cleaned it up or
        objected.
    """
    markers, records = _read_markers(database, storage)
    if not markers.owning_databases():
        storage.require_folder(database.uuid)
        raise owner_unknown_error(storage.url)
    if markers.belongs_to_another(instance) or markers.is_contested(records):
        database.run(
            lambda tx: tx.run("refuse_location", payloads=storage.url, now=tx.now()), idempotent=True
        )
        raise other_owner_error(storage.url)
    return markers, records


def _oldest_kept_token(
    markers: LocationMarkers,
    records: Mapping[str, _CleanupRecord],
    earlier: Sequence[_CleanupRecord],
    started_at: int,
) -> int:
    """Return the time before which the store may delete the records of its tokens."""
    if markers.token is None:
        return 0
    # Another process may be about to write a newer token, or may have read the previous one.
    kept_from = max(
        (record.begun_at for record in earlier if record.begun_at <= started_at - ORPHAN_AGE), default=0
    )
    return min(kept_from, records[markers.token].begun_at)


def _settle_token(database: Database, storage: ObjectStorage, token: str, kept_from: int) -> None:
    """Record that a token was written, and delete the records of tokens older than ``kept_from``."""

    def settle(tx: Transaction) -> None:
        # Delete before settling: by now this token may be that old itself.
        tx.run("forget_cleanings", payloads=storage.url, before=kept_from)
        tx.run("settle_cleaning", payloads=storage.url, token=token, now=tx.now())

    database.run(settle, idempotent=True)


def _take_over(
    database: Database, storage: ObjectStorage, token: str, started_at: int, instance: str, older_than: int
) -> DeletionBounds:
    """Make this database the owner of a location. Write this to object storage first, so that no other
    database deletes what this one writes.
    """
    written_at = LocationMarkers.read_from(database, storage).take_over(token, instance)

    def own(tx: Transaction) -> None:
        tx.run("settle_cleaning", payloads=storage.url, token=token, now=tx.now())
        tx.run("own_location", payloads=storage.url, instance=instance)

    database.run(own, idempotent=True)
    log.info(
        "the objects at %s belong to this database from now on",
        storage.url,
        extra={"action": "objects_taken_over", "storage": storage.url},
    )
    return DeletionBounds(min(written_at, started_at) - older_than, started_at - older_than)


def _read_markers(
    database: Database, storage: ObjectStorage
) -> tuple[LocationMarkers, dict[str, _CleanupRecord]]:
    """Return the markers at a location, and the tokens that the store has."""
    # List before reading. If the token is replaced in between, the new one only seems older than it is.
    markers = LocationMarkers.read_from(database, storage)
    # Query the store after reading the token: another process may have begun a cleanup in between.
    records = _cleanup_records(database)
    while markers.token is not None and markers.token not in records:
        reread = LocationMarkers.read_from(database, storage)
        if reread.token == markers.token:
            break
        # After the token was read, it was replaced and its record was deleted.
        markers, records = reread, _cleanup_records(database)
    return markers, records


def _forget_token(database: Database, storage: ObjectStorage, token: str) -> None:
    """Delete the record of a token that was not written. If that fails, the record stays, which does no
    harm.
    """
    with suppress(PenstockError):
        database.run(lambda tx: tx.run("forget_cleaning", payloads=storage.url, token=token), idempotent=True)


@dataclass(frozen=True)
class _CleanupRecord:
    """The store's record of a token."""

    begun_at: int
    settled_at: int | None
    """When the token was written to the location; None if it was not written, or if that is unknown."""


def _cleanup_records(database: Database) -> dict[str, _CleanupRecord]:
    rows = database.run(lambda tx: tx.all("list_cleanings"), write=False)
    return {row.token: _CleanupRecord(row.begun_at, row.settled_at) for row in rows}


@dataclass(frozen=True)
class LocationMarkers:
    """The marker objects that earlier cleanups have written to a location."""

    database: Database
    storage: ObjectStorage
    names: frozenset[str]
    """The names of the objects in the folder of tokens."""
    token: str | None
    written: int | None
    """When the token was written, in microseconds since 1970 by the storage's clock."""

    @classmethod
    def read_from(cls, database: Database, storage: ObjectStorage) -> LocationMarkers:
        folder = _token_folder(database)
        with _explaining_misplaced(storage, folder):
            listed = {stored.name[len(folder) :]: stored.modified_at for stored in storage.listed(folder)}
        return cls(
            database,
            storage,
            frozenset(listed),
            _read_token(storage, f"{folder}{_TOKEN}"),
            listed.get(_TOKEN),
        )

    def owning_databases(self) -> list[str]:
        """Return the databases that the markers name as owners. There are several if a take-over was
        interrupted.
        """
        return [
            name.removesuffix(_DATABASE).replace("-", "/") for name in self.names if name.endswith(_DATABASE)
        ]

    def write_database(self, instance: str) -> None:
        self._write(_database_marker(instance), _MARKER_CONTENT)

    def belongs_to_another(self, instance: str) -> bool:
        """Return whether the markers say that the location belongs to a different database."""
        return any(are_different_databases(database, instance) for database in self.owning_databases())

    def is_contested(self, records: Mapping[str, _CleanupRecord]) -> bool:
        """Return whether another copy of the store has cleaned up or objected to this copy.

        If another copy has cleaned up, write an objection to its token.
        """
        owners = [name.removesuffix(_OWNER) for name in self.names if name.endswith(_OWNER)]
        if any(owner not in records for owner in owners):
            # The user has chosen another copy.
            return True
        if self.token is not None and self.token not in records:
            if _TOKEN_TEXT.fullmatch(self.token):
                self._write(f"{self.token}{_OBJECTION}", _MARKER_CONTENT)
            return True
        chosen_at = max((records[owner].begun_at for owner in owners), default=0)
        objections = (name.removesuffix(_OBJECTION) for name in self.names if name.endswith(_OBJECTION))
        # Choosing this copy has settled the objections to its earlier tokens. Copies that see the choice no
        # longer object.
        return any(token in records and records[token].begun_at > chosen_at for token in objections)

    def write_token(self, token: str) -> int:
        """Write a token, and return when it was written."""
        self._write(_TOKEN, token.encode())
        folder = _token_folder(self.database)
        for stored in self.storage.listed(folder):
            if stored.name == f"{folder}{_TOKEN}":
                return stored.modified_at
        raise self.storage.unavailable("an object that was just written is not listed")

    def take_over(self, token: str, instance: str) -> int:
        """Write a token, and a marker that says that this database is the one to keep. Return the time of the
        token.
        """
        self.write_database(instance)
        self._write(f"{token}{_OWNER}", _MARKER_CONTENT)
        written_at = self.write_token(token)
        own_markers = {f"{own_token}{_OWNER}" for own_token in _cleanup_records(self.database)}
        new_markers = LocationMarkers.read_from(self.database, self.storage).names - self.names - own_markers
        if any(name.endswith(_OWNER) for name in new_markers):
            # Another database took over the location while this process was suspended.
            raise other_owner_error(self.storage.url)
        obsolete = [name for name in self.names if name.endswith((_OWNER, _OBJECTION, _DATABASE))]
        obsolete = [name for name in obsolete if name != _database_marker(instance)]
        self.storage.delete([f"{_token_folder(self.database)}{name}" for name in obsolete])
        return written_at

    def _write(self, name: str, data: bytes) -> None:
        name = f"{_token_folder(self.database)}{name}"
        with _explaining_misplaced(self.storage, name):
            self.storage.put(name, [data])


@contextmanager
def _explaining_misplaced(storage: ObjectStorage, name: str) -> Iterator[None]:
    """Add what to do to the error that is raised when something else is in a marker's place."""
    try:
        yield
    except StoreError as error:
        if error.condition != "STORE_ERROR.OBJECT_DAMAGED":
            raise
        raise StoreError(
            f"Penstock records the owner of the objects in {name} in {storage.url}, but this object or a "
            f"folder above it was changed ({error.message}). If a folder was moved, move it back. If only "
            "this object is wrong, delete it and run `penstock store clean-up --take-over`",
            condition="STORE_ERROR.OBJECT_DAMAGED",
            storage=storage.url,
            object=name,
        ) from error


def _database_marker(instance: str) -> str:
    return f"{instance.replace('/', '-')}{_DATABASE}"


def _token_folder(database: Database) -> str:
    return f"{database.uuid}/cleaning/"


def _read_token(storage: ObjectStorage, name: str) -> str | None:
    try:
        return bytes(storage.read(name, [(0, 2 * _TOKEN_BYTES)])[0]).decode("ascii", "replace")
    except StoreError as error:
        if error.condition == "STORE_ERROR.OBJECT_DAMAGED":
            # No store has written this token.
            return ""
        if error.condition != "STORE_ERROR.OBJECT_MISSING":
            raise
        return None
