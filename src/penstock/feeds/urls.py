"""The URL form of a feed: ``kind:what?parameter=value``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidUrl
from penstock.spark.options import parse_boolean

if TYPE_CHECKING:
    from penstock.feeds.protocol import Changelog

# Loaded when they are asked for: each has a library of its own.
_KINDS = {
    "queue": ("penstock.feeds.queue_feed", "QueueFeed"),
    "delta": ("penstock.feeds.delta", "DeltaFeed"),
    "iceberg": ("penstock.feeds.iceberg", "IcebergFeed"),
    "postgresql": ("penstock.feeds.postgres", "PostgresFeed"),
    "postgres": ("penstock.feeds.postgres", "PostgresFeed"),
    "snapshots": ("penstock.feeds.snapshots.feed", "SnapshotFeed"),
}
_FORMS = "queue:NAME?store=URL, postgresql://…?publication=NAME, delta:PATH, iceberg:TABLE, snapshots:PATH?row_id=COLUMN"


@dataclass(frozen=True)
class FeedUrl:
    """A feed's URL in parts; a parameter may come several times."""

    kind: str
    target: str = field(repr=False)
    parameters: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        given = [(name, value) for name, value in self.parameters if value]
        query = f"?{urlencode(given, quote_via=quote)}" if given else ""
        return f"{self.kind}:{quote(self.target, safe='/:@,[]')}{query}"

    @classmethod
    def of(cls, text: str) -> FeedUrl:
        """The parts of a URL.

        Raises
        ------
        InvalidUrl
            When it is none; it is not shown, since it may hold a password.
        """
        kind, colon, rest = str(text).partition(":")
        target, _, query = rest.partition("?")
        if not colon or not target:
            raise InvalidUrl(f"a change feed is one of {_FORMS}")
        parameters = parse_qsl(query, keep_blank_values=True)
        return cls(kind.lower(), unquote(target), tuple(parameters))

    def given(self, name: str) -> tuple[str, ...]:
        """All values of a parameter."""
        return tuple(value for each, value in self.parameters if each == name)

    def one(self, name: str) -> str | None:
        """The value of a parameter; the last one where it is given twice."""
        return (self.given(name) or (None,))[-1]

    def flag(self, name: str) -> bool:
        """Whether a parameter is true; it is not where it is not given.

        Raises
        ------
        InvalidUrl
        """
        value = self.one(name) or "false"
        try:
            return parse_boolean(value)
        except ValueError as error:
            raise InvalidUrl(f"{name}={in_quotes(value)} in the URL of a {self.kind} feed: {error}") from None

    def prefixed(self, prefix: str) -> dict[str, str]:
        """The parameters whose names begin so, without that beginning."""
        found = [(name, value) for name, value in self.parameters if name.startswith(prefix)]
        return {name.removeprefix(prefix): value for name, value in found}

    def require_known(self, known: Iterable[str], prefixes: tuple[str, ...] = ()) -> None:
        """Refuse parameters that a feed of this kind does not have.

        Raises
        ------
        InvalidUrl
            Naming the nearest one.
        """
        names = list(known)
        for name, _ in self.parameters:
            if name not in names and not name.startswith(prefixes or ("\0",)):
                listed = ", ".join([*names, *(f"{prefix}…" for prefix in prefixes)])
                raise InvalidUrl(
                    f"a {self.kind} feed has no parameter {in_quotes(name)}.{did_you_mean(name, names)} It has {listed}",
                    parameter=name,
                )


def _completed(url: str, parameters: Mapping[str, str]) -> str:
    """A feed's URL with parameters where it does not have them."""
    given = {name for name, _ in FeedUrl.of(url).parameters}
    more = [(name, value) for name, value in parameters.items() if name not in given]
    return f"{url}{'&' if '?' in url else '?'}{urlencode(more, quote_via=quote)}" if more else url


def row_id_forms(kind: str, target: str, made: str) -> str:
    """How to name the columns that tell rows apart, where a feed is a URL and where it is an object.

    Parameters
    ----------
    target
        What a feed of the kind is of, such as ``path``.
    made
        The class of the feed.
    """
    return f"{kind}:{target.upper()}?row_id=COLUMN as a URL, {made}({target}, row_id=…) in Python"


def pairs(**parameters: str | Iterable[str] | None) -> tuple[tuple[str, str], ...]:
    """Parameters for a URL: several values become several parameters, None none."""
    found: list[tuple[str, str]] = []
    for name, value in parameters.items():
        values = [value] if isinstance(value, str) else list(value or ())
        found += [(name, each) for each in values]
    return tuple(found)


def prefixed(prefix: str, values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """A mapping as parameters."""
    return tuple((f"{prefix}{name}", value) for name, value in sorted(values.items()))


def parse(url: str, *, store: str | None = None) -> Changelog:
    """The feed of a URL.

    Parameters
    ----------
    store
        The store of a queue's feed whose URL does not name one.

    Raises
    ------
    InvalidUrl
        For an unknown kind of feed, or an unknown parameter.
    MissingDependency
        When the kind needs an extra that is not installed.
    """
    parts = FeedUrl.of(url)
    if parts.kind not in _KINDS:
        raise InvalidUrl(
            f"there is no kind of change feed {in_quotes(parts.kind)}.{did_you_mean(parts.kind, _KINDS)} A feed is one of "
            f"{_FORMS}"
        )
    if store is not None and parts.kind == "queue":
        url = _completed(url, {"store": store})
    module, name = _KINDS[parts.kind]
    feed: Changelog = getattr(import_module(module), name).from_url(url)
    return feed
