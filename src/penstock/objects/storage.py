"""Interface for reading and writing objects at a location, in any kind of storage."""

from __future__ import annotations

import logging
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.errors import StoreError, StoreUnavailableError, condition_of

log = logging.getLogger("penstock.objects")

T = TypeVar("T")
Buffer = bytes | memoryview
RETRY_SECONDS = 20.0
"""For how many seconds a failing request is retried, as for databases."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_AT_ONCE = 1000
"""The largest number of objects to delete in one request."""


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing."""

    name: str
    size: int
    modified_at: int
    """Microseconds since 1970, by the storage's clock."""


class ObjectStorage(ABC):
    """The objects at one location, by their names below it; safe to use from several threads.

    Every method retries with back-off while the storage does not answer, and then raises
    :class:`StoreUnavailableError`. Each object has a unique name and never changes, so a write whose reply
    was lost can be repeated.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write an object durably and atomically: a reader sees all of it or nothing."""
        self._retried(lambda: self._put(name, parts), f"writing {name}")

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return ranges of an object, pairs of a first byte and a length of at least 1.

        Raises
        ------
        StoreError
            When the object does not exist, or is shorter.
        """
        return self._retried(lambda: self._read(name, ranges), f"reading {name}")

    def listed(self, prefix: str) -> list[ListedObject]:
        """Return the objects in a folder, in any order, without those in folders below it; ``prefix`` ends
        with a slash.
        """
        return self._retried(lambda: list(self._listed(prefix)), f"listing {prefix}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; objects that do not exist are ignored."""
        left = list(names)
        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            self._retried(partial(self._delete, some), f"deleting {some[0]} and {len(some) - 1} more")

    def check(self, folder: str) -> None:
        """Check that objects can be written, read, listed and deleted, by doing so with one in a folder,
        without retries.

        Raises
        ------
        StoreUnavailableError, StoreReadOnlyError, StoreFullError
        """
        data = secrets.token_bytes(16)
        name = f"{folder}/{data.hex()}"
        self._put(name, [data])
        read = self._read(name, [(0, len(data))])
        if read != [data] or name not in [each.name for each in self._listed(f"{folder}/")]:
            raise self.unavailable("an object that was just written does not exist")
        self._delete([name])

    @abstractmethod
    def _put(self, name: str, parts: Sequence[Buffer]) -> None: ...

    @abstractmethod
    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]: ...

    @abstractmethod
    def _listed(self, prefix: str) -> Iterator[ListedObject]: ...

    @abstractmethod
    def _delete(self, names: Sequence[str]) -> None: ...

    def _retried(self, request: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + RETRY_SECONDS
        pause = _FIRST_PAUSE
        while True:
            try:
                return request()
            except StoreUnavailableError as error:
                if time.monotonic() + pause > deadline:
                    raise
                log.warning(
                    "object storage unavailable, trying again: %s (%s)",
                    error,
                    what,
                    extra={"action": "objects_retry", "storage": self.url, "error": condition_of(error)},
                )
            time.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def missing(self, name: str) -> StoreError:
        """Return the error for an object that does not exist."""
        return StoreError(
            f"the object {name} is missing from {self.url}: it was deleted there, or the storage was "
            "restored without it. Restore it; `penstock store check` lists what is missing",
            condition="STORE_ERROR.OBJECT_MISSING",
            storage=self.url,
            object=name,
        )

    def damaged(self, name: str, how: str) -> StoreError:
        """Return the error for an object that differs from what was written."""
        return StoreError(
            f"the object {name} in {self.url} {how}: it was changed there, or is damaged. Restore it; "
            "`penstock store check` lists what is damaged",
            condition="STORE_ERROR.OBJECT_DAMAGED",
            storage=self.url,
            object=name,
        )

    def unavailable(self, reason: str) -> StoreUnavailableError:
        """Return the error for a request that may succeed later."""
        return StoreUnavailableError(
            f"the object storage {self.url} failed: {reason.rstrip('.')}. Check that it is reachable, and "
            "the credentials in the environment",
            condition="STORE_UNAVAILABLE.OBJECTS",
            storage=self.url,
        )
