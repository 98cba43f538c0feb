"""The feed of a PostgreSQL publication."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.arguments import column_names, require
from penstock.errors import InvalidUrl
from penstock.feeds.postgres.address import joined, shown, split
from penstock.feeds.postgres.open_feed import Link, LogPiece
from penstock.feeds.postgres.slot import SlotLag
from penstock.feeds.postgres.values import AS_TYPES
from penstock.feeds.protocol import Commit, Description

_SLOT = re.compile(r"[a-z0-9_]{1,63}")
_SNAPSHOTS = ("initial", "none")
_TRUNCATES = ("fail", "skip")
_INVALID_VALUES = ("fail", "null")
_LAG_WARNING = 1 << 30
_TRANSACTION_WARNING = 300.0
_SLOT_WAIT = 10.0


@dataclass(frozen=True)
class PostgresFeed:
    """The changes of the tables of a PostgreSQL publication, through a logical replication slot; no agent, no broker.

    A transaction is a commit: its version is the log position (LSN) of its commit record, its timestamp the server's. What has
    been read can be read again until Spark has logged it; then the slot moves on.

    One table comes with its columns; several come in one form: ``_table`` ("schema.table"), ``_key`` (the key as JSON), and for
    each table a struct that is null in the rows of others. ``tables`` with one name selects one table of a publication.
    ``_commit_sequence`` orders the rows of a commit. ``_unchanged`` names the columns of a row whose value is not known: a long
    value that an update did not touch is not in the log, unless the table's replica identity is full.

    With the default replica identity an update has no pre-image and a delete nothing but the key. An update that changes the key
    is a delete and an insert right behind it, whose unknown values are those of the deleted row. A table without a key needs ``replica identity full``; its rows are told apart by all columns.

    Types: boolean, smallint to bigint, real, double, numeric(p, s) up to 38 digits, date, timestamp with and without time zone,
    bytea as Arrow has them; domains as what they are made of; everything else (numeric without a precision, time, interval,
    uuid, json, enums, arrays, …) as the text that PostgreSQL writes. Infinite dates and times become the first and the last
    that Spark has; other dates before year 1 or after 9999, and NaN in a numeric with a precision, are an error: see ``types`` and
    ``invalid_values``.

    Parameters
    ----------
    url
        libpq's URL of the database; the other parameters may be in its query, ``table`` several times.
    publication
        What the server publishes: ``create publication … for table …``.
    slot
        The replication slot: lower-case letters, digits and underscores. A slot is for one query. By default ``penstock_`` and
        the publication's name, where that name is of such letters.
    tables
        Some tables of the publication, as "schema.table" or "table"; all when None.
    snapshot
        ``initial``: a streaming query with a new checkpoint makes the slot, and the rows that are there come first, as inserts
        of one commit. They are copied inside the database, into the schema ``penstock_snapshots``, until they are logged. Where
        the slot has been read already, or was made by hand, a query with a new checkpoint is refused, since it would miss rows.
        ``none``: the slot has to be there, and gives what it still has.
    truncate
        What to do with TRUNCATE of a table: ``fail`` the query, or ``skip`` it, so that the feed's reader keeps the rows.
    accept
        What has happened to the tables that their log does not tell, and the copy may lack: as the error names it that stops the
        query.
    types
        Columns to read as ``text``, or as ``double``, rather than as their own type: ``{"price": "text"}``, or with the table where
        several have a column of that name, ``{"orders.price": "double"}``. Text has every value.
    invalid_values
        What to do with a value that its type here cannot hold, such as NaN in a numeric with a precision: ``fail`` the query, or
        ``null``, which gives NULL in its place and logs how many there were.
    skip
        Commits to leave out, by their versions: knowingly, since the copy lacks their rows from then on.
    lag_warning
        Bytes of log that the slot may keep on the server's disk before a warning is logged; 0 for no warning.
    transaction_warning
        Seconds that a transaction on the server may be open before a warning is logged and told in the progress of the query, since
        the slot keeps all log that is written meanwhile; 0 for no warning.
    slot_wait
        Seconds to wait for another reader of the slot to leave.

    Raises
    ------
    InvalidUrl
        For a parameter that is wrong, missing or unknown.
    MissingDependency
        Without psycopg.
    """

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

    def __post_init__(self) -> None:
        server, own = split(self.url)
        self._settle(own)
        self._check()
        parameters = [("publication", self.publication), ("slot", self.slot)]
        parameters += [("table", table) for table in self.tables or ()]
        parameters += [("accept", each) for each in self.accept or ()]
        parameters += [("type", f"{column}:{kind}") for column, kind in (self.types or {}).items()]
        parameters += [("skip", str(version)) for version in self.skip or ()]
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default:
                parameters.append((name, str(getattr(self, name))))
        object.__setattr__(self, "url", joined(server, parameters))
        object.__setattr__(self, "_name", f"{shown(server)}, slot {self.slot!r}")

    @classmethod
    def from_url(cls, url: str) -> PostgresFeed:
        """The feed of a URL."""
        return cls(url)

    @property
    def name(self) -> str:
        """The feed for messages."""
        name: str = self.__dict__["_name"]
        return name

    def describe(self, after: int | None = None) -> Description:
        """The tables of the publication, as the rows were written that are to be read: those after a version, or all."""
        return self._link().describe(after)

    def follow(self, plan: str | None, columns: Sequence[str], *, some_columns: bool) -> None:
        """Read some columns of the tables as they were described."""
        self._link().follow(plan, columns, some_columns)

    def stream_start(self) -> dict[str, Any]:
        """The state of the publication with which a new query begins."""
        return self._link().publication_state()

    def stream_end(self, after: int, state: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """The version up to which a stream can be read by its plan, and the state of the publication at that moment."""
        return self._link().stream_end(after, state)

    def begin(self) -> int:
        """The start of a new query; with ``snapshot="initial"``, the slot and its snapshot are made where there is no slot."""
        return self._link().begin()

    def oldest(self) -> int:
        """The position of the slot, or just before its snapshot."""
        return self._link().oldest()

    def newest(self, after: int) -> int:
        """The end of the log, where there are changes above ``after``."""
        return self._link().newest(after)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """The transactions of a range, counted on the server."""
        return self._link().commits(after, upto, rows)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Any]:
        """One task for the log, since a slot has one reader at a time, and several for the snapshot."""
        return self._link().tasks(after, upto, rows_per_task)

    def read(self, task: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a task, a few megabytes of log at a time."""
        link = Link(self)
        with closing(link):
            if isinstance(task, LogPiece):
                yield from link.read_log(task, schema)
            else:
                yield from link.read_snapshot(task, schema)

    def logged(self, upto: int) -> None:
        """Move the slot on, and drop the snapshot's copies."""
        self._link().logged(upto)

    def lag(self) -> SlotLag:
        """The bytes of log that the slot keeps on the server, those of them that have not been confirmed, and who else holds them."""
        return self._link().lag()

    def warnings(self) -> list[str]:
        """A transaction that has been open on the server for too long."""
        return self._link().warnings()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def _link(self) -> Link:
        # What is open belongs to this process, and to this feed.
        if "_opened" not in self.__dict__:
            object.__setattr__(self, "_opened", Link(self))
        link: Link = self.__dict__["_opened"]
        return link

    def _settle(self, own: dict[str, list[str]]) -> None:
        def one(name: str) -> str | None:
            return (own.get(name) or [None])[-1]  # type: ignore[list-item] # None stands for nothing given

        tables = self.tables if self.tables is not None else own.get("table")
        accept = self.accept if self.accept is not None else own.get("accept")
        settled: dict[str, Any] = {
            "tables": column_names("tables", tables or ()) or None,
            "accept": column_names("accept", accept or ()) or None,
            "types": self._types(own.get("type", ())),
            "skip": self._skip(own.get("skip", ())),
        }
        for name in ("publication", "slot"):
            require(name, getattr(self, name), str | None, "text")
            settled[name] = getattr(self, name) or one(name) or ""
        by_default = f"penstock_{settled['publication']}"
        if not settled["slot"] and settled["publication"] and _SLOT.fullmatch(by_default):
            settled["slot"] = by_default
        for name, default in _DEFAULTS.items():
            given = getattr(self, name)
            given = one(name) if given in ("", None) else given
            settled[name] = default if given is None else _number(name, given, type(default))
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def _types(self, given: Sequence[str]) -> dict[str, str] | None:
        require("types", self.types, Mapping | None, "a mapping such as {'price': 'text'}")
        found = dict(self.types or {})
        if self.types is None:
            for each in given:
                column, _, kind = each.rpartition(":")
                found[column] = kind
        for column, kind in found.items():
            if kind not in AS_TYPES or not column:
                raise InvalidUrl(
                    f"types: the column {column!r} as {kind!r}: a column is read as one of {', '.join(AS_TYPES)}; in a URL, "
                    "type=COLUMN:text",
                    parameter="types",
                )
        return found or None

    def _skip(self, given: Sequence[str]) -> tuple[int, ...] | None:
        require("skip", self.skip, Sequence | None, "a list of versions such as [34488752]")
        versions = given if self.skip is None else self.skip
        try:
            return tuple(sorted({int(each) for each in versions})) or None
        except ValueError:
            raise InvalidUrl(
                f"skip={list(versions)!r}: give the versions of commits, which are whole numbers",
                parameter="skip",
            ) from None

    def _check(self) -> None:
        if not self.publication:
            raise InvalidUrl(
                "a PostgreSQL feed needs a publication: postgresql://user@host/database?publication=NAME",
                parameter="publication",
            )
        if not self.slot:
            # Two publications must not come to one slot, which is what would happen if their letters were changed.
            raise InvalidUrl(
                f"no slot can be called after the publication {self.publication!r}: give slot=NAME, of lower-case letters, "
                "digits and underscores",
                parameter="slot",
            )
        if not _SLOT.fullmatch(self.slot):
            raise InvalidUrl(
                f"slot={self.slot!r}: PostgreSQL's slots have 1 to 63 lower-case letters, digits and underscores",
                parameter="slot",
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise InvalidUrl(
                    f"{name}={getattr(self, name)!r}: give one of {', '.join(known)}", parameter=name
                )


_CHOICES = {"snapshot": _SNAPSHOTS, "truncate": _TRUNCATES, "invalid_values": _INVALID_VALUES}
_DEFAULTS: dict[str, Any] = {
    "snapshot": "initial",
    "truncate": "fail",
    "invalid_values": "fail",
    "lag_warning": _LAG_WARNING,
    "transaction_warning": _TRANSACTION_WARNING,
    "slot_wait": _SLOT_WAIT,
}


def _number(name: str, given: Any, kind: type) -> Any:
    try:
        found = kind(given)
    except (TypeError, ValueError):
        found = -1
    if not isinstance(found, str) and not found >= 0:
        raise InvalidUrl(f"{name}={given!r}: give a number, 0 or more", parameter=name)
    return found
