"""Object storage, in memory: each request is a step, and may fail, also after it has done what was asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.objects.storage import Buffer, ListedObject, ObjectStorage
from tests.simulation.scheduler import World

LOCATION = "file:///objects"
ORPHAN_SECONDS = 8.0
"""A day, in a schedule."""


class Bucket:
    """Objects by name."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.failing = 0
        """How many of the next requests fail."""
        self.lying = 0
        """How many of the next requests do what they are asked, and seem to fail."""


class SimStorage(ObjectStorage):
    """One process's way to it."""

    def __init__(self, url: str, bucket: Bucket) -> None:
        super().__init__(url)
        self._bucket = bucket

    def _put(self, name: str, parts: Sequence[Buffer], existing: str | None) -> None:
        self._asked("put", name)
        # The data, whatever its owner does with the memory later.
        self._bucket.objects[name] = (b"".join(parts), self._bucket.world.now)
        self._answered("put", name)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._asked("get", name)
        if name not in self._bucket.objects:
            raise self.missing(name)
        data, _ = self._bucket.objects[name]
        for start, length in ranges:
            if start + length > len(data):
                raise self.damaged(name, f"ends at byte {len(data)}, before byte {start + length}")
        self._answered("get", name)
        return [data[start : start + length] for start, length in ranges]

    def _listed(self, prefix: str) -> Iterator[ListedObject]:
        self._asked("list", prefix)
        for name, (data, written) in list(self._bucket.objects.items()):
            if name.startswith(prefix):
                yield ListedObject(name, len(data), int(written * 1_000_000))

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._asked("delete", name)
            self._bucket.objects.pop(name, None)
            self._answered("delete", name)

    def _asked(self, what: str, name: str) -> None:
        self._bucket.world.step(f"{what} {name[-40:]}")
        if self._bucket.failing:
            self._bucket.failing -= 1
            raise self.unavailable("it does not answer")

    def _answered(self, what: str, name: str) -> None:
        self._bucket.world.step(f"{what} is done")
        if self._bucket.lying:
            self._bucket.lying -= 1
            raise self.unavailable("its answer is lost")
