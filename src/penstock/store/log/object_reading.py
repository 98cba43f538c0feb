"""Read the rows in recorded objects, and compare them with their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from penstock.errors import StoreError
from penstock.objects.bundle import PayloadRange
from penstock.objects.storage import ObjectStorage
from penstock.parallel import in_parallel
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.object_folders import ObjectFolder
from penstock.store.log.payloads import OBJECT_BYTES, read_verified
from penstock.store.log.segmenting import by_size

_OBJECTS_AT_ONCE = 16
OBJECT_MISSING, _OBJECT_DAMAGED = "STORE_ERROR.OBJECT_MISSING", "STORE_ERROR.OBJECT_DAMAGED"


@dataclass(frozen=True)
class ObjectReader:
    """Reader of the objects in one folder."""

    database: Database
    folder: ObjectFolder
    storage: ObjectStorage

    def read(self, objects: Sequence[Row]) -> Iterator[tuple[Row, int, str | None]]:
        """Yield each object with the bytes of its segments, and the condition of the error if it is missing
        or damaged. ``objects`` are recorded objects, ordered by id.

        Raises
        ------
        PenstockError
            If the storage or the database does not respond.
        """
        for start in range(0, len(objects), _OBJECTS_AT_ONCE):
            page = objects[start : start + _OBJECTS_AT_ONCE]
            segments = self._segments(page[0].object_id, page[-1].object_id)
            yield from in_parallel(
                lambda pair: self._read(*pair), [(row, segments.get(row.object_id, [])) for row in page]
            )

    def _segments(self, first: int, last: int) -> dict[int, list[Row]]:
        def query(tx: Transaction) -> list[Row]:
            return tx.all("segments_in_objects", queue_id=self.folder.queue_id, first=first, last=last)

        rows = sorted(self.database.run(query, write=False), key=attrgetter("object_id", "start_byte"))
        return {object_id: list(group) for object_id, group in groupby(rows, attrgetter("object_id"))}

    def _read(self, row: Row, segments: Sequence[Row]) -> tuple[Row, int, str | None]:
        ranges = [PayloadRange(segment.start_byte, segment.bytes, segment.checksum) for segment in segments]
        try:
            for group in by_size(ranges, attrgetter("length"), OBJECT_BYTES):
                read_verified(self.storage, self.folder.name_of(row), group)
        except StoreError as error:
            if error.condition not in (OBJECT_MISSING, _OBJECT_DAMAGED):
                raise
            # Compaction may have replaced its segments in the meantime, so that it was deleted.
            condition = error.condition if self._segments(row.object_id, row.object_id) else None
            return row, 0, condition
        return row, sum(each.length for each in ranges), None
