"""Iceberg catalogs: opening with retries, secrets for redaction, and storage access for Spark tasks."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ParamSpec, TypeVar, cast

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

from penstock.lake.sql_catalogs import SQL_METHODS, is_transient_sql_error

P = ParamSpec("P")
T = TypeVar("T")

REPLY_TIMEOUT_SECONDS = 120.0
"""Timeout for a reply of a REST catalog."""
_CONNECT_TIMEOUT_SECONDS = 10.0
_MAX_RETRIES = 7
"""Number of retries, which take about 20 seconds in total if the catalog replies immediately."""
_MIN_BACKOFF, _MAX_BACKOFF = 0.25, 8.0
_MAX_RETRY_AFTER = 60
"""Maximum number of seconds that a catalog's Retry-After header is followed."""
_RETRIED_STATUSES = (429, 500, 502, 503, 504)
_AUTH_MANAGER, _SNAPSHOT_LOADING_MODE = "auth.manager", "snapshot-loading-mode"
_SIGNER = "s3.signer"
_CATALOG_PROPERTIES = ("auth", _AUTH_MANAGER, "credential", "token", "ssl")
_URI_PROPERTIES, _CLIENT_PREFIXES = ("uri", "oauth2-server-uri"), ("header.", "glue.", "dynamodb.")
_SECRET_NAME = re.compile("token|secret|credential|password")


def open_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """Open a catalog; pyiceberg looks up missing properties in its own configuration.

    Requests to a REST catalog or a SQL catalog are retried if the catalog is busy or its reply is lost. If
    the catalog has already carried out the first request, it answers the retry with a conflict.
    """
    configured = pyiceberg.catalog._ENV_CONFIG.get_catalog_config(name) or {}
    merged = merge_config(configured, cast(RecursiveDict, dict(properties)))
    kind = None if PY_CATALOG_IMPL in properties else _catalog_type(name, merged)
    if kind == CatalogType.REST.value:
        catalog: Catalog = _RestCatalog(name, **cast(dict[str, str], merged))
    elif kind == CatalogType.SQL.value:
        catalog = _retrying_sql(load_catalog)(name, **properties)
        for method in SQL_METHODS:
            setattr(catalog, method, _retrying_sql(getattr(catalog, method)))
    else:
        catalog = load_catalog(name, **properties)
    session = getattr(catalog, "_session", None)
    if isinstance(session, requests.Session):
        _add_retries(session)
        # Load all snapshots: those of branches alone do not show which files are in use or what has changed.
        catalog.properties.pop(_SNAPSHOT_LOADING_MODE, None)
    return catalog


def task_io(io: FileIO) -> FileIO:
    """Return a table's ``FileIO`` for Spark tasks, without the credentials of the catalog.

    If the catalog signs each request to the storage, tasks get the current token.
    """
    properties = dict(io.properties)
    manager = properties.get(_AUTH_MANAGER)
    for name in _CATALOG_PROPERTIES:
        properties.pop(name, None)
    if manager is not None and _SIGNER in properties:
        properties[_AUTH_MANAGER] = _FixedToken(manager.auth_header())
    else:
        properties = {name: value for name, value in properties.items() if not _is_client_property(name)}
    return type(io)(properties)


def client_secrets(catalog: Catalog) -> dict[str, object]:
    """Return the properties of a catalog and the secrets of its client, for redaction."""
    client = getattr(catalog, "_auth_manager", None)
    return {**catalog.properties, **{f"client {name}": value for name, value in _auth_secrets(client)}}


def storage_secrets(table: Table) -> dict[str, object]:
    """Return the storage properties that a catalog may vend to its clients, for redaction."""
    public = table.metadata.properties
    return {name: value for name, value in table.io.properties.items() if public.get(name) != value}


def _auth_secrets(client: object) -> Iterator[tuple[str, str]]:
    """Yield the secrets of a REST catalog's client, such as a fetched OAuth token."""
    for name, value in getattr(client, "__dict__", {}).items():
        if isinstance(value, str) and _SECRET_NAME.search(name):
            yield name, value
        elif name == "token_provider":
            yield from _auth_secrets(value)


def _is_client_property(name: str) -> bool:
    return name in _URI_PROPERTIES or name.startswith(_CLIENT_PREFIXES)


class _FixedToken:
    """Authorization of requests with a fixed token."""

    def __init__(self, header: str | None) -> None:
        self._header = header

    def auth_header(self) -> str | None:
        return self._header


class _RequestRetries(Retry):
    """Retries for all requests, even commits: a catalog refuses a commit that it has already applied."""

    def get_backoff_time(self) -> float:
        return _backoff_seconds(len(self.history) - 1)

    def parse_retry_after(self, retry_after: str) -> float:
        return min(super().parse_retry_after(retry_after), _MAX_RETRY_AFTER)


class _RestCatalog(RestCatalog):
    """REST catalog that also retries the requests for a token and for the configuration."""

    def _config_headers(self, session: requests.Session) -> None:
        # Prepare the session here, before its first request for a token.
        super()._config_headers(session)
        _add_retries(session)

    def _create_session(self) -> requests.Session:
        session = super()._create_session()
        # The parent may have mounted an adapter that signs requests.
        _add_retries(session)
        if isinstance(session.auth, AuthManagerAdapter):
            session.auth = _RetryingAuthorization(session.auth.auth_manager)
        return session


class _RetryingAuthorization(AuthManagerAdapter):
    """Authorization that retries token requests, which are made outside the session."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        for retries in range(_MAX_RETRIES):
            try:
                return super().__call__(request)
            except requests.RequestException as error:
                if not _is_transient(error):
                    raise
            time.sleep(_backoff_seconds(retries))
        return super().__call__(request)


def _is_transient(error: requests.RequestException) -> bool:
    """Whether a failed request may succeed if it is retried."""
    if error.response is not None:
        return error.response.status_code in _RETRIED_STATUSES
    return isinstance(error, requests.ConnectionError | requests.Timeout)


def _backoff_seconds(retries: int) -> float:
    """Return the number of seconds to wait before the next retry: exponential, with jitter."""
    maximum = min(_MAX_BACKOFF, _MIN_BACKOFF * 2.0**retries)
    return random.uniform(maximum / 2, maximum)


def _catalog_type(name: str, properties: RecursiveDict) -> str | None:
    kind = properties.get(TYPE)
    if isinstance(kind, str):
        return kind.lower()
    inferred = infer_catalog_type(name, properties)
    return None if inferred is None else inferred.value


def _retrying_sql(work: Callable[P, T]) -> Callable[P, T]:
    """Return a function of a SQL catalog with retries."""

    def retrying(*args: P.args, **kwargs: P.kwargs) -> T:
        for retries in range(_MAX_RETRIES):
            try:
                return work(*args, **kwargs)
            except Exception as error:
                if not is_transient_sql_error(error):
                    raise
            time.sleep(_backoff_seconds(retries))
        return work(*args, **kwargs)

    return retrying


def _add_retries(session: requests.Session) -> None:
    """Add retries and a timeout to a session, as pyiceberg sets none; keep adapters that sign requests."""
    for adapter in session.adapters.values():
        if isinstance(adapter, HTTPAdapter):
            adapter.max_retries = _RequestRetries(
                total=_MAX_RETRIES,
                allowed_methods=None,
                status_forcelist=_RETRIED_STATUSES,
                raise_on_status=False,
            )
    with_timeout = partial(
        requests.Session.request, session, timeout=(_CONNECT_TIMEOUT_SECONDS, REPLY_TIMEOUT_SECONDS)
    )
    session.request = with_timeout  # type: ignore[method-assign]
