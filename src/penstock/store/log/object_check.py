"""Compare the objects in object storage with the store's records, and on request read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from penstock.errors import PenstockError, StoreUnavailableError
from penstock.objects.location import stored_location
from penstock.objects.storage import ListedObject, ObjectStorage
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.object_folders import OBJECTS_PER_STATEMENT, ObjectFolder, object_folders
from penstock.store.log.object_reading import OBJECT_MISSING, ObjectReader


@dataclass
class ObjectsCheck:
    """The result of checking a queue's objects."""

    queue: str | None
    """The queue's name; None if it was dropped."""
    location: str
    objects: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    """The names of objects that should hold rows but do not exist."""
    damaged: list[str] = field(default_factory=list)
    """The names of objects whose size differs from the size that was written, or, if objects were read, whose
    bytes differ.
    """
    unused: int = 0
    """The number of objects without segments, which are deleted after a day."""
    orphans: int = 0
    """The number of objects that no transaction has recorded. Recent ones may still be recorded."""
    orphan_bytes: int = 0
    read_bytes: int | None = None
    """The bytes of rows that were read and are as they were written; None if objects were not read."""
    error: str | None = None
    """Why the objects could not be compared; the other fields are unknown then."""


def check_objects(database: Database, *, read: bool = False) -> list[ObjectsCheck]:
    """Compare the objects in object storage with the store's records, queue by queue. Dropped queues come
    last.

    ``read`` says whether to read the rows in all objects, too, and to compare their checksums. If the objects
    of one queue cannot be listed or read, the others are still checked.
    """
    listings = _Listings(database)
    folders = object_folders(database)
    return [
        _check_folder(database, folder, listings, read)
        for folder in sorted(folders, key=lambda folder: (folder.queue is None, folder.queue))
    ]


class _Listings:
    """Lists the objects at locations, and tries a location that does not answer only once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._unavailable_locations: dict[str, StoreUnavailableError] = {}

    def of(self, folder: ObjectFolder) -> dict[str, ListedObject]:
        """Return a queue's objects by name.

        Raises
        ------
        PenstockError
            If they cannot be listed.
        """
        if folder.location in self._unavailable_locations:
            raise self._unavailable_locations[folder.location]
        try:
            storage = self.storage_of(folder)
            storage.require_folder(self._database.uuid)
            return {listed.name: listed for listed in folder.list_stored(storage)}
        except StoreUnavailableError as error:
            self._unavailable_locations[folder.location] = error
            raise

    def storage_of(self, folder: ObjectFolder) -> ObjectStorage:
        """Return the storage of a queue's objects."""
        return self._database.storages.at(stored_location(folder.location))


def _check_folder(database: Database, folder: ObjectFolder, listings: _Listings, read: bool) -> ObjectsCheck:
    # List the objects after reading the store, since an object exists before it is recorded. An object that
    # is deleted in between has had no segments for a day.
    rows, used = database.run(lambda tx: _recorded_and_used(tx, folder), write=False)
    try:
        checked = _compare(folder, rows, used, listings.of(folder))
        if read:
            reader = ObjectReader(database, folder, listings.storage_of(folder))
            _read_objects(reader, [row for row in rows if row.object_id in used], checked)
    except PenstockError as error:
        return ObjectsCheck(folder.queue, str(folder.location), error=error.message)
    return checked


def _recorded_and_used(tx: Transaction, folder: ObjectFolder) -> tuple[list[Row], set[int]]:
    """Return the objects that the store has recorded, and the ids of those with segments, including objects
    that are marked as unused.
    """
    rows = list(folder.recorded_objects(tx))
    used: set[int] = set()
    for start in range(0, len(rows), OBJECTS_PER_STATEMENT):
        page = rows[start : start + OBJECTS_PER_STATEMENT]
        where = {"queue_id": folder.queue_id, "first": page[0].object_id, "last": page[-1].object_id}
        used.update(row.object_id for row in tx.all("used_objects", **where))
    return rows, used


def _compare(
    folder: ObjectFolder, rows: list[Row], used: set[int], listed: dict[str, ListedObject]
) -> ObjectsCheck:
    checked = ObjectsCheck(folder.queue, folder.location, len(rows), sum(map(attrgetter("size"), rows)))
    for row in rows:
        name = folder.name_of(row)
        stored = listed.pop(name, None)
        if row.object_id not in used:
            checked.unused += 1
        elif stored is None:
            checked.missing.append(name)
        elif stored.size != row.size:
            checked.damaged.append(name)
    checked.orphans = len(listed)
    checked.orphan_bytes = sum(orphan.size for orphan in listed.values())
    return checked


def _read_objects(reader: ObjectReader, used: list[Row], checked: ObjectsCheck) -> None:
    """Read the objects with segments, and add those that turn out to be missing or damaged."""
    known = {*checked.missing, *checked.damaged}
    checked.read_bytes = 0
    for row, size, condition in reader.read([row for row in used if reader.folder.name_of(row) not in known]):
        checked.read_bytes += size
        if condition is not None:
            found = checked.missing if condition == OBJECT_MISSING else checked.damaged
            found.append(reader.folder.name_of(row))
