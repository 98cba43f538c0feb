"""What is remembered of applied changes, in a relation beside the table.

Of a table with the rows as they are now: for each key that was ever changed, the sequence of its last change, also when that was a
delete. Of a table with history: every delete, since the table itself has the rest.
"""

from __future__ import annotations

import hashlib

from penstock.errors import SchemaMismatch, TableRefused
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_FROM, VALID_TO, Layout
from penstock.tables.names import TableName, quoted
from penstock.tables.sql import existing, upsert
from penstock.tables.sql.stage import Source
from penstock.tables.untouched_values import UNKNOWN, has_value, numbers_of


def relation(tx: Transaction, layout: Layout) -> TableName:
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
    existing.prepare(tx, layout.kept, complete=False)
    if anew and layout.history:
        existing.allow_one_current(tx, layout)
    beside = relation(tx, layout)
    if anew:
        tx.execute(f"drop table if exists {beside.sql}")
    there = existing.look(tx, beside)
    if there is None:
        _create(tx, layout, beside)
        return
    assert layout.sequence is not None
    keys, needed = sum(name.startswith("k") for name in there.types), layout.sequence.sql_type
    if there.types["sequence"] != needed or keys != len(layout.keys):
        raise SchemaMismatch(
            f"the changes of {layout.name.sql} were ordered by {there.types['sequence']} before, with {keys} keys, and "
            f"are by {needed} now, with {len(layout.keys)}: keep keys and sequence_by, or drop the table to begin anew",
            table=layout.name.sql,
        )


def _create(tx: Transaction, layout: Layout, beside: TableName) -> None:
    assert layout.sequence is not None
    keys = key_names(layout)
    defined = [f"{name} {key.declared} not null" for name, key in zip(keys, layout.keys, strict=True)]
    defined += [f"sequence {layout.sequence.declared} not null"]
    primary = [*keys, "sequence"] if layout.history else keys
    defined += [] if layout.history else ["present integer not null"]
    defined += [f"primary key ({', '.join(primary)})"]
    tx.execute(f"create table {beside.sql} ({', '.join(defined)})")


def key_names(layout: Layout) -> list[str]:
    """The relation's names for the keys."""
    return [f"k{n}" for n in range(len(layout.keys))]


def same_key(layout: Layout, beside: str, staged: str) -> str:
    """That a row of the relation and a staged one have one key."""
    pairs = zip(key_names(layout), layout.staged_keys, strict=True)
    return " and ".join(f"{beside}.{key} = {staged}.{column}" for key, column in pairs)


def lock(tx: Transaction, beside: TableName) -> None:
    """Let writers wait for one another: what one has applied is what the next one compares with."""
    if tx.dialect == "postgres":
        tx.execute(f"lock table {beside.sql} in share row exclusive mode")


# ---- filling: Values that staged changes leave out, from the rows that they changed: earlier ones of the micro-batch, else those in the table.


def carried(tx: Transaction, layout: Layout, source: Source) -> str:
    """The staged rows as SQL reads them, with what earlier ones of the same key tell; ``unknown`` names what is left."""
    plain = f"{source.relation} where {source.where}"
    numbers = [] if layout.unchanged is None else _unknown(tx, plain)
    if not numbers:
        return plain
    keys, order = ", ".join(layout.staged_keys), ", ".join(layout.order)
    # Rows that follow one with a value have its number, up to the next one with a value.
    counted = ", ".join(
        f"sum(case when present = 1 and {has_value(UNKNOWN, n)} then 1 else 0 end) over (partition by {keys} order by {order}) as n{n}"
        for n in numbers
    )
    first = ", ".join(
        f"first_value(c{n}) over (partition by {keys}, n{n} order by {order}) as f{n}" for n in numbers
    )
    columns = [
        f"case when n{n} > 0 and not ({has_value(UNKNOWN, n)}) then f{n} else c{n} end as c{n}"
        if n in numbers
        else f"c{n}"
        for n in range(len(layout.columns))
    ]
    left = " || ".join(
        f"case when n{n} > 0 or {has_value(UNKNOWN, n)} then '' else ',{n},' end" for n in numbers
    )
    selected = ", ".join([*columns, *layout.order, f"nullif({left}, '') as {UNKNOWN}"])
    return f"(select {selected} from (select *, {first} from (select *, {counted} from {plain}) as counted) as firsts) as carried"


def fill(tx: Transaction, layout: Layout, latest: str) -> None:
    """Take what is left from the table.

    Raises
    ------
    TableRefused
        When there is no such row.
    """
    numbers = [] if layout.unchanged is None else _unknown(tx, f"{latest} where true")
    if not numbers:
        return
    values = ", ".join(
        f"c{n} = case when {has_value(f'{latest}.{UNKNOWN}', n)} then {latest}.c{n} else kept.{layout.columns[n].sql} end"
        for n in numbers
    )
    there = f"{latest}.{UNKNOWN} is not null and {layout.same_key('kept', latest)}"
    if layout.history:
        begins, ends, sequence = (
            f"kept.{quoted(VALID_FROM)}",
            f"kept.{quoted(VALID_TO)}",
            f"{latest}.sequence",
        )
        there += f" and {begins} < {sequence} and ({ends} is null or {sequence} < {ends})"
    tx.change(f"update {latest} set {values}, {UNKNOWN} = null from {layout.name.sql} as kept where {there}")
    keys = ", ".join(layout.staged_keys)
    left = tx.query(f"select {UNKNOWN}, {keys} from {latest} where {UNKNOWN} is not null limit 1")
    if left:
        assert layout.unchanged is not None
        name = layout.columns[numbers_of([left[0][0]])[0]].name
        shown = upsert.shown_key(layout.keys, left[0][1:])
        raise layout.unchanged.lost(name, layout.name.sql, shown)


def _unknown(tx: Transaction, rows: str) -> list[int]:
    """The numbers of the columns that some rows leave out."""
    return numbers_of(
        row[0] for row in tx.query(f"select distinct {UNKNOWN} from {rows} and {UNKNOWN} is not null")
    )


# ---- latest: Of the staged changes, those that may count: what comes later in the same micro-batch has taken the place of the others.

_RELATION = {"postgres": "pg_temp.penstock_latest", "sqlite": "temp.penstock_latest"}


def gather(tx: Transaction, layout: Layout, source: Source) -> str:
    """Put the last change of each key, and where a table has history the last one with each sequence, into a relation.

    It has the columns ``c0``, ``c1`` and so on, which but for the keys are null in a change that is a delete, ``sequence``,
    ``present``, and ``unknown`` where changes may leave values out; it is temporary, and for the caller to drop.

    Raises
    ------
    TableRefused
        When a key has several last changes that differ.
    CommitRefused
        When staged rows are gone.
    """
    upsert.require_all(tx, source)
    latest = _RELATION[tx.dialect]
    _collapse(tx, layout, source, latest)
    _require_one_each(tx, layout, latest)
    return latest


def _place(layout: Layout) -> list[str]:
    return [*layout.staged_keys, "sequence"] if layout.history else layout.staged_keys


def _collapse(tx: Transaction, layout: Layout, source: Source, latest: str) -> None:
    columns = ", ".join(
        f"c{n}" if column.key else f"case when present = 1 then c{n} end as c{n}"
        for n, column in enumerate(layout.columns)
    )
    told = "" if layout.unchanged is None else f", {UNKNOWN}"
    order = ", ".join(f"{name} desc" for name in layout.order)
    name = latest.partition(".")[2]
    tx.execute(f"drop table if exists {latest}")
    tx.execute(
        f"create temporary table {name} as select distinct {columns}, sequence, present{told} from ("
        f"select *, rank() over (partition by {', '.join(_place(layout))} order by {order}) as place "
        f"from {carried(tx, layout, source)}) as ranked where place = 1"
    )
    tx.execute(f"create index penstock_latest_place on {name} ({', '.join(layout.staged_keys)}, sequence)")
    if tx.dialect == "postgres":
        tx.execute(f"analyze {latest}")


def _require_one_each(tx: Transaction, layout: Layout, latest: str) -> None:
    place = ", ".join(_place(layout))
    keys = ", ".join(layout.staged_keys)
    found = tx.query(f"select {keys} from {latest} group by {place} having count(*) > 1 limit 1")
    if found:
        shown = upsert.shown_key(layout.keys, found[0])
        assert layout.sequence is not None
        raise TableRefused(
            f"the key {shown} of {layout.name.sql} has several changes with one value of {quoted(layout.sequence.name)}, and nothing says "
            "which of them is the last one: take the feed's net changes (deduplication_mode='netChanges', net_window='commit'), or name a "
            "column as sequence_by that orders all changes of a key",
            condition="TABLE_REFUSED.AMBIGUOUS_ORDER",
            key=shown,
        )


# ---- applying: Change rows applied to a table: the last change of each key counts, whatever the order in which changes come.
#
# The sequence of each key's last change is kept beside the table, also when that was a delete, so that a change which comes late, or
# again, is known to be an old one. (The rule is that of Lamport's last-writer-wins register, with tombstones.)


def apply(tx: Transaction, layout: Layout, source: Source) -> int:
    """Apply staged changes; the number of keys that changed.

    Raises
    ------
    TableRefused
        When a key has several last changes that differ.
    CommitRefused
        When staged rows are gone.
    """
    beside = relation(tx, layout)
    lock(tx, beside)
    latest = gather(tx, layout, source)
    tx.change(
        f"delete from {latest} where exists (select 1 from {beside.sql} as applied "
        f"where {same_key(layout, 'applied', latest)} "
        f"and (applied.sequence, applied.present) >= ({latest}.sequence, {latest}.present))"
    )
    fill(tx, layout, latest)
    changed = int(tx.query(f"select count(*) from {latest}")[0][0])
    _delete(tx, layout, latest)
    upsert.upsert(tx, layout, Source(latest, "present = 1"))
    _remember(tx, layout, beside, latest)
    tx.execute(f"drop table {latest}")
    return changed


def _delete(tx: Transaction, layout: Layout, latest: str) -> None:
    keys = ", ".join(key.sql for key in layout.keys)
    gone = f"select {', '.join(layout.staged_keys)} from {latest} where present = 0"
    tx.change(f"delete from {layout.name.sql} where ({keys}) in ({gone})")


def _remember(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    keys = ", ".join(key_names(layout))
    tx.change(
        f"insert into {beside.sql} ({keys}, sequence, present) "
        f"select {', '.join(layout.staged_keys)}, sequence, present from {latest} where true "
        f"on conflict ({keys}) do update set sequence = excluded.sequence, present = excluded.present"
    )
