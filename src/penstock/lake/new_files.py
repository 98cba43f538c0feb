"""Atomic put-if-absent of a table's files, such as Delta commits.

In a local folder, a file is synced to disk under a temporary name and then hard-linked to its own name. In an
object store, it is created with a conditional put.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.extras import load
from penstock.lake.storage import DeltaLocation, is_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CONFLICTING_OPTIONS = ("locking_provider", "allow_unsafe_rename", "copy_if_not_exists")
"""Parts of the names of options that coordinate writers in another way, so they exclude conditional puts."""
_CONDITIONAL_PUT_OPTION = "conditional_put"
_RETRY_OPTIONS = ("max_retries", "retry_timeout", "backoff_config")
"""Options for deltalake's retries, which do not apply to obstore and are ignored."""
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "timeout", "connect_timeout", "proxy_url")
_CLIENT_PREFIXES = ("aws_", "azure_", "google_")

_PROBED_PATH = "_delta_log/_last_checkpoint"
_SHORT_RETRIES = {"retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}}


class NoConditionalPut(Exception):
    """The storage of a table, or its settings, do not support put-if-absent."""


def create_if_absent(location: DeltaLocation, path: str, data: bytes) -> bool:
    """Create a file in a table's folder; return False if it already exists with other content.

    If the storage's reply is lost, the file is read and compared, so its content must be unique.

    Raises
    ------
    NoConditionalPut
    OSError
        When the storage failed, and the file did not exist afterwards.
    """
    if not is_url(location.path):
        return _create_local_file(os.path.join(location.path, path), data)
    store = _object_store(location)
    import obstore

    try:
        obstore.put(store, path, data, mode="create", use_multipart=False)
    except NotImplementedError:
        # obstore raises this for a store without conditional writes.
        raise NoConditionalPut from None
    except Exception as error:
        # obstore retries requests by itself, so an existing file may be the one from an earlier try.
        existing = _read_if_exists(store, path)
        if existing is None:
            raise OSError(location.message(error)) from None
        return existing == data
    return True


def supports_conditional_put(location: DeltaLocation) -> bool:
    """Whether :func:`create_if_absent` works with a table's storage and settings.

    This sends a request to an object store, because deltalake finds credentials in places where obstore does
    not look for them, such as a profile of the AWS command line.
    """
    if not is_url(location.path):
        return True
    try:
        store = _object_store(location, **_SHORT_RETRIES)
        import obstore

        obstore.head(store, _PROBED_PATH)
    except FileNotFoundError:
        return True
    except Exception:
        return False
    return True


def _create_local_file(path: str, data: bytes) -> bool:
    folder = os.path.dirname(path)
    temporary_path = os.path.join(folder, f"_commit_{secrets.token_hex(16)}.json.tmp")
    try:
        with open(temporary_path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary_path, path)
        except FileExistsError:
            # A network file system may have created the link and lost the reply.
            with open(path, "rb") as file:
                return file.read() == data
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary_path)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return True


def _read_if_exists(store: ObjectStore, path: str) -> bytes | None:
    import obstore

    try:
        return bytes(obstore.get(store, path).bytes())
    except FileNotFoundError:
        return None
    except Exception as error:
        raise OSError(f"it is unknown whether {path} was written ({type(error).__name__})") from None


def _object_store(location: DeltaLocation, **options: Any) -> ObjectStore:
    """Open the object store of a table with deltalake's storage options."""
    try:
        from_url = load("obstore.store", "from_url", "a Delta table with deletion vectors in an object store")
    except Exception:
        raise NoConditionalPut from None
    config, client = _store_config(location.options)
    try:
        store: ObjectStore = from_url(location.path, config=config, client_options=client, **options)
    except BaseException as error:
        # obstore panics on some settings, and its message may contain their values.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise NoConditionalPut from None
        raise
    return store


def _store_config(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Split deltalake's storage options into the config of a bucket and the options of its HTTP client."""
    environment = {name.lower() for name in os.environ}
    if any(part in name.lower() for name in (*options, *environment) for part in _CONFLICTING_OPTIONS):
        raise NoConditionalPut
    config, client = {}, {}
    for name, value in options.items():
        lower_name = name.lower()
        if lower_name.endswith(_CONDITIONAL_PUT_OPTION):
            if value.lower() not in ("etag", "true"):
                raise NoConditionalPut
            continue
        short_name = next(
            (lower_name.removeprefix(prefix) for prefix in _CLIENT_PREFIXES if lower_name.startswith(prefix)),
            lower_name,
        )
        if short_name in _CLIENT_OPTIONS:
            client[short_name] = value
        elif not short_name.startswith(_RETRY_OPTIONS):
            config[lower_name] = value
    return config, client
