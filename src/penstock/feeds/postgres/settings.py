"""Settings of a PostgreSQL feed, and their URL form: a libpq URL with the feed's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import parse_qsl, quote, urlencode

from penstock.arguments import column_names, did_you_mean, in_quotes, refusal, require
from penstock.errors import InvalidUrlError
from penstock.feeds.contract import convert_fields
from penstock.feeds.postgres.values import AS_TYPES
from penstock.store.postgres.connection import driver
from penstock.store.url import CONNECTION_OPTIONS, StoreUrl, parse_url

FEED_PARAMETERS = (
    "publication", "slot", "table", "snapshot", "truncate", "accept", "type", "invalid_values", "skip",
    "lag_warning", "transaction_warning", "slot_wait", "owner",
)  # fmt: skip
_SLOT = re.compile(r"[a-z0-9_]{1,63}")
_CHOICES = {"snapshot": ("initial", "none"), "truncate": ("fail", "skip"), "invalid_values": ("fail", "null")}
_DEFAULTS: dict[str, str | int | float] = {
    "snapshot": "initial",
    "truncate": "fail",
    "invalid_values": "fail",
    "lag_warning": 1 << 30,
    "transaction_warning": 300.0,
    "slot_wait": 10.0,
}


@dataclass(frozen=True)
class FeedSettings:
    """The settings of a feed, completed from its URL and checked; see :class:`PostgresFeed`."""

    url: str = field(repr=False)
    publication: str = ""
    slot: str = ""
    tables: Sequence[str] | None = None
    snapshot: str = ""
    truncate: str = ""
    accept: Sequence[str] | None = None
    types: Mapping[str, str] | None = field(default=None, hash=False)
    invalid_values: str = ""
    skip: Sequence[int] | None = None
    lag_warning: int | None = None
    transaction_warning: float | None = None
    slot_wait: float | None = None
    trusted_owners: Sequence[str] | None = None

    def __post_init__(self) -> None:
        server, feed_parameters = split(self.url)
        convert_fields(self, **self._completed(feed_parameters))
        self._check()
        convert_fields(self, url=self._joined(server))

    @cached_property
    def server(self) -> StoreUrl:
        """The URL of the database, without the feed's parameters."""
        return split(self.url)[0]

    @property
    def name(self) -> str:
        return f"{self.server}, slot {self.slot!r}"

    def _completed(self, feed_parameters: Mapping[str, list[str]]) -> dict[str, object]:
        """Return all settings: those that were passed, those in the URL, and the defaults."""
        tables = feed_parameters.get("table", ()) if self.tables is None else self.tables
        accepted = feed_parameters.get("accept", ()) if self.accept is None else self.accept
        settings: dict[str, object] = {
            "tables": column_names("tables", tables) or None,
            "accept": column_names("accept", accepted) or None,
            "trusted_owners": self._role_names(feed_parameters.get("owner", ())),
            "types": self._types_by_column(feed_parameters.get("type", ())),
            "skip": self._skipped_versions(feed_parameters.get("skip", ())),
        }
        for name in ("publication", "slot"):
            require(name, getattr(self, name), str | None, "text")
            settings[name] = getattr(self, name) or feed_parameters.get(name, [""])[-1]
        default_slot = f"penstock_{settings['publication']}"
        if not settings["slot"] and settings["publication"] and _SLOT.fullmatch(default_slot):
            settings["slot"] = default_slot
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            value = feed_parameters.get(name, [default])[-1] if value in ("", None) else value
            settings[name] = _parsed(name, value, type(default))
        return settings

    def _role_names(self, in_url: Sequence[str]) -> tuple[str, ...] | None:
        expected = "a list of roles such as ['app']"
        require("trusted_owners", self.trusted_owners, Sequence | None, expected)
        roles = in_url if self.trusted_owners is None else self.trusted_owners
        if isinstance(roles, str) or not all(isinstance(role, str) and role for role in roles):
            raise refusal("trusted_owners", roles, expected)
        return tuple(roles) or None

    def _types_by_column(self, in_url: Sequence[str]) -> dict[str, str] | None:
        require("types", self.types, Mapping | None, "a mapping such as {'price': 'text'}")
        types = dict(self.types or {})
        if self.types is None:
            types = {column: kind for column, _, kind in (text.rpartition(":") for text in in_url)}
        for column, kind in types.items():
            if kind not in AS_TYPES or not column:
                raise InvalidUrlError(
                    f"types has {kind!r} for the column {column!r}: use one of {', '.join(AS_TYPES)}; in a "
                    "URL, type=COLUMN:text",
                    condition="INVALID_URL.VALUE",
                    parameter="types",
                )
        return types or None

    def _skipped_versions(self, in_url: Sequence[str]) -> tuple[int, ...] | None:
        expected = "a list of versions such as [34488752]"
        require("skip", self.skip, Sequence | None, expected)
        try:
            versions = [int(text) for text in in_url] if self.skip is None else self.skip
        except ValueError:
            raise InvalidUrlError(
                f"skip={list(in_url)!r}: give versions of commits, which are integers",
                condition="INVALID_URL.VALUE",
                parameter="skip",
            ) from None
        if not all(type(version) is int for version in versions):
            raise refusal("skip", self.skip, expected)
        return tuple(sorted(set(versions))) or None

    def _check(self) -> None:
        if not self.publication:
            raise InvalidUrlError(
                "a PostgreSQL feed needs a publication: postgresql://user@host/database?publication=NAME",
                condition="INVALID_URL.MISSING_PART",
                parameter="publication",
            )
        if not self.slot:
            # Replacing characters could give two publications the same slot.
            raise InvalidUrlError(
                f"the publication's name {self.publication!r} cannot be used for a slot: set slot=NAME, with "
                "lower-case letters, digits and underscores",
                condition="INVALID_URL.MISSING_PART",
                parameter="slot",
            )
        if not _SLOT.fullmatch(self.slot):
            raise InvalidUrlError(
                f"slot={self.slot!r}: name the slot with 1 to 63 lower-case letters, digits and underscores",
                condition="INVALID_URL.VALUE",
                parameter="slot",
            )
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise InvalidUrlError(
                    f"{name}={value!r}: give one of {', '.join(known)}",
                    condition="INVALID_URL.VALUE",
                    parameter=name,
                )

    def _joined(self, server: StoreUrl) -> str:
        """Return the URL with all settings."""
        parameters = [(name, server.options[name]) for name in CONNECTION_OPTIONS if name in server.options]
        parameters += [("publication", self.publication), ("slot", self.slot)]
        parameters += [("table", table) for table in self.tables or ()]
        parameters += [("accept", token) for token in self.accept or ()]
        parameters += [("type", f"{column}:{kind}") for column, kind in (self.types or {}).items()]
        parameters += [("skip", str(version)) for version in self.skip or ()]
        parameters += [("owner", role) for role in self.trusted_owners or ()]
        values = ((name, getattr(self, name)) for name in _DEFAULTS)
        parameters += [(name, str(value)) for name, value in values if value != _DEFAULTS[name]]
        return (
            f"{server.target}{'&' if '?' in server.target else '?'}{urlencode(parameters, quote_via=quote)}"
        )


def split(url: str) -> tuple[StoreUrl, dict[str, list[str]]]:
    """Split a feed's URL into the URL of the database and the feed's parameters."""
    if not isinstance(url, str) or not url.lower().startswith(("postgresql://", "postgres://")):
        # Do not show the URL, which may contain a password.
        raise InvalidUrlError("a PostgreSQL feed's URL is postgresql://user@host/database?publication=NAME")
    _, _, rest = url.partition("://")
    head, _, query = rest.partition("?")
    parameters = parse_qsl(query, keep_blank_values=True)
    _require_known([name for name, _ in parameters])
    feed_parameters: dict[str, list[str]] = {}
    for name, value in parameters:
        if name in FEED_PARAMETERS:
            feed_parameters.setdefault(name, []).append(value)
    libpq = [(name, value) for name, value in parameters if name not in FEED_PARAMETERS]
    return parse_url(
        f"postgresql://{head}{'?' if libpq else ''}{urlencode(libpq, quote_via=quote)}"
    ), feed_parameters


def _require_known(names: Sequence[str]) -> None:
    libpq = [option.keyword.decode() for option in driver("a postgresql feed").pq.Conninfo.get_defaults()]
    feed_parameters = [*FEED_PARAMETERS, *CONNECTION_OPTIONS]
    for name in names:
        if name not in feed_parameters and name not in libpq:
            raise InvalidUrlError(
                "a postgresql feed has no parameter "
                f"{in_quotes(name)}.{did_you_mean(name, [*feed_parameters, *libpq])} It has "
                f"{', '.join(feed_parameters)}, and the parameters of libpq",
                condition="INVALID_URL.UNKNOWN_PARAMETER",
                parameter=name,
            )


def _parsed(name: str, value: str | float, kind: type[str | int | float]) -> str | float:
    try:
        parsed = kind(value)
    except (TypeError, ValueError):
        parsed = -1
    if not isinstance(parsed, str) and not parsed >= 0:
        raise InvalidUrlError(
            f"{name}={value!r}: give a number, 0 or more", condition="INVALID_URL.VALUE", parameter=name
        )
    return parsed
