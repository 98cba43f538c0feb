"""Application of change rows to a SQL table, in whatever order they arrive.

SCD type 1: the table has the last change of each key. (This is Lamport's last-writer-wins register, with
tombstones.)

SCD type 2: the table has a row for each version, with the sequences between which it was valid. A version is
valid from its own change to the next change of its key, of any kind. So the table is a function of the set of
changes, and does not depend on the order in which they arrive. The versions are in the table, and the deletes
in an additional relation. A late change ends the version that was valid at its sequence, and is valid up to
the next change. (Slowly changing dimensions, type 2: Kimball, "The Data Warehouse Toolkit".)

The additional relation records the applied changes. For type 1 it has the sequence of each key's last change,
even if that was a delete, so that late and repeated changes are recognized as old. For type 2 it has the
deletes, since the table itself has the rest.

Values that changes leave out are an exception: they are taken from changes that arrived earlier, so the
changes of a row then have to arrive in order.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import SchemaMismatchError
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_FROM, VALID_TO, Layout
from penstock.tables.names import POSTGRES_BYTES, TableName, digest, quoted
from penstock.tables.row_checks import ambiguous_order
from penstock.tables.sql import ddl, upsert
from penstock.tables.sql.staging import StagedRows
from penstock.tables.unchanged_values import UNKNOWN, column_numbers, has_value

_FROM, _TO = quoted(VALID_FROM), quoted(VALID_TO)
_RELATION = {"postgres": "pg_temp.penstock_latest", "sqlite": "temp.penstock_latest"}
_KEY = "key_"
"""The prefix of the relation's key columns."""


def apply_changes(tx: Transaction, layout: Layout, source: StagedRows) -> int:
    """Apply staged changes, and return the number of new ones."""
    beside = _applied_relation(tx, layout)
    if tx.dialect == "postgres":
        # Serialises writers, each of which compares its changes with those applied before.
        tx.execute(f"lock table {beside.sql} in share row exclusive mode")
        tx.require_trusted_owner(beside.schema, beside.table)
    latest = _collect(tx, layout, source)
    if layout.history:
        _drop_known_versions(tx, layout, beside, latest)
    else:
        _drop_old(tx, layout, beside, latest)
    _fill_from_table(tx, layout, latest)
    changed = int(tx.query(f"select count(*) from {latest}")[0][0])
    if layout.history:
        _end_versions(tx, layout, latest)
        _insert_versions(tx, layout, beside, latest)
        _record_deletes(tx, layout, beside, latest)
    else:
        _delete(tx, layout, latest)
        upsert.upsert(tx, layout, StagedRows(latest, "present = 1"))
        _record(tx, layout, beside, latest)
    tx.execute(f"drop table {latest}")
    return changed


def _drop_old(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    tx.change(
        f"delete from {latest} where exists (select 1 from {beside.sql} as applied "
        f"where {_same_applied_key(layout, latest)} "
        f"and (applied.sequence, applied.present) >= ({latest}.sequence, {latest}.present))"
    )


def _delete(tx: Transaction, layout: Layout, latest: str) -> None:
    deleted = f"select {', '.join(layout.staged_keys)} from {latest} where present = 0"
    tx.change(f"delete from {layout.name.sql} where ({layout.keys_sql}) in ({deleted})")


def _record(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    keys = ", ".join(map(quoted, _key_names(layout)))
    tx.change(
        f"insert into {beside.sql} ({keys}, sequence, present) "
        f"select {', '.join(layout.staged_keys)}, sequence, present from {latest} where true "
        f"on conflict ({keys}) do update set sequence = excluded.sequence, present = excluded.present"
    )


def _drop_known_versions(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    """Drop repeated changes; a stored version takes precedence over a delete with the same sequence."""
    tx.change(
        f"delete from {latest} where exists (select 1 from {layout.name.sql} as kept "
        f"where {layout.same_key(latest)} and kept.{_FROM} = {latest}.sequence)"
    )
    tx.change(
        f"delete from {latest} where present = 0 and exists (select 1 from {beside.sql} as applied "
        f"where {_same_applied_key(layout, latest)} and applied.sequence = {latest}.sequence)"
    )


def _end_versions(tx: Transaction, layout: Layout, latest: str) -> None:
    """End each stored version at the first change within its validity."""
    keys = [key.sql for key in layout.keys]
    grouped = ", ".join(f"kept.{key}" for key in [*keys, _FROM])
    ended = " and ".join(f"{layout.name.sql}.{key} = ended.{key}" for key in [*keys, _FROM])
    tx.change(
        f"update {layout.name.sql} set {_TO} = ended.sequence from (select {grouped}, min(latest.sequence) "
        f"as sequence from {latest} as latest join {layout.name.sql} as kept on "
        f"{layout.same_key('latest')} and kept.{_FROM} < latest.sequence and (kept.{_TO} is null or "
        f"latest.sequence < kept.{_TO}) group by {grouped}) as ended where {ended}"
    )


def _insert_versions(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    """Insert the new versions, each valid up to the next change, which may be stored or deleted."""
    columns = ", ".join(f"c{n}" for n in range(len(layout.columns)))
    following = (
        f"select min(kept.{_FROM}) from {layout.name.sql} as kept where {layout.same_key('latest')} "
        f"and kept.{_FROM} > latest.sequence union all select min(applied.sequence) from {beside.sql} as "
        f"applied where {_same_applied_key(layout, 'latest')} and applied.sequence > latest.sequence"
    )
    keys = ", ".join(layout.staged_keys)
    tx.change(
        f"insert into {layout.name.sql} ({layout.stored.columns_sql}) select {columns}, sequence, (select "
        f"min(upto) from (select latest.coming as upto union all {following}) as ends) from (select *, "
        f"lead(sequence) over (partition by {keys} order by sequence) as coming from {latest}) as latest "
        "where present = 1"
    )


def _record_deletes(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    keys = ", ".join(map(quoted, _key_names(layout)))
    tx.change(
        f"insert into {beside.sql} ({keys}, sequence) "
        f"select {', '.join(layout.staged_keys)}, sequence from {latest} where present = 0"
    )


def _applied_relation(tx: Transaction, layout: Layout) -> TableName:
    name = f"applied_{digest(layout.name.ledger_name)}"
    if tx.dialect == "sqlite":
        return TableName("main", f"penstock_{name}")
    return TableName(tx.schema[1:-1].replace('""', '"'), name)


def prepare(tx: Transaction, layout: Layout) -> None:
    """Create the table and the relation, or check existing ones; a new table gets a new relation."""
    new_table = ddl.find_table(tx, layout.name) is None
    ddl.ensure_table(tx, layout.stored, complete=False)
    if new_table and layout.history:
        ddl.index_current_versions(tx, layout)
    applied = _applied_relation(tx, layout)
    existing = ddl.find_table(tx, applied)
    if existing is not None and not new_table:
        _require_same(tx, layout, applied, existing.types)
        return
    if existing is not None:
        tx.execute(f"drop table {applied.sql}")
    _create(tx, layout, applied)


def _require_same(tx: Transaction, layout: Layout, applied: TableName, existing: Mapping[str, str]) -> None:
    """Refuse keys or an order that differ from those of the applied changes; widen key types."""
    assert layout.sequence is not None
    known = {name: kind for name, kind in existing.items() if name.startswith(_KEY)}
    keys = dict(zip(_key_names(layout), layout.keys, strict=True))
    ordered_by = existing["sequence"]
    narrow = {
        name for name in keys.keys() & known.keys() if not ddl.takes(keys[name], known[name], tx.dialect)
    }
    if (
        known.keys() != keys.keys()
        or ordered_by != layout.sequence.sql_type
        or not all(ddl.is_wider(keys[name], known[name], tx.dialect) for name in narrow)
    ):
        before = ", ".join(f"{name.removeprefix(_KEY)} {kind}" for name, kind in known.items())
        now = ", ".join(f"{key.name} {key.sql_type}" for key in layout.keys)
        raise SchemaMismatchError(
            f"earlier changes of {layout.name.sql} had the keys ({before}) and a sequence of type "
            f"{ordered_by}, and these have the keys ({now}) and a sequence of type "
            f"{layout.sequence.sql_type}: keep keys and sequence_by, or drop the table to start over",
            condition="SCHEMA_MISMATCH.KEYS_CHANGED",
            table=layout.name.sql,
        )
    for name in sorted(narrow):
        tx.execute(f"alter table {applied.sql} alter column {quoted(name)} type {keys[name].declared}")


def _create(tx: Transaction, layout: Layout, applied: TableName) -> None:
    assert layout.sequence is not None
    keys = [quoted(name) for name in _key_names(layout)]
    columns = [f"{name} {key.declared} not null" for name, key in zip(keys, layout.keys, strict=True)]
    columns += [f"sequence {layout.sequence.declared} not null"]
    primary = [*keys, "sequence"] if layout.history else keys
    columns += [] if layout.history else ["present integer not null"]
    columns += [f"primary key ({', '.join(primary)})"]
    tx.execute(f"create table {applied.sql} ({', '.join(columns)})")


def _key_names(layout: Layout) -> list[str]:
    """Return the relation's key columns; their names contain those of the keys, so other keys are noticed."""
    names = [_KEY + key.name for key in layout.keys]
    return [name if len(name.encode()) <= POSTGRES_BYTES else _KEY + digest(name) for name in names]


def _same_applied_key(layout: Layout, staged: str) -> str:
    """Return the SQL condition that a relation row, ``applied``, and a staged row have the same key."""
    pairs = zip(_key_names(layout), layout.staged_keys, strict=True)
    return " and ".join(f"applied.{quoted(key)} = {staged}.{column}" for key, column in pairs)


def _collect(tx: Transaction, layout: Layout, source: StagedRows) -> str:
    """Collect the last change of each key, or with history the last change of each key and sequence.

    The relation has the columns ``c0``, ``c1`` and so on, which are null for deletes except in keys,
    ``sequence``, ``present``, and ``unknown`` if changes may leave values out. The caller drops it.
    """
    upsert.require_all(tx, source)
    latest = _RELATION[tx.dialect]
    place = [*layout.staged_keys, "sequence"] if layout.history else layout.staged_keys
    columns = ", ".join(
        f"c{n}" if column.key else f"case when present = 1 then c{n} end as c{n}"
        for n, column in enumerate(layout.columns)
    )
    unknown = "" if layout.unchanged is None else f", {UNKNOWN}"
    order = ", ".join(f"{name} desc" for name in layout.order)
    name = latest.partition(".")[2]
    tx.execute(f"drop table if exists {latest}")
    tx.execute(
        f"create temporary table {name} as select distinct {columns}, sequence, present{unknown} from ("
        f"select *, rank() over (partition by {', '.join(place)} order by {order}) as place "
        f"from {_carried(tx, layout, source)}) as ranked where place = 1"
    )
    tx.execute(f"create index penstock_latest_place on {name} ({', '.join(layout.staged_keys)}, sequence)")
    if tx.dialect == "postgres":
        tx.execute(f"analyze {latest}")
    _require_unambiguous(tx, layout, latest, place)
    return latest


def _require_unambiguous(tx: Transaction, layout: Layout, latest: str, place: list[str]) -> None:
    keys = ", ".join(layout.staged_keys)
    ambiguous = tx.query(
        f"select {keys} from {latest} group by {', '.join(place)} having count(*) > 1 limit 1"
    )
    if ambiguous:
        assert layout.sequence is not None
        raise ambiguous_order(layout.shown_key(ambiguous[0]), layout.name.sql, layout.sequence.name)


def _carried(tx: Transaction, layout: Layout, source: StagedRows) -> str:
    """Return the staged rows in SQL, with unchanged values carried over from earlier changes of the key.

    ``unknown`` has the columns for which no earlier change has a value.
    """
    plain = f"{source.relation} where {source.where}"
    numbers = [] if layout.unchanged is None else _left_out(tx, plain)
    if not numbers:
        return plain
    keys, order = ", ".join(layout.staged_keys), ", ".join(layout.order)
    # A row with a value and the following rows without one have the same number.
    counted = ", ".join(
        f"sum(case when present = 1 and {has_value(UNKNOWN, n)} then 1 else 0 end) "
        f"over (partition by {keys} order by {order}) as n{n}"
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
    return (
        f"(select {selected} from (select *, {first} from (select *, {counted} from {plain}) as counted) as "
        "firsts) as carried"
    )


def _fill_from_table(tx: Transaction, layout: Layout, latest: str) -> None:
    """Fill the values that are still missing from the table's rows that the changes updated."""
    numbers = [] if layout.unchanged is None else _left_out(tx, f"{latest} where true")
    if not numbers:
        return
    values = ", ".join(
        f"c{n} = case when {has_value(f'{latest}.{UNKNOWN}', n)} then {latest}.c{n} "
        f"else kept.{layout.columns[n].sql} end"
        for n in numbers
    )
    updated = f"{latest}.{UNKNOWN} is not null and {layout.same_key(latest)}"
    if layout.history:
        begins, ends = f"kept.{quoted(VALID_FROM)}", f"kept.{quoted(VALID_TO)}"
        sequence = f"{latest}.sequence"
        updated += f" and {begins} < {sequence} and ({ends} is null or {sequence} < {ends})"
    tx.change(
        f"update {latest} set {values}, {UNKNOWN} = null from {layout.name.sql} as kept where {updated}"
    )
    keys = ", ".join(layout.staged_keys)
    left = tx.query(f"select {UNKNOWN}, {keys} from {latest} where {UNKNOWN} is not null limit 1")
    if left:
        assert layout.unchanged is not None
        name = layout.columns[column_numbers([left[0][0]])[0]].name
        raise layout.unchanged.not_stored(name, layout.name.sql, layout.shown_key(left[0][1:]))


def _left_out(tx: Transaction, rows: str) -> list[int]:
    """Return the numbers of the columns for which some rows leave values out."""
    return column_numbers(
        row[0] for row in tx.query(f"select distinct {UNKNOWN} from {rows} and {UNKNOWN} is not null")
    )
