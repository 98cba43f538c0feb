"""Files of a table that are created whole, or not at all where there is one already.

A commit of Delta is such a file. In a folder it is linked to its name after its bytes are on the disk; an
object store is asked to put it only if there is none.
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
"""Parts of the names of settings that coordinate writers in another way, with which this one does not mix."""
_CONDITIONAL = "conditional_put"
_REPEATING = ("max_retries", "retry_timeout", "backoff_config")
"""Settings of deltalake alone, which change nothing here."""
_CLIENT = ("allow_http", "allow_invalid_certificates", "timeout", "connect_timeout", "proxy_url")
_CLIENT_PREFIXES = ("aws_", "azure_", "google_")

_ASKED = "_delta_log/_last_checkpoint"
_BRIEF = {"retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}}


class NoConditionalPut(Exception):
    """The storage of a table, or its settings, do not allow that a file is created only if there is none."""


def create_file(place: DeltaPlace, path: str, data: bytes) -> bool:
    """Create a file in a table's folder; return False if there is one with other bytes.

    If the answer of the storage is lost, the file is read: its bytes have to be different from any other's.

    Raises
    ------
    NoConditionalPut
    OSError
        When the storage failed, and there was no such file afterwards.
    """
    if not is_url(place.path):
        return _link(os.path.join(place.path, path), data)
    store = _store(place)
    import obstore

    try:
        obstore.put(store, path, data, mode="create", use_multipart=False)
    except NotImplementedError:
        # The library's answer for a store that has no conditional writes.
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

    An object store is asked, because deltalake finds credentials where this library does not look for them,
    such as a profile of the AWS command line.
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
            # A network's file system may have done it, and lost the answer.
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
        # The library panics over some settings; what it says may have their values.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise NoConditionalPut from None
        raise
    return store


def _settings(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the settings of a bucket, and those of its HTTP client, out of deltalake's storage options."""
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
