"""Change rows applied to a table: the last change of each key counts, whatever the order in which changes come.

For each key that was ever changed a relation beside the table keeps the sequence of its last change, also when that was a delete,
so that a change which comes late, or again, is known to be an old one. (The rule is that of Lamport's last-writer-wins register,
with tombstones.)
"""

from __future__ import annotations

import hashlib

from penstock.errors import SchemaMismatch, TableRefused
from penstock.store.database import Transaction
from penstock.tables import existing, merging
from penstock.tables.columns import Column, Layout
from penstock.tables.names import TableName, quoted
from penstock.tables.stages import Source

_LATEST = {"postgres": "pg_temp.penstock_latest", "sqlite": "temp.penstock_latest"}


def sequence_column(sequence: Column) -> str:
    """The definition of the column ``sequence``, for PostgreSQL: text in the order of its bytes, as in Spark and SQLite."""
    return f"sequence {sequence.sql_type}" + (' collate "C"' if sequence.sql_type == "text" else "")


def applied_name(tx: Transaction, layout: Layout) -> TableName:
    """The relation beside the table."""
    digest = hashlib.sha256(layout.name.ledger_name.encode()).hexdigest()[:32]
    if tx.dialect == "sqlite":
        return TableName("main", f"penstock_applied_{digest}")
    return TableName(tx.schema[1:-1].replace('""', '"'), f"applied_{digest}")


def prepare(tx: Transaction, layout: Layout) -> None:
    """Make the table and the relation beside it; where the table is made anew, so is the relation.

    Raises
    ------
    SchemaMismatch
        When the table does not take the rows, or its changes were ordered by a column of another type before.
    """
    anew = existing.look(tx, layout.name) is None
    existing.prepare(tx, layout, complete=False)
    applied = applied_name(tx, layout)
    if anew:
        tx.execute(f"drop table if exists {applied.sql}")
    there = existing.look(tx, applied)
    if there is None:
        _create(tx, layout, applied)
        return
    assert layout.sequence is not None
    needed = layout.sequence.sql_type
    if there.types["sequence"] != needed or len(there.types) != len(layout.keys) + 2:
        raise SchemaMismatch(
            f"the changes of {layout.name.sql} were ordered by {there.types['sequence']} before, with {len(there.types) - 2} keys, and "
            f"are by {needed} now, with {len(layout.keys)}: keep keys and sequence_by, or drop the table to begin anew",
            table=layout.name.sql,
        )


def _create(tx: Transaction, layout: Layout, applied: TableName) -> None:
    assert layout.sequence is not None
    keys = [f"k{n}" for n in range(len(layout.keys))]
    defined = [f"{name} {key.sql_type} not null" for name, key in zip(keys, layout.keys, strict=True)]
    sequence = (
        sequence_column(layout.sequence)
        if tx.dialect == "postgres"
        else f"sequence {layout.sequence.sql_type}"
    )
    defined += [f"{sequence} not null", "present integer not null", f"primary key ({', '.join(keys)})"]
    tx.execute(f"create table {applied.sql} ({', '.join(defined)})")


def apply(tx: Transaction, layout: Layout, source: Source) -> int:
    """Apply staged changes; the number of keys that changed.

    Raises
    ------
    TableRefused
        When a key has several last changes that differ.
    CommitRefused
        When staged rows are gone.
    """
    applied, latest = applied_name(tx, layout), _LATEST[tx.dialect]
    if tx.dialect == "postgres":
        # What one writer has applied is what the next one compares with.
        tx.execute(f"lock table {applied.sql} in share row exclusive mode")
    merging.require_all(tx, source)
    _collapse(tx, layout, source, latest)
    _require_one_each(tx, layout, latest)
    same = _equal(layout, "applied.k", f"{latest}.c")
    tx.change(
        f"delete from {latest} where exists (select 1 from {applied.sql} as applied where {same} "
        f"and (applied.sequence, applied.present) >= ({latest}.sequence, {latest}.present))"
    )
    changed = int(tx.query(f"select count(*) from {latest}")[0][0])
    _delete(tx, layout, latest)
    merging.upsert(tx, layout, Source(latest, "present = 1"))
    _remember(tx, layout, applied, latest)
    tx.execute(f"drop table {latest}")
    return changed


def _staged_keys(layout: Layout) -> list[str]:
    return [f"c{n}" for n, column in enumerate(layout.columns) if column.key]


def _collapse(tx: Transaction, layout: Layout, source: Source, latest: str) -> None:
    """Keep the last change of each key; of a row that is gone nothing but its key."""
    keys = ", ".join(_staged_keys(layout))
    columns = ", ".join(
        f"c{n}" if column.key else f"case when present = 1 then c{n} end as c{n}"
        for n, column in enumerate(layout.columns)
    )
    tx.execute(f"drop table if exists {latest}")
    tx.execute(
        f"create temporary table {latest.partition('.')[2]} as "
        f"select distinct {columns}, sequence, present from ("
        f"select *, rank() over (partition by {keys} order by sequence desc, present desc) as place "
        f"from {source.relation} where {source.where}) as ranked where place = 1"
    )
    if tx.dialect == "postgres":
        tx.execute(f"analyze {latest}")


def _require_one_each(tx: Transaction, layout: Layout, latest: str) -> None:
    keys = ", ".join(_staged_keys(layout))
    found = tx.query(f"select {keys} from {latest} group by {keys} having count(*) > 1 limit 1")
    if found:
        shown = merging.shown_key(layout.keys, found[0])
        assert layout.sequence is not None
        raise TableRefused(
            f"the key {shown} of {layout.name.sql} has several changes with one value of {quoted(layout.sequence.name)}, and nothing says "
            "which of them is the last one: name a column as sequence_by that tells them apart, or take the feed's net changes",
            condition="TABLE_REFUSED.AMBIGUOUS_ORDER",
            key=shown,
        )


def _equal(layout: Layout, left: str, right: str) -> str:
    """That the keys of the relation beside the table are those of staged rows."""
    pairs = zip(range(len(layout.keys)), _staged_keys(layout), strict=True)
    return " and ".join(f"{left}{n} = {right}{staged[1:]}" for n, staged in pairs)


def _delete(tx: Transaction, layout: Layout, latest: str) -> None:
    pairs = zip(layout.keys, _staged_keys(layout), strict=True)
    same = " and ".join(f"{layout.name.sql}.{key.sql} = {latest}.{staged}" for key, staged in pairs)
    tx.change(
        f"delete from {layout.name.sql} where exists (select 1 from {latest} where present = 0 and {same})"
    )


def _remember(tx: Transaction, layout: Layout, applied: TableName, latest: str) -> None:
    keys = ", ".join(f"k{n}" for n in range(len(layout.keys)))
    tx.change(
        f"insert into {applied.sql} ({keys}, sequence, present) "
        f"select {', '.join(_staged_keys(layout))}, sequence, present from {latest} where true "
        f"on conflict ({keys}) do update set sequence = excluded.sequence, present = excluded.present"
    )
