"""Atomic creation of a table's files, which fails if a file already exists.

A Delta commit is such a file. In a local folder, a file gets its name by a link after its bytes are on the
disk; in an object store, it is created with a conditional put.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.extras import load
from penstock.lake.storage import DeltaPlace, is_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_REFUSED = ("locking_provider", "allow_unsafe_rename", "copy_if_not_exists")
"""Parts of the names of settings that coordinate writers in another way, incompatible with this one."""
_CONDITIONAL = "conditional_put"
_REPEATING = ("max_retries", "retry_timeout", "backoff_config")
"""Settings that only affect deltalake, and are ignored here."""
_CLIENT = ("allow_http", "allow_invalid_certificates", "timeout", "connect_timeout", "proxy_url")
_CLIENT_PREFIXES = ("aws_", "azure_", "google_")

_ASKED = "_delta_log/_last_checkpoint"
_BRIEF = {"retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}}


class NoConditionalPut(Exception):
    """The storage of a table, or its settings, do not support creating a file only if it does not exist."""


def create_file(place: DeltaPlace, path: str, data: bytes) -> bool:
    """Create a file in a table's folder; return False if it already exists with other bytes.

    If the storage's answer is lost, the file is read and compared, so its bytes must be unique.

    Raises
    ------
    NoConditionalPut
    OSError
        When the storage failed, and the file did not exist afterwards.
    """
    if not is_url(place.path):
        return _link(os.path.join(place.path, path), data)
    store = _store(place)
    import obstore

    try:
        obstore.put(store, path, data, mode="create", use_multipart=False)
    except NotImplementedError:
        # The library raises this for a store without conditional writes.
        raise NoConditionalPut from None
    except Exception as error:
        # The library repeats requests by itself, so the file that exists may be this one.
        found = _found(store, path)
        if found is None:
            raise OSError(place.message(error)) from None
        return found == data
    return True


def can_create(place: DeltaPlace) -> bool:
    """Whether :func:`create_file` can work with a table's storage and settings.

    This sends a request to an object store, because deltalake finds credentials in places where this library
    does not look for them, such as a profile of the AWS command line.
    """
    if not is_url(place.path):
        return True
    try:
        store = _store(place, **_BRIEF)
        import obstore

        obstore.head(store, _ASKED)
    except FileNotFoundError:
        return True
    except Exception:
        return False
    return True


def _link(path: str, data: bytes) -> bool:
    folder = os.path.dirname(path)
    unfinished = os.path.join(folder, f"_commit_{secrets.token_hex(16)}.json.tmp")
    try:
        with open(unfinished, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(unfinished, path)
        except FileExistsError:
            # A network file system may have created the link and lost the answer.
            with open(path, "rb") as file:
                return file.read() == data
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
    return True


def _found(store: ObjectStore, path: str) -> bytes | None:
    import obstore

    try:
        return bytes(obstore.get(store, path).bytes())
    except FileNotFoundError:
        return None
    except Exception as error:
        raise OSError(f"it is not known whether {path} was written ({type(error).__name__})") from None


def _store(place: DeltaPlace, **more: Any) -> ObjectStore:
    """Return the object store of a table, with deltalake's storage options."""
    try:
        from_url = load("obstore.store", "from_url", "a Delta table with deletion vectors in an object store")
    except Exception:
        raise NoConditionalPut from None
    config, client = _settings(place.options)
    try:
        store: ObjectStore = from_url(place.path, config=config, client_options=client, **more)
    except BaseException as error:
        # The library panics on some settings, and its message may contain their values.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise NoConditionalPut from None
        raise
    return store


def _settings(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Split deltalake's storage options into the settings of a bucket and of its HTTP client."""
    everywhere = {name.lower() for name in os.environ}
    if any(part in name.lower() for name in (*options, *everywhere) for part in _REFUSED):
        raise NoConditionalPut
    config, client = {}, {}
    for name, value in options.items():
        plain = name.lower()
        if plain.endswith(_CONDITIONAL):
            if value.lower() not in ("etag", "true"):
                raise NoConditionalPut
            continue
        short = next((plain.removeprefix(each) for each in _CLIENT_PREFIXES if plain.startswith(each)), plain)
        if short in _CLIENT:
            client[short] = value
        elif not short.startswith(_REPEATING):
            config[plain] = value
    return config, client
