"""Cleaning of object storage.

Two kinds of objects are deleted, each after a day: unused objects, whose segments compaction or retention has
removed, and orphans, which no transaction has recorded. During that day readers can finish, and users can
restore a backup of the store that needs the objects. A commit refuses objects whose writing began more than
half a day ago (:mod:`penstock.store.log.payloads`). So cleanup never deletes an object that a suspended
process is about to record. If there are several copies of a store, only one of them deletes objects
(:mod:`penstock.store.log.object_owner`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import PenstockError, StoreReadOnlyError
from penstock.objects.location import stored_location
from penstock.objects.storage import ListedObject, ObjectStorage
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.object_folders import OBJECTS_PER_STATEMENT, ObjectFolder, object_folders
from penstock.store.log.object_owner import DeletionBounds, begin_cleanup
from penstock.store.log.payloads import ORPHAN_AGE

CLEANUP_INTERVAL = 3600 * 1_000_000
"""The time between two cleanups of a location by background maintenance, in microseconds."""


@dataclass(frozen=True)
class CleanupResult:
    """The number and size of the deleted objects."""

    objects: int = 0
    bytes: int = 0

    def __add__(self, other: CleanupResult) -> CleanupResult:
        return CleanupResult(self.objects + other.objects, self.bytes + other.bytes)


def clean_up(
    database: Database, *, older_than: int = ORPHAN_AGE, interval: int = 0, take_over: bool = False
) -> CleanupResult:
    """Delete objects that have been unused or orphaned for at least ``older_than`` microseconds, and already
    were at the last cleanup.

    Locations that were cleaned up less than ``interval`` microseconds ago are left out. ``take_over`` makes
    this database the owner of its locations, and deletes objects that are old enough immediately. From then
    on, other copies of the store cannot write or delete there.

    Raises
    ------
    StoreError
        If a location belongs to another copy of this store, or another copy has cleaned it up. All other
        locations are cleaned up.
    """
    by_location: dict[str, list[ObjectFolder]] = {}
    if take_over:
        # This includes locations that have no queue yet or no longer have one.
        locations = database.run(lambda tx: tx.all("list_locations"), write=False)
        by_location = {row.payloads: [] for row in locations}
    for folder in object_folders(database):
        by_location.setdefault(folder.location, []).append(folder)
    cleaned = CleanupResult()
    errors: list[PenstockError] = []
    for location, folders in by_location.items():
        try:
            storage = database.storages.at(stored_location(location))
            bounds = begin_cleanup(database, storage, older_than, interval, take_over)
        except PenstockError as error:
            errors.append(error)
            continue
        if bounds is None:
            continue
        for folder in folders:
            try:
                cleaned += _clean_folder(database, storage, folder, bounds)
            except PenstockError as error:
                errors.append(error)
    if errors:
        # Missing permissions are common, and must not hide other errors.
        raise min(errors, key=lambda error: isinstance(error, StoreReadOnlyError))
    return cleaned


def _clean_folder(
    database: Database, storage: ObjectStorage, folder: ObjectFolder, bounds: DeletionBounds
) -> CleanupResult:
    cleaned = CleanupResult()
    _mark_unused(database, folder)
    for rows in _delete_unused_records(database, folder, bounds.unused):
        storage.delete([folder.name_of(row) for row in rows])
        cleaned += CleanupResult(len(rows), sum(row.size for row in rows))
    stored = folder.list_stored(storage)
    orphans = _orphans(database, folder, stored, bounds.written)
    storage.delete([orphan.name for orphan in orphans])
    if folder.queue is None and len(orphans) == len(stored):

        def forget(tx: Transaction) -> int:
            return tx.run("forget_dropped_payloads", queue_id=folder.queue_id, before=bounds.unused)

        database.run(forget, idempotent=True)
    return cleaned + CleanupResult(len(orphans), sum(orphan.size for orphan in orphans))


def _mark_unused(database: Database, folder: ObjectFolder) -> None:
    def mark(tx: Transaction) -> int:
        # A repeated append may record its object while this transaction marks it as unused.
        tx.run("mark_used", queue_id=folder.queue_id)
        return tx.run("mark_unused", queue_id=folder.queue_id, now=tx.now(), most=OBJECTS_PER_STATEMENT)

    while database.run(mark, idempotent=True) == OBJECTS_PER_STATEMENT:
        pass


def _delete_unused_records(database: Database, folder: ObjectFolder, before: int) -> Iterator[list[Row]]:
    """Delete and yield the records of objects that have had no segments since before the time ``before``.

    If the process dies before it deletes such an object, the object becomes an orphan.
    """

    def delete(tx: Transaction) -> list[Row]:
        return tx.all("delete_unused", queue_id=folder.queue_id, before=before, most=OBJECTS_PER_STATEMENT)

    while rows := database.run(delete):
        yield rows


def _orphans(
    database: Database, folder: ObjectFolder, stored: list[ListedObject], before: int
) -> list[ListedObject]:
    """Return the listed objects that the store has not recorded and that were written before the time
    ``before`` of the storage's clock.
    """
    old_enough = [stored_object for stored_object in stored if stored_object.modified_at < before]
    if not old_enough:
        return []
    # Use a write transaction: in SQLite it waits for a transaction that is about to record an object.
    names = database.run(
        lambda tx: {folder.name_of(row) for row in folder.recorded_objects(tx)}, idempotent=True
    )
    return [stored_object for stored_object in old_enough if stored_object.name not in names]
