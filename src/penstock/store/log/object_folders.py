"""The folders of queues in object storage, and the objects in them that the store has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.objects.storage import ListedObject, ObjectStorage
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.payloads import folder_of, is_object_name, object_name

OBJECTS_PER_STATEMENT = 1000
"""The most objects that one statement reads or deletes."""


@dataclass(frozen=True)
class ObjectFolder:
    """The folder of the objects of a queue, or of a dropped queue."""

    store: str
    """The store's id."""
    queue_id: int
    queue: str | None
    """The queue's name; None if it was dropped."""
    location: str
    """The URL as it is stored. It is not validated, and another program may have written it."""

    def list_stored(self, storage: ObjectStorage) -> list[ListedObject]:
        """Return the queue's objects in object storage, without files that are not Penstock's."""
        prefix = folder_of(self.store, self.queue_id)
        return [stored for stored in storage.listed(prefix) if is_object_name(stored.name[len(prefix) :])]

    def recorded_objects(self, tx: Transaction) -> Iterator[Row]:
        """Yield the objects that the store has recorded."""
        after = -1
        while rows := tx.all("list_objects", queue_id=self.queue_id, after=after, most=OBJECTS_PER_STATEMENT):
            yield from rows
            after = rows[-1].object_id

    def name_of(self, row: Row) -> str:
        """Return the name that a recorded object has in object storage."""
        return object_name(self.store, self.queue_id, row.object_id, row.suffix)


def object_folders(database: Database) -> list[ObjectFolder]:
    """Return the folders of all queues, existing or dropped, whose payloads may be in objects."""
    rows = database.run(lambda tx: tx.all("queues_with_objects"), write=False)
    return [ObjectFolder(database.uuid, row.queue_id, row.name, row.payloads) for row in rows]
