"""The URL form of a PostgreSQL feed: libpq's, and the feed's own parameters behind it."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidUrl, MissingDependency
from penstock.store.url import StoreUrl, parse_url

OWN = (
    "publication", "slot", "table", "snapshot", "truncate", "accept", "type", "invalid_values", "skip", "lag_warning", "transaction_warning",
    "slot_wait",
)  # fmt: skip


def driver() -> Any:
    """psycopg, when it is needed.

    Raises
    ------
    MissingDependency
    """
    try:
        import psycopg
    except ImportError:
        raise MissingDependency(
            "a postgresql feed needs psycopg 3: pip install 'penstock[postgres]'", extra="postgres"
        ) from None
    return psycopg


def split(url: str) -> tuple[StoreUrl, dict[str, list[str]]]:
    """The server of a feed's URL, and the feed's own parameters.

    Raises
    ------
    InvalidUrl
        For a URL of another form, or a parameter that neither the feed nor libpq has.
    """
    if not isinstance(url, str) or not url.lower().startswith(("postgresql://", "postgres://")):
        # Not shown: it may hold a password.
        raise InvalidUrl("a PostgreSQL feed's URL is postgresql://user@host/database?publication=NAME")
    _, _, rest = url.partition("://")
    head, _, query = rest.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    _require_known([name for name, _ in given])
    own: dict[str, list[str]] = {}
    for name, value in given:
        if name in OWN:
            own.setdefault(name, []).append(value)
    libpq = [(name, value) for name, value in given if name not in OWN]
    return parse_url(f"postgresql://{head}{_query(libpq)}"), own


def joined(server: StoreUrl, own: list[tuple[str, str]]) -> str:
    """The URL of both."""
    return server.target + _query(own).replace("?", "&" if "?" in server.target else "?", 1)


def shown(server: StoreUrl) -> str:
    """The server without a secret."""
    return str(server)


def _query(parameters: list[tuple[str, str]]) -> str:
    return "?" + urlencode(parameters, quote_via=quote) if parameters else ""


def _require_known(names: list[str]) -> None:
    libpq = [option.keyword.decode() for option in driver().pq.Conninfo.get_defaults()]
    for name in names:
        if name not in OWN and name not in libpq:
            raise InvalidUrl(
                f"a postgresql feed has no parameter {in_quotes(name)}.{did_you_mean(name, [*OWN, *libpq])} It has "
                f"{', '.join(OWN)}, and what libpq has",
                parameter=name,
            )
