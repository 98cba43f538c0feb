"""In-memory object storage. Each request is a step, and may fail before or after it takes effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.objects.storage import Buffer, ListedObject, ObjectStorage
from tests.simulation.scheduler import World

LOCATION = "file:///objects"
ORPHAN_SECONDS = 8.0
"""The age from which unreferenced objects are deleted; a day outside the simulation."""


class Bucket:
    """Objects by name, with the time of their upload."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.failing_requests = 0
        """How many of the next requests fail without effect."""
        self.lost_replies = 0
        """How many of the next requests take effect but report a failure."""


class SimStorage(ObjectStorage):
    """Client of the bucket."""

    def __init__(self, url: str, bucket: Bucket) -> None:
        super().__init__(url)
        self._bucket = bucket

    def _put(self, name: str, parts: Sequence[Buffer], existing: str | None) -> None:
        self._begin_request("put", name)
        # Copy the data, since the caller may reuse its memory.
        self._bucket.objects[name] = (b"".join(parts), self._bucket.world.now)
        self._end_request("put", name)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._begin_request("get", name)
        if name not in self._bucket.objects:
            raise self.missing(name)
        data, _ = self._bucket.objects[name]
        for start, length in ranges:
            if start + length > len(data):
                raise self.damaged(name, f"ends at byte {len(data)}, before byte {start + length}")
        self._end_request("get", name)
        return [data[start : start + length] for start, length in ranges]

    def _listed(self, prefix: str) -> Iterator[ListedObject]:
        self._begin_request("list", prefix)
        for name, (data, written) in list(self._bucket.objects.items()):
            if name.startswith(prefix):
                yield ListedObject(name, len(data), int(written * 1_000_000))

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._begin_request("delete", name)
            self._bucket.objects.pop(name, None)
            self._end_request("delete", name)

    def _begin_request(self, request: str, name: str) -> None:
        self._bucket.world.step(f"{request} {name[-40:]}")
        if self._bucket.failing_requests:
            self._bucket.failing_requests -= 1
            raise self.unavailable("it does not answer")

    def _end_request(self, request: str, name: str) -> None:
        self._bucket.world.step(f"{request} is done")
        if self._bucket.lost_replies:
            self._bucket.lost_replies -= 1
            raise self.unavailable("its answer is lost")
