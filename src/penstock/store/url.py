"""Store URLs: which database, and how to speak of it without its password."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from penstock.errors import InvalidUrl
from penstock.names import did_you_mean

_FORMS = "sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database?schema=penstock"
_SQLITE_OPTIONS = ("synchronous", "busy_timeout")
_SYNCHRONOUS = ("full", "normal")
_SCHEMES = {"sqlite": "sqlite", "postgresql": "postgres", "postgres": "postgres"}


@dataclass(frozen=True)
class StoreUrl:
    """A parsed store URL; its text form hides the password."""

    dialect: str
    target: str = field(repr=False)
    """The absolute path of the SQLite file, or the libpq URL."""
    schema: str
    redacted: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.redacted


def parse_url(url: str) -> StoreUrl:
    """Parse a store URL.

    Parameters
    ----------
    url
        ``sqlite:///file`` with the options ``synchronous`` (``full``, the default, or ``normal``) and
        ``busy_timeout`` (milliseconds, 30000), or ``postgresql://…`` with ``schema`` (``penstock``); any other
        query parameter of a PostgreSQL URL is libpq's.

    Raises
    ------
    InvalidUrl
        When it is neither, names no database, or has an unknown option.
    """
    if not isinstance(url, str) or "://" not in url:
        raise InvalidUrl(f"a store URL is one of {_FORMS}, not {_shown(url)}")
    scheme = url.split("://", 1)[0].lower()
    if scheme not in _SCHEMES:
        raise InvalidUrl(f"stores are sqlite or postgresql, not {scheme!r}: use one of {_FORMS}", scheme=scheme)
    return _sqlite(url) if _SCHEMES[scheme] == "sqlite" else _postgres(url)


def _shown(url: object) -> str:
    return repr(re.sub(r"//[^/@]*@", "//***@", str(url)))


def _sqlite(url: str) -> StoreUrl:
    rest = url.split("://", 1)[1]
    path, _, query = rest.partition("?")
    if not path.startswith("/") or path == "/":
        raise InvalidUrl(f"{url!r} names no file: write sqlite:///relative.db or sqlite:////absolute.db")
    options = dict(parse_qsl(query))
    for name in options:
        if name not in _SQLITE_OPTIONS:
            raise InvalidUrl(f"unknown SQLite option {name!r}.{did_you_mean(name, _SQLITE_OPTIONS)}", option=name)
    if options.get("synchronous", "full") not in _SYNCHRONOUS:
        raise InvalidUrl(f"synchronous is full or normal, not {options['synchronous']!r}")
    if not options.get("busy_timeout", "0").isdigit():
        raise InvalidUrl(f"busy_timeout is a number of milliseconds, not {options['busy_timeout']!r}")
    target = os.path.abspath(unquote(path[1:]))
    return StoreUrl("sqlite", target, "main", f"sqlite:///{target}", options)


def _postgres(url: str) -> StoreUrl:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InvalidUrl(f"{_shown(url)} is not a URL: {error}") from None
    query = parse_qsl(parts.query, keep_blank_values=True)
    schema = dict(query).get("schema") or "penstock"
    if "\0" in schema or len(schema.encode()) > 63:
        raise InvalidUrl("a PostgreSQL schema's name has 1 to 63 bytes", schema=schema)
    libpq = [(name, value) for name, value in query if name != "schema"]
    target = parts._replace(scheme="postgresql", query=urlencode(libpq, quote_via=quote)).geturl()
    shown = [(name, value) for name, value in query if name not in ("password", "sslpassword")]
    host = parts.netloc.rpartition("@")
    user = host[0].split(":", 1)[0]
    netloc = (user + "@" if user else "") + host[2]
    redacted = parts._replace(scheme="postgresql", netloc=netloc, query=urlencode(shown, quote_via=quote)).geturl()
    return StoreUrl("postgres", target, '"' + schema.replace('"', '""') + '"', redacted, {"schema": schema})
