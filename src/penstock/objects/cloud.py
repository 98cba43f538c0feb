"""Objects in a bucket of S3, Google Cloud Storage, Azure, or a service with a compatible API."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.errors import StoreError, StoreReadOnlyError, StoreUnavailableError
from penstock.extras import missing
from penstock.objects.ranges import join_ranges
from penstock.objects.storage import Buffer, ListedObject, ObjectStorage
from penstock.parallel import in_parallel
from penstock.redaction import sentence

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CONNECT_TIMEOUT = timedelta(seconds=5)
_READ_TIMEOUT = timedelta(seconds=10)
_TIMEOUT = timedelta(seconds=60)
_MAX_REASON_CHARACTERS = 300
# The rest of a message repeats the same as Rust structures.
_DEBUG_TEXT = re.compile(r"\s*Debug source:.*", re.DOTALL)
# The services of AWS, Google Cloud and Azure that give the machine's or the container's credentials.
_CREDENTIAL_SERVICES = re.compile(
    r"/latest/(api/token|meta-data/)|//169\.254\.170\.|/computeMetadata/|/metadata/identity/"
)


class CloudStorage(ObjectStorage):
    """A prefix in a bucket; credentials and endpoints come from the environment or the platform."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._obstore = _library()
        self._process = os.getpid()
        # The library does not retry, because it cannot know that writes may be repeated. This class retries.
        with self._translating(""):
            self._bucket: ObjectStore = self._obstore.store.from_url(
                url,
                client_options={
                    "connect_timeout": _CONNECT_TIMEOUT,
                    "read_timeout": _READ_TIMEOUT,
                    "timeout": _TIMEOUT,
                    "allow_http": _allows_http(),
                },
                retry_config={"max_retries": 1},
            )

    def _put(self, name: str, parts: Sequence[Buffer], existing: str | None) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        with self._translating(name):
            # The parts of an incomplete multipart upload cost money and are not shown in listings.
            self._obstore.put(self._bucket, name, data, use_multipart=False)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        try:
            return self._read_ranges(name, ranges)
        except StoreUnavailableError:
            # Services report a missing range in various ways, and retrying does not help.
            self._require_length(name, max(start + length for start, length in ranges))
            raise

    def _read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        # The library itself would join ranges that are up to 1 MiB apart.
        spans = join_ranges(ranges)
        parts = in_parallel(partial(self._read_range, name), [(span.start, span.length) for span in spans])
        data_by_range: list[Buffer] = [b""] * len(ranges)
        for span, part in zip(spans, parts, strict=True):
            for index in span.indexes:
                start, length = ranges[index]
                data_by_range[index] = part[start - span.start : start - span.start + length]
        return data_by_range

    def _read_range(self, name: str, part: tuple[int, int]) -> memoryview:
        start, length = part
        with self._translating(name):
            data = memoryview(self._obstore.get_range(self._bucket, name, start=start, length=length))
        if len(data) != length:
            raise self.unavailable(f"{len(data)} bytes of {name} arrived instead of {length}")
        return data

    def _require_length(self, name: str, end: int) -> None:
        """Refuse an object that ends before a position."""
        with self._translating(name):
            size = self._obstore.head(self._bucket, name)["size"]
        if size < end:
            raise self.damaged(name, f"ends at byte {size}, before byte {end}")

    def _listed(self, prefix: str) -> Iterator[ListedObject]:
        with self._translating(prefix):
            for page in self._obstore.list(self._bucket, prefix=prefix):
                for entry in page:
                    if "/" in entry["path"][len(prefix) :]:
                        continue
                    modified_seconds = entry["last_modified"].timestamp()
                    yield ListedObject(entry["path"], entry["size"], int(modified_seconds * 1_000_000))

    def _delete(self, names: Sequence[str]) -> None:
        with self._translating(names[0]):
            try:
                self._obstore.delete(self._bucket, list(names))
            except FileNotFoundError:
                # S3 does not raise this. The error does not say whether the other objects were deleted.
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
                raise self._access_refused(error) from None
            raise self.missing(name) from None
        except Exception as error:
            if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
                raise self._access_refused(error) from None
            if type(error).__name__ == "InvalidPathError":
                raise self._invalid_name(name, error) from None
            if _is_settings_error(error):
                raise self._unusable_settings(_reason(error)) from None
            if _CREDENTIAL_SERVICES.search(str(error)):
                raise self._no_credentials(error) from None
            raise self.unavailable(_reason(error)) from None
        except BaseException as error:
            # Raised for an invalid header or an endpoint that is not a URL. The text may contain the value.
            if type(error).__name__ != "PanicException":
                raise
            raise self._unusable_settings("the library for it ended with an internal error") from None

    def _invalid_name(self, folder: str, error: Exception) -> StoreError:
        return StoreError(
            f"an object at {folder} in {self.url} has a name that cannot be listed: {_reason(error)}. It "
            "does not belong to Penstock: delete it",
            condition="STORE_ERROR.OBJECT_NAME",
            storage=self.url,
        )

    def _unusable_settings(self, reason: str) -> StoreError:
        return StoreError(
            f"the object storage {self.url} cannot be used with the settings of this process: {reason}. "
            "Check the variables AWS_…, GOOGLE_… or AZURE_… in its environment, and the location; an "
            "endpoint without TLS needs AWS_ALLOW_HTTP=true",
            condition="STORE_ERROR.OBJECT_SETTINGS",
            storage=self.url,
        )

    def _no_credentials(self, error: Exception) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"this process has no credentials for the object storage {self.url}: its environment has none, "
            f"and the machine's metadata service did not give any ({_reason(error)}). Set AWS_…, GOOGLE_… or "
            "AZURE_… in the environment of every process that appends or reads",
            condition="STORE_UNAVAILABLE.OBJECT_CREDENTIALS",
            storage=self.url,
        )

    def _access_refused(self, error: Exception) -> StoreReadOnlyError:
        return StoreReadOnlyError(
            f"the object storage {self.url} refuses access: {_reason(error)}. Check the bucket's name, and "
            "that the credentials in the environment may read, write, list and delete there",
            condition="STORE_READ_ONLY.OBJECTS",
            storage=self.url,
        )


def _allows_http() -> bool:
    """Return whether the environment allows requests without TLS; settings in code would override it."""
    names = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in names)


def _is_settings_error(error: Exception) -> bool:
    """Return whether an error is about the settings, so that retrying cannot help."""
    name, text = type(error).__name__, str(error)
    # A request that cannot be built, as for an endpoint without TLS unless that is allowed.
    texts = ("Generic Config error", "HTTP error: builder error")
    return name in ("UnknownConfigurationKeyError", "ConfigError") or any(each in text for each in texts)


def _reason(error: Exception) -> str:
    return sentence(_DEBUG_TEXT.sub("", str(error)), _MAX_REASON_CHARACTERS).rstrip(".")


def _library() -> ModuleType:
    try:
        import obstore
        import obstore.store
    except ModuleNotFoundError:
        raise missing("obstore", "a queue whose payloads are in a bucket") from None
    return obstore
