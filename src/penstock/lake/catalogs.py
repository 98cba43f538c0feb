"""Iceberg catalogs for feeds and tables: how to open them, their secrets, and the storage access of tasks."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import cast

import pyiceberg.catalog
import requests
from pyiceberg.catalog import PY_CATALOG_IMPL, TYPE, Catalog, CatalogType, infer_catalog_type, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.rest.auth import AuthManagerAdapter
from pyiceberg.io import FileIO
from pyiceberg.table import Table
from pyiceberg.typedef import RecursiveDict
from pyiceberg.utils.config import merge_config
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

ANSWER_SECONDS = 120.0
"""The time limit for a REST catalog's answer."""
_CONNECT_SECONDS = 10.0
_REPEATS = 7
"""The number of retries, within about 20 seconds if each answer is immediate."""
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 8.0
_LONGEST_NAMED_WAIT = 60
"""The longest wait in seconds that a catalog may ask for."""
_BUSY = (429, 500, 502, 503, 504)
_AUTH_MANAGER, _SNAPSHOTS = "auth.manager", "snapshot-loading-mode"
_SIGNER = "s3.signer"
_OF_CATALOG = ("auth", _AUTH_MANAGER, "credential", "token", "ssl")
_OF_ADDRESS, _OF_CLIENT = ("uri", "oauth2-server-uri"), ("header.", "glue.", "dynamodb.")
_SECRET_NAME = re.compile("token|secret|credential|password")


def open_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """Open a catalog; pyiceberg looks up missing properties in its own configuration.

    Requests to a REST catalog are repeated if the catalog is busy or its reply is lost. If the first request
    was carried out, the answer to its repetition is a conflict.
    """
    own = pyiceberg.catalog._ENV_CONFIG.get_catalog_config(name) or {}
    merged = merge_config(own, cast(RecursiveDict, dict(properties)))
    if PY_CATALOG_IMPL in properties or not _is_rest(name, merged):
        catalog = load_catalog(name, **properties)
    else:
        catalog = _RestCatalog(name, **cast(dict[str, str], merged))
    session = getattr(catalog, "_session", None)
    if isinstance(session, requests.Session):
        _repeat_requests(session)
        # The branches' snapshots are not enough to find out which files are in use or what has changed.
        catalog.properties.pop(_SNAPSHOTS, None)
    return catalog


def task_io(io: FileIO) -> FileIO:
    """Return a table's storage for use by tasks, without the credentials of the catalog.

    If the catalog signs each request to the storage, tasks get the current token.
    """
    properties = dict(io.properties)
    manager = properties.get(_AUTH_MANAGER)
    for name in _OF_CATALOG:
        properties.pop(name, None)
    if manager is not None and _SIGNER in properties:
        properties[_AUTH_MANAGER] = _Authorized(manager.auth_header())
    else:
        properties = {name: value for name, value in properties.items() if not _is_of_client(name)}
    return type(io)(properties)


def client_secrets(catalog: Catalog) -> dict[str, object]:
    """Return the properties of a catalog, and the secrets of its client."""
    client = getattr(catalog, "_auth_manager", None)
    return {**catalog.properties, **{f"client {name}": value for name, value in _tokens(client)}}


def storage_secrets(table: Table) -> dict[str, object]:
    """Return the properties of a table's storage, which a catalog may give to its clients."""
    public = table.metadata.properties
    return {name: value for name, value in table.io.properties.items() if public.get(name) != value}


def _tokens(client: object) -> Iterator[tuple[str, str]]:
    """Yield the secrets of a REST catalog's client, such as a token that it has fetched."""
    for name, value in getattr(client, "__dict__", {}).items():
        if isinstance(value, str) and _SECRET_NAME.search(name):
            yield name, value
        elif name == "token_provider":
            yield from _tokens(value)


def _is_of_client(name: str) -> bool:
    return name in _OF_ADDRESS or name.startswith(_OF_CLIENT)


class _Authorized:
    """Authorization of requests with a fixed token."""

    def __init__(self, header: str | None) -> None:
        self._header = header

    def auth_header(self) -> str | None:
        return self._header


class _Retries(Retry):
    """Retries for all requests, even commits: a catalog refuses one that it has already carried out."""

    def get_backoff_time(self) -> float:
        return _wait(len(self.history) - 1)

    def parse_retry_after(self, retry_after: str) -> float:
        return min(super().parse_retry_after(retry_after), _LONGEST_NAMED_WAIT)


class _RestCatalog(RestCatalog):
    """REST catalog that also repeats the requests for a token and for the configuration."""

    def _config_headers(self, session: requests.Session) -> None:
        # Prepare the session here, before its first request for a token.
        super()._config_headers(session)
        _repeat_requests(session)

    def _create_session(self) -> requests.Session:
        session = super()._create_session()
        # The session may now have an adapter that signs requests.
        _repeat_requests(session)
        if isinstance(session.auth, AuthManagerAdapter):
            session.auth = _RepeatedToken(session.auth.auth_manager)
        return session


class _RepeatedToken(AuthManagerAdapter):
    """Authorization that also repeats requests for a token which are made outside the session."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        for repeats in range(_REPEATS):
            try:
                return super().__call__(request)
            except requests.RequestException as error:
                if not _may_pass(error):
                    raise
            time.sleep(_wait(repeats))
        return super().__call__(request)


def _may_pass(error: requests.RequestException) -> bool:
    """Whether a request may succeed if it is repeated."""
    if error.response is not None:
        return error.response.status_code in _BUSY
    return isinstance(error, requests.ConnectionError | requests.Timeout)


def _wait(repeats: int) -> float:
    """Return the number of seconds to wait before the next repetition."""
    longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0**repeats)
    return random.uniform(longest / 2, longest)


def _is_rest(name: str, properties: RecursiveDict) -> bool:
    kind = properties.get(TYPE)
    if isinstance(kind, str):
        return kind.lower() == CatalogType.REST.value
    return infer_catalog_type(name, properties) == CatalogType.REST


def _repeat_requests(session: requests.Session) -> None:
    """Add retries and a timeout to a client's requests, since pyiceberg waits for answers without a limit.

    An adapter that signs requests is kept.
    """
    for adapter in session.adapters.values():
        if isinstance(adapter, HTTPAdapter):
            adapter.max_retries = _Retries(
                total=_REPEATS, allowed_methods=None, status_forcelist=_BUSY, raise_on_status=False
            )
    limited = partial(requests.Session.request, session, timeout=(_CONNECT_SECONDS, ANSWER_SECONDS))
    session.request = limited  # type: ignore[method-assign]
