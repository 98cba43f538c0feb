"""What the log of a publication does not tell: which tables they are, and rows that come or go without being logged.

A table that is dropped and made again, or that joins a publication with rows in it, leaves nothing in the log that says so. A
query keeps the state of its publication beside its position in the checkpoint, and ends by name where the catalog has another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import FeedUnavailable
from penstock.feeds.postgres.catalog import Tables, missing_publication
from penstock.feeds.postgres.pgoutput import Relation
from penstock.feeds.postgres.server import Statements

_SCHEMAS_SINCE = 150_000
"""The server that came with publications of whole schemas."""


Columns = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class PublicationState:
    """A publication and its tables at one moment."""

    transaction: int
    """The next one of the server's: what it and later ones make is newer than this."""
    publication: str
    """Its object id, the transaction that altered it last, and what it publishes."""
    tables: Mapping[str, str]
    """By name: the table's object id, and those of the entries of the publication that name it."""
    partitions: Mapping[str, tuple[int, ...]]
    """The leaf partitions of tables that come under their own name."""
    columns: Mapping[str, Columns]
    """By table and name: the column's number, which no other column of the table ever has, its type and its modifier."""
    stamps: Mapping[str, str]
    """Each changes with the definition of a table."""

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "transaction": self.transaction,
            "publication": self.publication,
            "tables": dict(self.tables),
            "partitions": {name: list(oids) for name, oids in self.partitions.items()},
            "columns": {name: dict(columns) for name, columns in self.columns.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> PublicationState:
        partitions = {name: tuple(oids) for name, oids in found["partitions"].items()}
        columns = {name: _columns(each) for name, each in found["columns"].items()}
        return cls(found["transaction"], found["publication"], found["tables"], partitions, columns, {})

    def definitions(self) -> tuple[Any, ...]:
        """What is the same as long as nobody has changed a table or the publication."""
        return self.publication, dict(self.tables), dict(self.partitions), dict(self.stamps)


def state_of(server: Statements, publication: str, tables: Tables) -> PublicationState:
    """The state of a publication now.

    Parameters
    ----------
    tables
        Where the feed names its tables, others do not count.

    Raises
    ------
    FeedUnavailable
        PUBLICATION_MISSING.
    """
    (next_one,) = server.all("transaction")
    found = server.all("publication", publication=publication)
    if not found:
        raise missing_publication(server, publication)
    rows = server.all("published_tables", publication=publication)
    if tables.chosen:
        oids = {table.relation.oid for table in tables.tables}
        names = {table.name for table in tables.tables}
        rows = [row for row in rows if row.oid in oids or row.name in names]
    schemas = _schemas(server, publication)
    return PublicationState(
        next_one.next,
        found[0].state,
        {row.name: _entry(row, schemas) for row in rows},
        {row.name: tuple(row.partitions) for row in rows if row.partitions is not None},
        {row.name: _columns(row.columns or {}) for row in rows},
        {row.name: row.stamp for row in rows},
    )


def _columns(found: Mapping[str, Sequence[int]]) -> Columns:
    return {name: (number, kind, modifier) for name, (number, kind, modifier) in found.items()}


def _schemas(server: Statements, publication: str) -> dict[str, int]:
    (found,) = server.all("server")
    if found.version < _SCHEMAS_SINCE:
        return {}
    return {row.schema: row.oid for row in server.all("published_schemas", publication=publication)}


def _entry(row: Any, schemas: Mapping[str, int]) -> str:
    entries = [str(row.oid), row.entry]
    if row.schema in schemas:
        entries.append(f"s{schemas[row.schema]}")
    return ".".join(entry for entry in entries if entry)


@dataclass(frozen=True)
class Unlogged:
    """Something that has happened to rows and is not in the log."""

    condition: str
    what: str
    """A clause."""
    token: str
    """By what it is accepted."""
    table: str = ""


def unlogged_changes(
    server: Statements,
    publication: str,
    before: PublicationState,
    now: PublicationState,
    tables: Tables,
    columns: Mapping[str, Collection[str]],
    *,
    keeps_emptied: bool,
) -> list[Unlogged]:
    """What has happened between two states that the log does not tell.

    Parameters
    ----------
    columns
        Those that are read, by table.
    keeps_emptied
        Whether rows may stay in the copy that have gone from the source without being deleted.
    """
    replaced = list(_replaced(before, now, columns))
    if before.definitions()[:3] == now.definitions()[:3]:
        return replaced
    new = _Origins(server, publication, before.transaction)
    found = []
    if before.publication != now.publication:
        found.append(
            Unlogged(
                condition="FEED_UNAVAILABLE.PUBLICATION_CHANGED",
                what=f"the publication {publication!r} was altered, and may have left out changes",
                token=f"publication:{now.publication}",
            )
        )
    found += _tables(before, now, tables, new)
    found += _partitions(before, now, new, keeps_emptied)
    return found + replaced


def _replaced(
    before: PublicationState, now: PublicationState, columns: Mapping[str, Collection[str]]
) -> Iterator[Unlogged]:
    for name, old, new in _same_tables(before, now):
        for column, (number, _, _) in new.items():
            if column in columns.get(name, ()) and old.get(column, (number,))[0] != number:
                yield Unlogged(
                    condition="FEED_UNAVAILABLE.COLUMN_REPLACED",
                    what=f"the column {column!r} of {name} is another one than before, whose values are not in the log: update {name} set "
                    f"{column} = {column} sends them",
                    token=f"{name}.{column}:{number}",
                    table=name,
                )


def _same_tables(before: PublicationState, now: PublicationState) -> Iterator[tuple[str, Columns, Columns]]:
    names = {_oid(entry): name for name, entry in before.tables.items()}
    for name, entry in now.tables.items():
        was = names.get(_oid(entry))
        if was is not None:
            yield name, before.columns[was], now.columns[name]


def altered_columns(before: PublicationState, now: PublicationState) -> list[str]:
    """What has been done to columns between two states, for people."""
    found = []
    for table, old, new in _same_tables(before, now):
        names = {number: name for name, (number, _, _) in new.items()}
        numbers = {number for number, _, _ in old.values()}
        for name, (number, *kind) in old.items():
            there = names.get(number)
            if there is None:
                found.append(f"{table}.{name} was dropped")
            elif there != name:
                found.append(f"{table}.{name} is called {there}")
            if there is not None and list(new[there][1:]) != kind:
                found.append(f"{table}.{there} has another type")
        found += [
            f"{table}.{name} was added" for name, (number, _, _) in new.items() if number not in numbers
        ]
    return found


def _tables(
    before: PublicationState, now: PublicationState, tables: Tables, new: _Origins
) -> Iterator[Unlogged]:
    names = {_oid(entry): name for name, entry in before.tables.items()}
    for name, entry in now.tables.items():
        oid = _oid(entry)
        token = f"{name}:{entry}"
        was = before.tables.get(name)
        if was == entry:
            continue
        if was is not None and _oid(was) == oid:
            yield Unlogged(
                condition="FEED_UNAVAILABLE.TABLE_PUBLISHED_AGAIN",
                what=f"{name} was taken out of the publication and added again: what was written meanwhile is not in the log",
                token=token,
                table=name,
            )
        elif was is not None:
            yield Unlogged(
                condition="FEED_UNAVAILABLE.TABLE_RECREATED",
                what=f"{name} is another table than before, whose rows went without being deleted",
                token=token,
                table=name,
            )
        elif oid in names:
            if tables.several or tables.chosen:
                yield Unlogged(
                    condition="FEED_UNAVAILABLE.TABLE_RENAMED",
                    what=f"{names[oid]} is called {name}: its rows have another _table from there on (alter table {name} rename to "
                    f"{names[oid].partition('.')[2]} mends it)",
                    token=token,
                    table=name,
                )
        elif not new.whole(oid):
            yield Unlogged(
                condition="FEED_UNAVAILABLE.TABLE_NOT_COPIED",
                what=f"{name} has joined the publication: rows that it had before are not in the log",
                token=token,
                table=name,
            )


def _partitions(
    before: PublicationState, now: PublicationState, new: _Origins, keeps_emptied: bool
) -> Iterator[Unlogged]:
    for name, oids in now.partitions.items():
        if name not in before.partitions or before.tables.get(name) != now.tables[name]:
            continue
        gone = set(before.partitions[name]) - set(oids)
        if gone and not keeps_emptied:
            yield Unlogged(
                condition="FEED_UNAVAILABLE.PARTITION_DETACHED",
                what=f"{len(gone)} partition(s) of {name} were detached or dropped, whose rows went without being deleted",
                token=f"{name}:" + "".join(f"-{oid}" for oid in sorted(gone)),
                table=name,
            )
        more = [oid for oid in sorted(set(oids) - set(before.partitions[name])) if not new.whole(oid)]
        if more:
            listed = ", ".join(new.name(oid) for oid in more[:3])
            yield Unlogged(
                condition="FEED_UNAVAILABLE.PARTITION_ATTACHED",
                what=f"{listed} became a partition of {name}: rows that it had before are not in the log",
                token=f"{name}:" + "".join(f"+{oid}" for oid in more),
                table=name,
            )


def passed_partitions(
    server: Statements, tables: Tables, relations: Sequence[Relation], *, keeps_emptied: bool
) -> list[Unlogged]:
    """Partitions of the log that their table does not have any more, and did not have before.

    Parameters
    ----------
    relations
        Those that the log names without rows of their own, and that are not known.
    keeps_emptied
        As for :func:`unlogged_changes`.
    """
    if keeps_emptied or not relations or not any(table.partitioned for table in tables.tables):
        return []
    rows = server.all("partition_roots", oids=[relation.oid for relation in relations])
    others = {row.oid for row in rows if row.root not in {table.relation.oid for table in tables.tables}}
    return [
        Unlogged(
            condition="FEED_UNAVAILABLE.PARTITION_DETACHED",
            what=f"the partition {relation.name} came and went: rows that it had before, or took with it, are not in the log",
            token=f"{relation.name}:-{relation.oid}",
            table=relation.name,
        )
        for relation in relations
        if relation.oid not in others
    ]


class _Origins:
    """When tables were made: those that are newer than a state, and were published from then on, have all rows in the log."""

    def __init__(self, server: Statements, publication: str, since: int) -> None:
        self._server, self._publication, self._since = server, publication, since
        self._known: dict[int, Any] = {}

    def whole(self, oid: int) -> bool:
        found = self._find(oid)
        return found is None or (found.created >= self._since and found.made_as_it_is and not found.named)

    def name(self, oid: int) -> str:
        found = self._find(oid)
        return found.name if found is not None else str(oid)

    def _find(self, oid: int) -> Any:
        if oid not in self._known:
            rows = self._server.all("origins", oids=[oid], publication=self._publication)
            self._known[oid] = rows[0] if rows else None
        return self._known[oid]


def refusal(name: str, found: Sequence[Unlogged], accepted: Collection[str]) -> FeedUnavailable | None:
    """The error for what has happened and is not accepted."""
    left = [each for each in found if each.token not in accepted]
    if not left:
        return None
    first = left[0]
    others = f" ({len(left) - 1} more of this kind)" if len(left) > 1 else ""
    tokens = [each.token for each in left]
    return FeedUnavailable(
        f"{name}: {first.what}{others}. Start over with a new slot, a new checkpoint and an empty sink; or continue from here "
        f"with accept={tokens!r}, where the copy may lack that or is mended in another way",
        condition=first.condition,
        table=first.table,
        accept=tokens,
    )


def _oid(entry: str) -> int:
    return int(entry.partition(".")[0])
