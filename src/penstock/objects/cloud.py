"""Objects in a bucket of S3, Google Cloud Storage, Azure, or a service that speaks the protocol of one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.errors import StoreError, StoreReadOnlyError, StoreUnavailableError
from penstock.extras import missing
from penstock.objects.storage import Buffer, ListedObject, ObjectStorage
from penstock.redaction import sentence

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CONNECT_TIMEOUT = timedelta(seconds=5)
_READ_TIMEOUT = timedelta(seconds=10)
_TIMEOUT = timedelta(seconds=60)
_MOST_CHARACTERS = 300
# What follows is the same once more, as Rust's structures.
_DEBUG = re.compile(r"\s*Debug source:.*", re.DOTALL)


class CloudStorage(ObjectStorage):
    """A prefix in a bucket; credentials and endpoints come from the environment or the platform."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._obstore = _library()
        self._process = os.getpid()
        # Repeated by this class, with all that may be repeated: the library cannot know that a write may be.
        with self._translating(""):
            self._bucket: ObjectStore = self._obstore.store.from_url(
                url,
                client_options={
                    "connect_timeout": _CONNECT_TIMEOUT,
                    "read_timeout": _READ_TIMEOUT,
                    "timeout": _TIMEOUT,
                    "allow_http": _http_is_allowed(),
                },
                retry_config={"max_retries": 1},
            )

    def _put(self, name: str, parts: Sequence[Buffer]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        with self._translating(name):
            # A part of a multipart upload that is never completed costs money and is in no listing.
            self._obstore.put(self._bucket, name, data, use_multipart=False)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        try:
            return self._ranges(name, ranges)
        except StoreUnavailableError:
            # Services answer in several ways when a range is not there, and it never will be.
            self._require_length(name, max(start + length for start, length in ranges))
            raise

    def _ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        with self._translating(name):
            found = self._obstore.get_ranges(
                self._bucket,
                name,
                starts=[start for start, _ in ranges],
                lengths=[length for _, length in ranges],
            )
        read: list[Buffer] = [memoryview(data) for data in found]
        for data, (_, length) in zip(read, ranges, strict=True):
            if len(data) != length:
                raise self.unavailable(f"{len(data)} bytes of {name} arrived instead of {length}")
        return read

    def _require_length(self, name: str, end: int) -> None:
        """Refuse an object that ends before a byte."""
        with self._translating(name):
            size = self._obstore.head(self._bucket, name)["size"]
        if size < end:
            raise self.damaged(name, f"ends at byte {size}, before byte {end}")

    def _listed(self, prefix: str) -> Iterator[ListedObject]:
        with self._translating(prefix):
            for page in self._obstore.list(self._bucket, prefix=prefix):
                for each in page:
                    if "/" in each["path"][len(prefix) :]:
                        continue
                    modified = each["last_modified"].timestamp()
                    yield ListedObject(each["path"], each["size"], int(modified * 1_000_000))

    def _delete(self, names: Sequence[str]) -> None:
        with self._translating(names[0]):
            try:
                self._obstore.delete(self._bucket, list(names))
            except FileNotFoundError:
                # Not of S3. It says nothing of the others.
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        self._obstore.delete(self._bucket, name)

    @contextlib.contextmanager
    def _translating(self, name: str) -> Iterator[None]:
        if os.getpid() != self._process:
            raise self.unavailable("it was opened before this process was forked")
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._refused(error) from None
            raise self.missing(name) from None
        except Exception as error:
            if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
                raise self._refused(error) from None
            raise self.unavailable(_reason(error)) from None

    def _refused(self, error: Exception) -> StoreReadOnlyError:
        return StoreReadOnlyError(
            f"the object storage {self.url} refuses access: {_reason(error)}. Check the bucket's name, and "
            "that the credentials in the environment may read, write, list and delete there",
            condition="STORE_READ_ONLY.OBJECTS",
            storage=self.url,
        )


def _http_is_allowed() -> bool:
    """Whether the environment allows requests without TLS, which the given settings would forbid."""
    names = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in names)


def _reason(error: Exception) -> str:
    return sentence(_DEBUG.sub("", str(error)), _MOST_CHARACTERS).rstrip(".")


def _library() -> ModuleType:
    try:
        import obstore
        import obstore.store
    except ModuleNotFoundError:
        raise missing("obstore", "a queue whose payloads are in a bucket") from None
    return obstore
