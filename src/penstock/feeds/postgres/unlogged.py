"""Changes of rows that are not in the log, such as those of recreated tables.

A table that is recreated, or that joins a publication with rows in it, leaves no trace in the log. A query
ends with an error if the catalog has another state of the publication than its checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.pgoutput import Relation
from penstock.feeds.postgres.publication import PublicationState, oid_of, same_tables
from penstock.feeds.postgres.server import START_OVER, Statements

_WITHOUT_KEY = "fn"
"""Replica identities with which rows are logged without a key: full and nothing."""


@dataclass(frozen=True)
class Unlogged:
    """A change of rows that is not in the log."""

    condition: str
    what: str
    """A clause that describes it."""
    token: str
    """What the user lists in ``accept`` to continue."""
    table: str


def _unlogged(condition: str, what: str, token: str, table: str = "") -> Unlogged:
    return Unlogged(f"FEED_UNAVAILABLE.{condition}", what, token, table)


def changes_between(
    server: Statements,
    publication: str,
    before: PublicationState,
    now: PublicationState,
    tables: Tables,
    columns: Mapping[str, Collection[str]],
    *,
    keeps_emptied: bool,
) -> list[Unlogged]:
    """Return what has happened between two states that is not in the log.

    ``columns`` has the columns that are read, by the table's name now. ``keeps_emptied`` says whether the
    copy may keep rows that left the source without being deleted.
    """
    replaced = list(_replaced(before, now, columns))
    if tables.changes_rows:
        replaced += _replaced_keys(before, now)
    if before.definitions()[:3] == now.definitions()[:3]:
        return replaced
    older = _older_tables(server, publication, before, now)
    changes = []
    if before.publication != now.publication:
        changes.append(
            _unlogged(
                "PUBLICATION_CHANGED",
                f"the publication {publication!r} was altered, and may have left out changes meanwhile",
                f"publication:{now.publication}",
            )
        )
    changes += _tables(before, now, tables, older)
    changes += _partitions(before, now, older, keeps_emptied)
    return changes + replaced


def _replaced(
    before: PublicationState, now: PublicationState, columns: Mapping[str, Collection[str]]
) -> Iterator[Unlogged]:
    for was, name in same_tables(before, now):
        old = {column: number for column, (number, *_) in before.columns[was].items()}
        old |= before.dropped.get(was, {})
        for column, (number, *_) in now.columns[name].items():
            if column in columns.get(name, ()) and old.get(column, number) != number:
                yield _other_column(name, column, number, "was replaced, without values in the log")


def _other_column(table: str, column: str, number: int, what: str) -> Unlogged:
    clause = f"the column {column!r} of {table} {what}: update {table} set {column} = {column} sends them"
    return _unlogged("COLUMN_REPLACED", clause, f"{table}.{column}:{number}", table)


def _replaced_keys(before: PublicationState, now: PublicationState) -> Iterator[Unlogged]:
    """Yield the tables whose primary key is another one, and whose log may not say so.

    With replica identity full or nothing, rows are logged without a key.
    """
    for was, name in same_tables(before, now):
        identities = before.keys[was].identity, now.keys[name].identity
        if any(identity in _WITHOUT_KEY for identity in identities):
            yield from _replaced_key(before, was, now, name)


def _replaced_key(before: PublicationState, was: str, now: PublicationState, name: str) -> Iterator[Unlogged]:
    key = now.keys[name].constraint
    if before.keys[was].constraint != key:
        what = (
            f"{name} had another primary key, or none: rows that were logged meanwhile may be several with "
            "one key"
        )
        yield _unlogged("KEY_REPLACED", what, f"{name}:key{key}", name)


def doubtful_keys(relation: Relation, before: PublicationState, now: PublicationState) -> Iterator[Unlogged]:
    """Yield the table of a relation in the log whose rows may have had another key, or none.

    ``before`` and ``now`` are states from before and after the relation's rows.
    """
    was, name = before.names.get(relation.oid), now.names.get(relation.oid)
    if was is not None and name is not None and relation.identity in _WITHOUT_KEY:
        yield from _replaced_key(before, was, now, name)


def doubtful_columns(
    relation: Relation,
    before: PublicationState,
    now: PublicationState,
    columns: Mapping[str, Collection[str]],
) -> Iterator[Unlogged]:
    """Yield the columns of a relation in the log that may be others than those of the same names are now.

    Parameters
    ----------
    before, now
        States from before and after the relation's rows.
    columns
        The columns that are read, by the table's name now.
    """
    was, name = before.names.get(relation.oid), now.names.get(relation.oid)
    if was is None or name is None:
        return
    old, new = before.columns[was], now.columns[name]
    logged = relation.names
    existed = {number for number, *_ in old.values()}
    possible = sorted(existed.union(range(before.widths[was] + 1, now.widths[name] + 1)))
    present = {number for number, *_ in new.values()}
    doubtful = set()
    least = max(existed & present, default=0)
    for numbers in _possible_numbers(len(logged), possible, present, least):
        current = zip(logged, numbers, strict=True)
        doubtful |= {column for column, number in current if column in new and new[column][0] != number}
    for column in sorted(doubtful.intersection(columns.get(name, ()))):
        what = "may have been replaced, and have other values in the log"
        yield _other_column(name, column, new[column][0], what)


def _possible_numbers(
    size: int, possible: Sequence[int], present: Collection[int], least: int
) -> Iterator[list[int]]:
    """Yield which numbers a relation's columns may have had, in their order: the lowest and the highest.

    They are ascending. A column that exists now existed then, unless it is newer than all of the relation's.
    ``least`` is the highest number of a column that existed before and exists now, and so existed then.
    """
    lasting = [number for number in possible if number in present]
    gone = [number for number in possible if number not in present]
    for last in possible[bisect_left(possible, least) :]:
        fixed = lasting[: bisect_right(lasting, last)]
        others = gone[: bisect_left(gone, last)]
        missing = size - len(fixed) - (last not in present)
        if not 0 <= missing <= len(others):
            continue
        mine = [] if last in present else [last]
        yield sorted([*fixed, *others[:missing], *mine])
        yield sorted([*fixed, *others[len(others) - missing :], *mine])


def altered_columns(before: PublicationState, now: PublicationState) -> list[str]:
    """Describe the changes of columns between two states, for people."""
    changes = []
    for was, table in same_tables(before, now):
        old, new = before.columns[was], now.columns[table]
        names = {number: name for name, (number, _, _) in new.items()}
        numbers = {number for number, _, _ in old.values()}
        for name, (number, *kind) in old.items():
            current = names.get(number)
            if current is None:
                changes.append(f"{table}.{name} was dropped")
            elif current != name:
                changes.append(f"{table}.{name} was renamed to {current}")
            if current is not None and list(new[current][1:]) != kind:
                changes.append(f"{table}.{current} has another type")
        changes += [
            f"{table}.{name} was added" for name, (number, _, _) in new.items() if number not in numbers
        ]
    return changes


def _tables(
    before: PublicationState, now: PublicationState, tables: Tables, older: Collection[int]
) -> Iterator[Unlogged]:
    names = before.names
    for name, entry in now.tables.items():
        oid = oid_of(entry)
        token = f"{name}:{entry}"
        was = before.tables.get(name)
        if was == entry:
            continue
        if was is not None and oid_of(was) != oid:
            yield _recreated(name, token)
        elif oid in names and before.tables[names[oid]] != entry:
            what = (
                f"{name} was removed from the publication and added again, or got another row filter or "
                "column list: the log lacks rows written meanwhile, or that the filter left out"
            )
            yield _unlogged("TABLE_PUBLISHED_AGAIN", what, token, name)
        elif oid in names:
            if tables.several or tables.chosen:
                what = (
                    f"{names[oid]} was renamed to {name}, so its rows have another _table now (alter table "
                    f"{name} rename to {names[oid].partition('.')[2]} undoes it)"
                )
                yield _unlogged("TABLE_RENAMED", what, token, name)
        elif oid in older:
            what = f"{name} has joined the publication, and its earlier rows are not in the log"
            yield _unlogged("TABLE_NOT_COPIED", what, token, name)


def _recreated(name: str, token: str) -> Unlogged:
    what = f"{name} was recreated, and the rows of the earlier table were not deleted in the log"
    return _unlogged("TABLE_RECREATED", what, token, name)


def _partitions(
    before: PublicationState, now: PublicationState, older: Mapping[int, str], keeps_emptied: bool
) -> Iterator[Unlogged]:
    for was, name in same_tables(before, now):
        if was not in before.partitions or name not in now.partitions:
            continue
        old, new = before.partitions[was], now.partitions[name]
        detached = old.keys() - new.keys()
        if detached and not keeps_emptied:
            what = f"{len(detached)} partition(s) of {name} were detached or dropped without deletes"
            token = f"{name}:" + "".join(f"-{oid}" for oid in sorted(detached))
            yield _unlogged("PARTITION_DETACHED", what, token, name)
        attached = sorted(older.keys() & new.keys() - old.keys())
        if attached:
            listed = _listed(older, attached)
            what = f"{listed} became a partition of {name}, and its earlier rows are not in the log"
            token = f"{name}:" + "".join(f"+{oid}" for oid in attached)
            yield _unlogged("PARTITION_ATTACHED", what, token, name)
        again = sorted(oid for oid in old.keys() & new.keys() if old[oid] != new[oid])
        if again:
            what = (
                f"{_listed(older, again)} was detached from {name} and attached again: rows written "
                "meanwhile are not in the log"
            )
            token = f"{name}:" + "".join(f"+{oid}.{new[oid]}" for oid in again)
            yield _unlogged("PARTITION_ATTACHED_AGAIN", what, token, name)


def _listed(names: Mapping[int, str], oids: Sequence[int]) -> str:
    return ", ".join(names[oid] for oid in oids[:3])


def passed_partitions(
    server: Statements, tables: Tables, relations: Sequence[Relation], *, keeps_emptied: bool
) -> list[Unlogged]:
    """Return partitions that were attached and detached between two states.

    ``relations`` are the unknown ones that the log names without rows of their own.
    """
    if keeps_emptied or not relations or not any(table.partitioned for table in tables.tables):
        return []
    rows = server.fetch("partition_roots", oids=[relation.oid for relation in relations])
    others = {row.oid for row in rows if row.root not in tables.by_oid}
    return [
        _unlogged(
            "PARTITION_DETACHED",
            f"the partition {relation.name} was attached and detached: rows that came or left with it are "
            "not in the log",
            f"{relation.name}:-{relation.oid}",
            relation.name,
        )
        for relation in relations
        if relation.oid not in others
    ]


def unpublished_tables(
    server: Statements,
    publication: str,
    relations: Sequence[Relation],
    before: PublicationState | None,
    now: PublicationState,
) -> list[Unlogged]:
    """Return the tables of relations with unread rows in the log that are not in the publication.

    They may have left it and come back in between, which leaves no trace in the catalog. A table that was
    dropped meanwhile left nothing behind: its rows in the log are all that is left of it.
    """
    known = now.oids() if before is None else now.oids() | before.oids()
    names = {relation.oid: relation.name for relation in relations if relation.oid not in now.names}
    rows = server.fetch("origins", oids=list(names), publication=publication) if names else []
    existing = {row.oid for row in rows}
    return [
        _left(name, oid) if oid in known else _passed(name, oid)
        for oid, name in names.items()
        if oid in existing
    ]


def _left(name: str, oid: int) -> Unlogged:
    what = f"{name} is no longer in the publication, and rows written while it was not are not in the log"
    return _unlogged("TABLE_REMOVED", what, f"{name}:{oid}", name)


def _passed(name: str, oid: int) -> Unlogged:
    what = f"{name} was in the publication for a while, and its other rows are not in the log"
    return _unlogged("TABLE_NOT_COPIED", what, f"{name}:{oid}", name)


def recreated_tables(
    relations: Iterable[Relation], before: PublicationState | None, now: PublicationState
) -> Iterator[Unlogged]:
    """Yield tables in the log that have the name of an earlier one.

    Parameters
    ----------
    relations
        Those of unread rows, in the order of the log.
    before, now
        The states before and after them.
    """
    owners = {} if before is None else {name: oid_of(entry) for name, entry in before.tables.items()}
    known = set(owners.values())
    for relation in relations:
        name, oid = relation.name, relation.oid
        if owners.setdefault(name, oid) != oid and oid not in known:
            known.add(oid)
            # One that is still there has the token with which its return to the publication is accepted.
            entry = now.tables.get(name, "0")
            yield _recreated(name, f"{name}:{entry if oid_of(entry) == oid else oid}")


def _older_tables(
    server: Statements, publication: str, before: PublicationState, now: PublicationState
) -> dict[int, str]:
    """Return the new tables and partitions whose rows are not all in the log: those not created since.

    Partitions that were attached again count as new.
    """
    oids = now.names.keys() - before.names.keys()
    for name, partitions in now.partitions.items():
        new = partitions.items() - before.partitions.get(name, {}).items()
        oids.update(oid for oid, _ in new)
    rows = server.fetch("origins", oids=sorted(oids), publication=publication) if oids else ()
    return {
        row.oid: row.name
        for row in rows
        if row.created < before.transaction or not row.created_as_is or row.named
    }


def refuse(name: str, changes: Sequence[Unlogged], accepted: Collection[str]) -> None:
    """Raise the error for changes that are not accepted; it lists the accepted ones too, to be passed on."""
    refused = [change for change in changes if change.token not in accepted]
    if not refused:
        return
    first = refused[0]
    others = f" ({len(refused) - 1} more)" if len(refused) > 1 else ""
    tokens = [*accepted, *(change.token for change in refused)]
    raise FeedUnavailableError(
        f"{name}: {first.what}{others}. {START_OVER.capitalize()}; or "
        f"continue with accept={tokens!r}, if the copy may lack those rows or you correct it",
        condition=first.condition,
        table=first.table,
        accept=tokens,
    )
