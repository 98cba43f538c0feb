"""Detection of changes that are not in the log, such as those of recreated tables.

The log does not show that a table was recreated, or was added to a publication with rows in it. Therefore the
state of the publication in the catalog is compared with the state in the checkpoint, and a query ends with an
error if rows may be missing from the log.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.pgoutput import Relation
from penstock.feeds.postgres.publication import PublicationState, oid_of, same_tables
from penstock.feeds.postgres.schema_changes import update_to_send
from penstock.feeds.postgres.server import START_OVER, Statements

_WITHOUT_KEY = "fn"
"""Replica identities (full and nothing) with which rows are logged without a key."""


@dataclass(frozen=True)
class Unlogged:
    """A change that is not in the log."""

    condition: str
    description: str
    """A clause that describes the change."""
    token: str
    """The value to add to ``accept`` to continue in spite of the change."""
    table: str


def _unlogged(condition: str, description: str, token: str, table: str = "") -> Unlogged:
    return Unlogged(f"FEED_UNAVAILABLE.{condition}", description, token, table)


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
    """Return the changes between two states that are not in the log.

    ``columns`` has the columns that are read, by the current name of the table. ``keeps_emptied`` allows the
    copy to keep rows that were removed from the source without a delete.
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
                f"the publication {publication!r} was altered, and may have omitted changes meanwhile",
                f"publication:{now.publication}",
            )
        )
    changes += _tables(before, now, tables, older)
    changes += _partitions(before, now, older, keeps_emptied)
    return changes + replaced


def _replaced(
    before: PublicationState, now: PublicationState, columns: Mapping[str, Collection[str]]
) -> Iterator[Unlogged]:
    for earlier_name, name in same_tables(before, now):
        old = {column: number for column, (number, *_) in before.columns[earlier_name].items()}
        old |= before.dropped.get(earlier_name, {})
        for column, (number, *_) in now.columns[name].items():
            if column in columns.get(name, ()) and old.get(column, number) != number:
                yield _other_column(now, name, column, "was replaced, and its values are not in the log")


def _other_column(now: PublicationState, table: str, column: str, description: str) -> Unlogged:
    number, kind, modifier = now.columns[table][column]
    identity = now.keys[table].identity
    advice = update_to_send(table, identity, {column: (kind, modifier)}, "its values")
    clause = f"the column {column!r} of {table} {description}: {advice}"
    return _unlogged("COLUMN_REPLACED", clause, f"{table}.{column}:{number}", table)


def _replaced_keys(before: PublicationState, now: PublicationState) -> Iterator[Unlogged]:
    """Yield the tables whose primary key was replaced, if the log may not show this.

    With replica identity full or nothing, rows are logged without a key.
    """
    for earlier_name, name in same_tables(before, now):
        identities = before.keys[earlier_name].identity, now.keys[name].identity
        if any(identity in _WITHOUT_KEY for identity in identities):
            yield from _replaced_key(before, earlier_name, now, name)


def _replaced_key(
    before: PublicationState, earlier_name: str, now: PublicationState, name: str
) -> Iterator[Unlogged]:
    key = now.keys[name].constraint
    if before.keys[earlier_name].constraint != key:
        description = (
            f"{name} had another primary key, or none, so rows that were logged meanwhile may have duplicate "
            "keys"
        )
        yield _unlogged("KEY_REPLACED", description, f"{name}:key{key}", name)


def ambiguous_keys(relation: Relation, before: PublicationState, now: PublicationState) -> Iterator[Unlogged]:
    """Yield the table of a logged relation if its rows may have had another key, or none.

    ``before`` and ``now`` are states from before and after the relation's rows.
    """
    earlier_name, name = before.names.get(relation.oid), now.names.get(relation.oid)
    if earlier_name is not None and name is not None and relation.identity in _WITHOUT_KEY:
        yield from _replaced_key(before, earlier_name, now, name)


def ambiguous_columns(
    relation: Relation,
    before: PublicationState,
    now: PublicationState,
    columns: Mapping[str, Collection[str]],
) -> Iterator[Unlogged]:
    """Yield the columns of a logged relation that may differ from the current columns with the same names.

    Parameters
    ----------
    before, now
        The states before and after the relation's rows.
    columns
        The columns that are read, by the current name of the table.
    """
    earlier_name, name = before.names.get(relation.oid), now.names.get(relation.oid)
    if earlier_name is None or name is None:
        return
    old, new = before.columns[earlier_name], now.columns[name]
    logged = relation.names
    existed = {number for number, *_ in old.values()}
    possible = sorted(existed.union(range(before.widths[earlier_name] + 1, now.widths[name] + 1)))
    present = {number for number, *_ in new.values()}
    ambiguous = set()
    least = max(existed & present, default=0)
    for numbers in _possible_numbers(len(logged), possible, present, least):
        current = zip(logged, numbers, strict=True)
        ambiguous |= {column for column, number in current if column in new and new[column][0] != number}
    for column in sorted(ambiguous.intersection(columns.get(name, ()))):
        description = "may have been replaced, so that the log may have values of another column"
        yield _other_column(now, name, column, description)


def _possible_numbers(
    size: int, possible: Sequence[int], present: Collection[int], least: int
) -> Iterator[list[int]]:
    """Yield the column numbers that a relation may have had, in ascending order: the lowest and highest ones.

    A column that exists now also existed then, unless it is newer than all columns of the relation. ``least``
    is the highest number of a column that exists in both states, and therefore existed in between.
    """
    lasting = [number for number in possible if number in present]
    gone = [number for number in possible if number not in present]
    for last in possible[bisect_left(possible, least) :]:
        fixed = lasting[: bisect_right(lasting, last)]
        others = gone[: bisect_left(gone, last)]
        missing = size - len(fixed) - (last not in present)
        if not 0 <= missing <= len(others):
            continue
        last_if_gone = [] if last in present else [last]
        yield sorted([*fixed, *others[:missing], *last_if_gone])
        yield sorted([*fixed, *others[len(others) - missing :], *last_if_gone])


def altered_columns(before: PublicationState, now: PublicationState) -> list[str]:
    """Describe the changes of columns between two states for messages."""
    changes = []
    for earlier_name, table in same_tables(before, now):
        old, new = before.columns[earlier_name], now.columns[table]
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
        earlier_name = before.tables.get(name)
        if earlier_name == entry:
            continue
        if earlier_name is not None and oid_of(earlier_name) != oid:
            yield _recreated(name, token)
        elif oid in names and before.tables[names[oid]] != entry:
            description = (
                f"{name} was removed from the publication and added again, or its row filter or column list "
                "was changed: the log lacks rows that were written meanwhile or excluded by the filter"
            )
            yield _unlogged("TABLE_PUBLISHED_AGAIN", description, token, name)
        elif oid in names:
            if tables.several or tables.chosen:
                description = (
                    f"{names[oid]} was renamed to {name}, so its rows now have another _table (alter table "
                    f"{name} rename to {names[oid].partition('.')[2]} reverts this)"
                )
                yield _unlogged("TABLE_RENAMED", description, token, name)
        elif oid in older:
            description = f"{name} was added to the publication, and its earlier rows are not in the log"
            yield _unlogged("TABLE_NOT_COPIED", description, token, name)


def _recreated(name: str, token: str) -> Unlogged:
    description = f"{name} was recreated, and the log has no deletes for rows of the earlier table"
    return _unlogged("TABLE_RECREATED", description, token, name)


def _partitions(
    before: PublicationState, now: PublicationState, older: Mapping[int, str], keeps_emptied: bool
) -> Iterator[Unlogged]:
    for earlier_name, name in same_tables(before, now):
        if earlier_name not in before.partitions or name not in now.partitions:
            continue
        old, new = before.partitions[earlier_name], now.partitions[name]
        detached = old.keys() - new.keys()
        if detached and not keeps_emptied:
            description = f"{len(detached)} partition(s) of {name} were detached or dropped without deletes"
            token = f"{name}:" + "".join(f"-{oid}" for oid in sorted(detached))
            yield _unlogged("PARTITION_DETACHED", description, token, name)
        attached = sorted(older.keys() & new.keys() - old.keys())
        if attached:
            listed = _listed(older, attached)
            description = f"{listed} became a partition of {name}, and its earlier rows are not in the log"
            token = f"{name}:" + "".join(f"+{oid}" for oid in attached)
            yield _unlogged("PARTITION_ATTACHED", description, token, name)
        again = sorted(oid for oid in old.keys() & new.keys() if old[oid] != new[oid])
        if again:
            description = (
                f"{_listed(older, again)} was detached from {name} and attached again: rows that were "
                "written meanwhile are not in the log"
            )
            token = f"{name}:" + "".join(f"+{oid}.{new[oid]}" for oid in again)
            yield _unlogged("PARTITION_ATTACHED_AGAIN", description, token, name)


def _listed(names: Mapping[int, str], oids: Sequence[int]) -> str:
    return ", ".join(names[oid] for oid in oids[:3])


def temporary_partitions(
    server: Statements, tables: Tables, relations: Sequence[Relation], *, keeps_emptied: bool
) -> list[Unlogged]:
    """Return partitions that were attached and detached again between two states.

    ``relations`` are unknown relations that the log describes without rows.
    """
    if keeps_emptied or not relations or not any(table.partitioned for table in tables.tables):
        return []
    rows = server.fetch("partition_roots", oids=[relation.oid for relation in relations])
    others = {row.oid for row in rows if row.root not in tables.by_oid}
    return [
        _unlogged(
            "PARTITION_DETACHED",
            f"the partition {relation.name} was attached and detached again: the log does not show the rows "
            "that this added or removed",
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
    """Return the tables with unread rows in the log that are not in the publication.

    A table may have been removed from it and added again in between, which the catalog does not show. Dropped
    tables are not included, because there are no rows except those in the log.
    """
    known = now.oids() if before is None else now.oids() | before.oids()
    names = {relation.oid: relation.name for relation in relations if relation.oid not in now.names}
    rows = server.fetch("origins", oids=list(names), publication=publication) if names else []
    existing = {row.oid for row in rows}
    return [
        _removed(name, oid) if oid in known else _temporarily_published(name, oid)
        for oid, name in names.items()
        if oid in existing
    ]


def _removed(name: str, oid: int) -> Unlogged:
    description = (
        f"{name} was removed from the publication, and rows that were written afterwards are not in the log"
    )
    return _unlogged("TABLE_REMOVED", description, f"{name}:{oid}", name)


def _temporarily_published(name: str, oid: int) -> Unlogged:
    description = f"{name} was temporarily in the publication, and its other rows are not in the log"
    return _unlogged("TABLE_NOT_COPIED", description, f"{name}:{oid}", name)


def recreated_tables(
    relations: Iterable[Relation], before: PublicationState | None, now: PublicationState
) -> Iterator[Unlogged]:
    """Yield tables in the log that have the name of an earlier table.

    Parameters
    ----------
    relations
        The relations of unread rows, in log order.
    before, now
        The states before and after these rows.
    """
    owners = {} if before is None else {name: oid_of(entry) for name, entry in before.tables.items()}
    known = set(owners.values())
    for relation in relations:
        name, oid = relation.name, relation.oid
        if owners.setdefault(name, oid) != oid and oid not in known:
            known.add(oid)
            # If the table still exists, use the same token as for a table that was added again.
            entry = now.tables.get(name, "0")
            yield _recreated(name, f"{name}:{entry if oid_of(entry) == oid else oid}")


def _older_tables(
    server: Statements, publication: str, before: PublicationState, now: PublicationState
) -> dict[int, str]:
    """Return new tables and partitions with rows that are not in the log, because they existed before.

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
    """Raise the error for changes that are not accepted; it also lists the tokens accepted so far."""
    refused = [change for change in changes if change.token not in accepted]
    if not refused:
        return
    first = refused[0]
    others = f" ({len(refused) - 1} more)" if len(refused) > 1 else ""
    tokens = [*accepted, *(change.token for change in refused)]
    raise FeedUnavailableError(
        f"{name}: {first.description}{others}. {START_OVER.capitalize()}; or "
        f"continue with accept={tokens!r} if the copy may differ in these rows, or you correct it",
        condition=first.condition,
        table=first.table,
        accept=tokens,
    )
