"""``ObjectStorage``: the interface for reading and writing objects at a location."""

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
"""How many seconds a failing request is retried, as for databases."""
_FIRST_PAUSE = 0.05
_MAX_PAUSE = 2.0
_MAX_DELETES = 1000
"""The maximum number of objects to delete in one request."""


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing."""

    name: str
    size: int
    modified_at: int
    """Microseconds since 1970, by the storage's clock."""


class ObjectStorage(ABC):
    """The objects at one location, identified by their names below it. Thread-safe.

    If the storage does not answer, every method retries with back-off and finally raises
    :class:`StoreUnavailableError`. Each object has a unique name and never changes, so a write can be
    repeated if its reply was lost.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def put(self, name: str, parts: Sequence[Buffer], *, existing: str | None = None) -> None:
        """Write an object durably and atomically: readers see all of it or nothing.

        ``existing`` is the first folder of ``name`` if it has to exist, as for :meth:`require_folder`.
        """
        self._with_retries(lambda: self._put(name, parts, existing), f"writing {name}")

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return ranges of an object, pairs of a first byte and a length of at least 1.

        Raises
        ------
        StoreError
            When the object does not exist, or is shorter.
        """
        return self._with_retries(lambda: self._read(name, ranges), f"reading {name}")

    def listed(self, prefix: str) -> list[ListedObject]:
        """Return the objects in a folder, in any order, without those in subfolders.

        ``prefix`` ends with a slash.
        """
        return self._with_retries(lambda: list(self._listed(prefix)), f"listing {prefix}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; objects that do not exist are ignored."""
        remaining = list(names)
        for start in range(0, len(remaining), _MAX_DELETES):
            chunk = remaining[start : start + _MAX_DELETES]
            self._with_retries(partial(self._delete, chunk), f"deleting {chunk[0]} and {len(chunk) - 1} more")

    def require_folder(self, folder: str) -> None:  # noqa: B027 - buckets have no folders
        """Refuse a location on a disk without this folder: the disk is not mounted, or the folder was moved.

        Raises
        ------
        StoreUnavailableError
        """

    def check(self, folder: str) -> None:
        """Check with a test object that writing, reading, listing and deleting work, without retries.

        Raises
        ------
        StoreUnavailableError, StoreReadOnlyError, StoreFullError
        """
        data = secrets.token_bytes(16)
        name = f"{folder}/{data.hex()}"
        self._put(name, [data], None)
        read = self._read(name, [(0, len(data))])
        if read != [data] or name not in [listed_object.name for listed_object in self._listed(f"{folder}/")]:
            raise self.unavailable("an object that was just written does not exist")
        self._delete([name])

    @abstractmethod
    def _put(self, name: str, parts: Sequence[Buffer], existing: str | None) -> None: ...

    @abstractmethod
    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]: ...

    @abstractmethod
    def _listed(self, prefix: str) -> Iterator[ListedObject]: ...

    @abstractmethod
    def _delete(self, names: Sequence[str]) -> None: ...

    def _with_retries(self, request: Callable[[], T], action: str) -> T:
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
                    action,
                    extra={"action": "objects_retry", "storage": self.url, "error": condition_of(error)},
                )
            time.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, _MAX_PAUSE)

    def missing(self, name: str) -> StoreError:
        """Return the error for an object that does not exist."""
        return StoreError(
            f"the object {name} is missing from {self.url}: it was deleted there, or the storage was "
            "restored without it. Restore it; `penstock store check` lists what is missing",
            condition="STORE_ERROR.OBJECT_MISSING",
            storage=self.url,
            object=name,
        )

    def damaged(self, name: str, problem: str) -> StoreError:
        """Return the error for an object that differs from what was written."""
        return StoreError(
            f"the object {name} in {self.url} {problem}: it was changed there, or is damaged. Restore it. "
            "`penstock store check --read` lists all that are damaged",
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
