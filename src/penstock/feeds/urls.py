"""URLs of feeds: ``kind:target?parameter=value``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidUrlError
from penstock.spark.options import parse_boolean

if TYPE_CHECKING:
    from penstock.feeds.protocol import Feed

# Modules are imported on demand, because each kind needs its own library.
_KINDS = {
    "queue": ("penstock.feeds.queue_feed", "QueueFeed"),
    "delta": ("penstock.feeds.delta", "DeltaFeed"),
    "iceberg": ("penstock.feeds.iceberg", "IcebergFeed"),
    "postgresql": ("penstock.feeds.postgres", "PostgresFeed"),
    "postgres": ("penstock.feeds.postgres", "PostgresFeed"),
    "snapshots": ("penstock.feeds.snapshots", "SnapshotFeed"),
}
_FORMS = (
    "queue:NAME?store=URL, postgresql://…?publication=NAME, delta:PATH, iceberg:TABLE, "
    "snapshots:PATH?row_id=COLUMN"
)


@dataclass(frozen=True)
class FeedUrl:
    """A parsed feed URL; a parameter may have several values."""

    kind: str
    target: str = field(repr=False)
    parameters: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        parameters = [(name, value) for name, value in self.parameters if value]
        query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
        return f"{self.kind}:{quote(self.target, safe='/:@,[]')}{query}"

    @classmethod
    def of(cls, text: str) -> FeedUrl:
        kind, colon, rest = str(text).partition(":")
        target, _, query = rest.partition("?")
        if not colon or not target:
            # Do not show the URL, which may contain a password.
            raise InvalidUrlError(f"the URL of a change feed is one of {_FORMS}")
        parameters = parse_qsl(query, keep_blank_values=True)
        return cls(kind.lower(), unquote(target), tuple(parameters))

    def all(self, name: str) -> tuple[str, ...]:
        return tuple(value for key, value in self.parameters if key == name)

    def one(self, name: str) -> str | None:
        """Return the value of a parameter, the last one if there are several."""
        return (self.all(name) or (None,))[-1]

    def flag(self, name: str) -> bool:
        """Return the value of a boolean parameter; False if it is missing."""
        value = self.one(name) or "false"
        try:
            return parse_boolean(value)
        except ValueError as error:
            raise InvalidUrlError(
                f"{name}={in_quotes(value)} in the URL of a {self.kind} feed: {error}",
                condition="INVALID_URL.VALUE",
            ) from None

    def prefixed(self, prefix: str) -> dict[str, str]:
        """Return the parameters whose names have a prefix, without the prefix."""
        return {
            name.removeprefix(prefix): value for name, value in self.parameters if name.startswith(prefix)
        }

    def require_known(self, known: Iterable[str], prefixes: tuple[str, ...] = ()) -> None:
        names = list(known)
        for name, _ in self.parameters:
            if name not in names and not name.startswith(prefixes):
                listed = ", ".join([*names, *(f"{prefix}…" for prefix in prefixes)])
                raise InvalidUrlError(
                    f"a {self.kind} feed has no parameter {in_quotes(name)}.{did_you_mean(name, names)} It "
                    f"has {listed}",
                    condition="INVALID_URL.UNKNOWN_PARAMETER",
                    parameter=name,
                )


def row_id_forms(kind: str, target: str, class_name: str) -> str:
    """Return advice on how to set row_id; ``target`` is the feed's first parameter, such as ``path``."""
    return f"{kind}:{target.upper()}?row_id=COLUMN as a URL, {class_name}({target}, row_id=…) in Python"


def pairs(**parameters: str | Iterable[str] | None) -> tuple[tuple[str, str], ...]:
    """Return parameters for a URL: a sequence becomes several parameters, and None is left out."""
    parameters_of_url: list[tuple[str, str]] = []
    for name, value in parameters.items():
        values = [value] if isinstance(value, str) else value or ()
        parameters_of_url += [(name, text) for text in values]
    return tuple(parameters_of_url)


def prefixed(prefix: str, values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the items of a mapping as parameters whose names have a prefix."""
    return tuple((f"{prefix}{name}", value) for name, value in sorted(values.items()))


def parse(url: str, *, store: str | None = None) -> Feed:
    """Return the feed of a URL.

    Parameters
    ----------
    store
        The store of a queue feed whose URL has no store.

    Raises
    ------
    InvalidUrlError
        For an unknown kind of feed, or an unknown parameter.
    MissingDependencyError
        When the kind needs an extra that is not installed.
    """
    parts = FeedUrl.of(url)
    if parts.kind not in _KINDS:
        raise InvalidUrlError(
            f"there is no kind of change feed {in_quotes(parts.kind)}.{did_you_mean(parts.kind, _KINDS)} The "
            f"URL of a feed is one of {_FORMS}",
            condition="INVALID_URL.UNKNOWN_KIND",
        )
    if store is not None and parts.kind == "queue" and parts.one("store") is None:
        url = str(replace(parts, parameters=(*parts.parameters, ("store", store))))
    module, name = _KINDS[parts.kind]
    feed: Feed = getattr(import_module(module), name).from_url(url)
    return feed
