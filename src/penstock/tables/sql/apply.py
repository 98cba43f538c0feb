"""Apply change rows to a SQL table, in whatever order they arrive.

SCD type 1: the table has the last change of each key. (This is Lamport's last-writer-wins register, with
tombstones.)

SCD type 2: the table has a row for each version, with the sequences between which it was valid. A version is
valid from its own change to the next change of its key, of any kind. So the table is a function of the set of
changes, and does not depend on the order in which they arrive. The versions are in the table, and the deletes
in the applied-changes table. A late change ends the version that was valid at its sequence, and is valid up
to the next change. (Slowly changing dimensions, type 2: Kimball, "The Data Warehouse Toolkit".)

The applied-changes table is a second table of the store. For type 1 it has the sequence of each key's last
change, even if that was a delete, so that late and repeated changes are recognized as outdated. For type 2 it
has the deletes, since the table itself has the other changes.

Omitted values are an exception: they are taken from changes that arrived earlier, so the changes of a row
then have to arrive in order.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import SchemaMismatchError, TableRefusedError
from penstock.store.database import Transaction
from penstock.tables.columns import VALID_FROM, VALID_TO, Layout
from penstock.tables.names import POSTGRES_BYTES, TableName, digest, quoted
from penstock.tables.row_checks import ambiguous_order_error
from penstock.tables.sql import ddl, upsert
from penstock.tables.sql.staging import StagedRows
from penstock.tables.sql.table_mark import create_mark, has_mark
from penstock.tables.unchanged_values import MISSING_COLUMNS, column_numbers, has_value

_VALID_FROM, _VALID_TO = quoted(VALID_FROM), quoted(VALID_TO)
_LATEST_TABLE = {"postgres": "pg_temp.penstock_latest", "sqlite": "temp.penstock_latest"}
_KEY_PREFIX = "key_"
"""The prefix of the key columns in the applied-changes table."""


def apply_changes(tx: Transaction, layout: Layout, source: StagedRows) -> int:
    """Apply staged changes, and return the number of new ones."""
    applied_table = _applied_table(tx, layout)
    if tx.dialect == "postgres":
        # Serialize writers, since each compares its changes with those applied before.
        tx.execute(f"lock table {applied_table.sql} in share row exclusive mode")
        tx.require_trusted_owner(applied_table.schema, applied_table.table)
    latest = _collect_latest(tx, layout, source)
    if layout.history:
        _drop_known_versions(tx, layout, applied_table, latest)
    else:
        _drop_outdated(tx, layout, applied_table, latest)
    _fill_from_table(tx, layout, latest)
    changed = int(tx.query(f"select count(*) from {latest}")[0][0])
    if layout.history:
        _end_versions(tx, layout, latest)
        _insert_versions(tx, layout, applied_table, latest)
        _record_deletes(tx, layout, applied_table, latest)
    else:
        _delete_rows(tx, layout, latest)
        upsert.upsert(tx, layout, StagedRows(latest, "present = 1"))
        _record_applied(tx, layout, applied_table, latest)
    tx.execute(f"drop table {latest}")
    return changed


def _drop_outdated(tx: Transaction, layout: Layout, applied_table: TableName, latest: str) -> None:
    tx.change(
        f"delete from {latest} where exists (select 1 from {applied_table.sql} as applied "
        f"where {_same_applied_key(layout, latest)} "
        f"and (applied.sequence, applied.present) >= ({latest}.sequence, {latest}.present))"
    )


def _delete_rows(tx: Transaction, layout: Layout, latest: str) -> None:
    deleted = f"select {', '.join(layout.staged_keys)} from {latest} where present = 0"
    tx.change(f"delete from {layout.name.sql} where ({layout.keys_sql}) in ({deleted})")


def _record_applied(tx: Transaction, layout: Layout, applied_table: TableName, latest: str) -> None:
    keys = ", ".join(map(quoted, _applied_key_names(layout)))
    tx.change(
        f"insert into {applied_table.sql} ({keys}, sequence, present) "
        f"select {', '.join(layout.staged_keys)}, sequence, present from {latest} where true "
        f"on conflict ({keys}) do update set sequence = excluded.sequence, present = excluded.present"
    )


def _drop_known_versions(tx: Transaction, layout: Layout, applied_table: TableName, latest: str) -> None:
    """Drop changes applied before; a stored version takes precedence over a delete with the same sequence."""
    tx.change(
        f"delete from {latest} where exists (select 1 from {layout.name.sql} as kept "
        f"where {layout.same_key(latest)} and kept.{_VALID_FROM} = {latest}.sequence)"
    )
    tx.change(
        f"delete from {latest} where present = 0 and exists (select 1 from {applied_table.sql} as applied "
        f"where {_same_applied_key(layout, latest)} and applied.sequence = {latest}.sequence)"
    )


def _end_versions(tx: Transaction, layout: Layout, latest: str) -> None:
    """End each stored version at the first change within its validity period."""
    keys = [key.sql for key in layout.keys]
    group_columns = ", ".join(f"kept.{key}" for key in [*keys, _VALID_FROM])
    same_version = " and ".join(f"{layout.name.sql}.{key} = ended.{key}" for key in [*keys, _VALID_FROM])
    tx.change(
        f"update {layout.name.sql} set {_VALID_TO} = ended.sequence from (select {group_columns}, "
        f"min(latest.sequence) as sequence from {latest} as latest join {layout.name.sql} as kept on "
        f"{layout.same_key('latest')} and kept.{_VALID_FROM} < latest.sequence and (kept.{_VALID_TO} is null "
        f"or latest.sequence < kept.{_VALID_TO}) group by {group_columns}) as ended where {same_version}"
    )


def _insert_versions(tx: Transaction, layout: Layout, applied_table: TableName, latest: str) -> None:
    """Insert the new versions, each valid up to the next change, which may be stored or deleted."""
    columns = ", ".join(f"c{n}" for n in range(len(layout.columns)))
    later_sequences = (
        f"select min(kept.{_VALID_FROM}) from {layout.name.sql} as kept where {layout.same_key('latest')} "
        f"and kept.{_VALID_FROM} > latest.sequence union all select min(applied.sequence) from "
        f"{applied_table.sql} as applied where {_same_applied_key(layout, 'latest')} and applied.sequence > "
        "latest.sequence"
    )
    keys = ", ".join(layout.staged_keys)
    tx.change(
        f"insert into {layout.name.sql} ({layout.stored_layout.columns_sql}) select {columns}, sequence, "
        f"(select min(upto) from (select latest.coming as upto union all {later_sequences}) as ends) from "
        f"(select *, lead(sequence) over (partition by {keys} order by sequence) as coming from {latest}) as "
        "latest where present = 1"
    )


def _record_deletes(tx: Transaction, layout: Layout, applied_table: TableName, latest: str) -> None:
    keys = ", ".join(map(quoted, _applied_key_names(layout)))
    tx.change(
        f"insert into {applied_table.sql} ({keys}, sequence) "
        f"select {', '.join(layout.staged_keys)}, sequence from {latest} where present = 0"
    )


def _applied_table(tx: Transaction, layout: Layout) -> TableName:
    name = f"applied_{digest(layout.name.ledger_name)}"
    if tx.dialect == "sqlite":
        return TableName("main", f"penstock_{name}")
    return TableName(tx.schema[1:-1].replace('""', '"'), name)


def prepare_tables(tx: Transaction, layout: Layout) -> None:
    """Create the table and its applied-changes table, or check existing ones.

    A new table gets a new applied-changes table, also if a user has recreated it, so that it has no mark and
    no rows. A table whose rows were copied from the earlier one is not regarded as new.
    """
    is_missing = ddl.find_table(tx, layout.name) is None
    ddl.ensure_table(tx, layout.stored_layout, complete=False)
    if is_missing and layout.history:
        ddl.index_current_versions(tx, layout)
    was_marked = has_mark(tx, layout)
    was_recreated = not was_marked and create_mark(tx, layout) and not _has_rows(tx, layout)
    new_table = is_missing or was_recreated
    applied = _applied_table(tx, layout)
    existing = ddl.find_table(tx, applied)
    if existing is None and was_marked:
        raise TableRefusedError(
            f"the changes applied to {layout.name.sql} are no longer recorded: the table {applied.sql} is "
            f"missing, or was in another store. Restore it, or drop {layout.name.sql} to start over",
            condition="TABLE_REFUSED.CHANGES_FORGOTTEN",
            table=layout.name.sql,
        )
    if existing is not None and not new_table:
        _require_same_keys(tx, layout, applied, existing.types)
        return
    if existing is not None:
        tx.execute(f"drop table {applied.sql}")
    _create_applied_table(tx, layout, applied)


def _has_rows(tx: Transaction, layout: Layout) -> bool:
    return bool(tx.query(f"select 1 from {layout.name.sql} limit 1"))


def _require_same_keys(
    tx: Transaction, layout: Layout, applied: TableName, existing: Mapping[str, str]
) -> None:
    """Refuse keys or an order that differ from those of the applied changes; widen key types."""
    assert layout.sequence is not None
    recorded_keys = {name: kind for name, kind in existing.items() if name.startswith(_KEY_PREFIX)}
    keys = dict(zip(_applied_key_names(layout), layout.keys, strict=True))
    recorded_sequence = existing["sequence"]
    too_narrow = {
        name
        for name in keys.keys() & recorded_keys.keys()
        if not ddl.can_store(keys[name], recorded_keys[name], tx.dialect)
    }
    if (
        recorded_keys.keys() != keys.keys()
        or recorded_sequence != layout.sequence.sql_type
        or not all(ddl.can_widen(keys[name], recorded_keys[name], tx.dialect) for name in too_narrow)
    ):
        recorded = ", ".join(
            f"{name.removeprefix(_KEY_PREFIX)} {kind}" for name, kind in recorded_keys.items()
        )
        current = ", ".join(f"{key.name} {key.sql_type}" for key in layout.keys)
        raise SchemaMismatchError(
            f"earlier changes of {layout.name.sql} had the keys ({recorded}) and a sequence of type "
            f"{recorded_sequence}, and these have the keys ({current}) and a sequence of type "
            f"{layout.sequence.sql_type}: keep keys and sequence_by, or drop the table to start over",
            condition="SCHEMA_MISMATCH.KEYS_CHANGED",
            table=layout.name.sql,
        )
    for name in sorted(too_narrow):
        tx.execute(f"alter table {applied.sql} alter column {quoted(name)} type {keys[name].ddl_type}")


def _create_applied_table(tx: Transaction, layout: Layout, applied: TableName) -> None:
    assert layout.sequence is not None
    keys = [quoted(name) for name in _applied_key_names(layout)]
    columns = [f"{name} {key.ddl_type} not null" for name, key in zip(keys, layout.keys, strict=True)]
    columns += [f"sequence {layout.sequence.ddl_type} not null"]
    primary = [*keys, "sequence"] if layout.history else keys
    columns += [] if layout.history else ["present integer not null"]
    columns += [f"primary key ({', '.join(primary)})"]
    tx.execute(f"create table {applied.sql} ({', '.join(columns)})")


def _applied_key_names(layout: Layout) -> list[str]:
    """Return the key columns of the applied-changes table; their names show when a query has other keys."""
    names = [_KEY_PREFIX + key.name for key in layout.keys]
    return [name if len(name.encode()) <= POSTGRES_BYTES else _KEY_PREFIX + digest(name) for name in names]


def _same_applied_key(layout: Layout, staged: str) -> str:
    """Return the SQL condition that an applied change (alias ``applied``) and a staged row have one key."""
    pairs = zip(_applied_key_names(layout), layout.staged_keys, strict=True)
    return " and ".join(f"applied.{quoted(key)} = {staged}.{column}" for key, column in pairs)


def _collect_latest(tx: Transaction, layout: Layout, source: StagedRows) -> str:
    """Collect the last change of each key, or with history the last change of each key and sequence.

    The temporary table has the columns ``c0``, ``c1`` and so on, which are null for deletes except in keys,
    ``sequence``, ``present``, and ``unknown`` if changes may leave values out. The caller drops it.
    """
    upsert.require_all_staged(tx, source)
    latest = _LATEST_TABLE[tx.dialect]
    partition = [*layout.staged_keys, "sequence"] if layout.history else layout.staged_keys
    columns = ", ".join(
        f"c{n}" if column.key else f"case when present = 1 then c{n} end as c{n}"
        for n, column in enumerate(layout.columns)
    )
    missing = "" if layout.unchanged is None else f", {MISSING_COLUMNS}"
    order = ", ".join(f"{name} desc" for name in layout.staged_order)
    name = latest.partition(".")[2]
    tx.execute(f"drop table if exists {latest}")
    tx.execute(
        f"create temporary table {name} as select distinct {columns}, sequence, present{missing} from ("
        f"select *, rank() over (partition by {', '.join(partition)} order by {order}) as place "
        f"from {_carried_over(tx, layout, source)}) as ranked where place = 1"
    )
    tx.execute(f"create index penstock_latest_place on {name} ({', '.join(layout.staged_keys)}, sequence)")
    if tx.dialect == "postgres":
        tx.execute(f"analyze {latest}")
    _require_unambiguous(tx, layout, latest, partition)
    return latest


def _require_unambiguous(tx: Transaction, layout: Layout, latest: str, partition: list[str]) -> None:
    keys = ", ".join(layout.staged_keys)
    ambiguous = tx.query(
        f"select {keys} from {latest} group by {', '.join(partition)} having count(*) > 1 limit 1"
    )
    if ambiguous:
        assert layout.sequence is not None
        raise ambiguous_order_error(layout.shown_key(ambiguous[0]), layout.name.sql, layout.sequence.name)


def _carried_over(tx: Transaction, layout: Layout, source: StagedRows) -> str:
    """Return SQL for the staged rows, with omitted values carried over from earlier changes of the key.

    ``unknown`` lists the columns for which no earlier change has a value.
    """
    staged = f"{source.relation} where {source.where}"
    numbers = [] if layout.unchanged is None else _missing_column_numbers(tx, staged)
    if not numbers:
        return staged
    keys, order = ", ".join(layout.staged_keys), ", ".join(layout.staged_order)
    # Count the values so far: a row with a value and the following rows without one have the same count.
    value_counts = ", ".join(
        f"sum(case when present = 1 and {has_value(MISSING_COLUMNS, n)} then 1 else 0 end) "
        f"over (partition by {keys} order by {order}) as n{n}"
        for n in numbers
    )
    carried_values = ", ".join(
        f"first_value(c{n}) over (partition by {keys}, n{n} order by {order}) as f{n}" for n in numbers
    )
    columns = [
        f"case when n{n} > 0 and not ({has_value(MISSING_COLUMNS, n)}) then f{n} else c{n} end as c{n}"
        if n in numbers
        else f"c{n}"
        for n in range(len(layout.columns))
    ]
    still_missing = " || ".join(
        f"case when n{n} > 0 or {has_value(MISSING_COLUMNS, n)} then '' else ',{n},' end" for n in numbers
    )
    selected = ", ".join(
        [*columns, *layout.staged_order, f"nullif({still_missing}, '') as {MISSING_COLUMNS}"]
    )
    return (
        f"(select {selected} from (select *, {carried_values} from (select *, {value_counts} from {staged}) "
        "as counted) as firsts) as carried"
    )


def _fill_from_table(tx: Transaction, layout: Layout, latest: str) -> None:
    """Fill the values that are still missing from the stored rows that the changes update."""
    numbers = [] if layout.unchanged is None else _missing_column_numbers(tx, f"{latest} where true")
    if not numbers:
        return
    values = ", ".join(
        f"c{n} = case when {has_value(f'{latest}.{MISSING_COLUMNS}', n)} then {latest}.c{n} "
        f"else kept.{layout.columns[n].sql} end"
        for n in numbers
    )
    is_updated = f"{latest}.{MISSING_COLUMNS} is not null and {layout.same_key(latest)}"
    if layout.history:
        begins, ends = f"kept.{quoted(VALID_FROM)}", f"kept.{quoted(VALID_TO)}"
        sequence = f"{latest}.sequence"
        is_updated += f" and {begins} < {sequence} and ({ends} is null or {sequence} < {ends})"
    tx.change(
        f"update {latest} set {values}, {MISSING_COLUMNS} = null from {layout.name.sql} as kept where "
        f"{is_updated}"
    )
    keys = ", ".join(layout.staged_keys)
    unfilled = tx.query(
        f"select {MISSING_COLUMNS}, {keys} from {latest} where {MISSING_COLUMNS} is not null limit 1"
    )
    if unfilled:
        assert layout.unchanged is not None
        name = layout.columns[column_numbers([unfilled[0][0]])[0]].name
        raise layout.unchanged.not_stored_error(name, layout.name.sql, layout.shown_key(unfilled[0][1:]))


def _missing_column_numbers(tx: Transaction, rows: str) -> list[int]:
    """Return the numbers of the columns whose values some rows omit."""
    return column_numbers(
        row[0]
        for row in tx.query(
            f"select distinct {MISSING_COLUMNS} from {rows} and {MISSING_COLUMNS} is not null"
        )
    )
