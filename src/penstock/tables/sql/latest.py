"""The latest changes of a micro-batch, in a temporary relation: later changes replace earlier ones of the
same key.
"""

from __future__ import annotations

from penstock.store.database import Transaction
from penstock.tables.columns import VALID_FROM, VALID_TO, Layout
from penstock.tables.names import quoted
from penstock.tables.row_checks import ambiguous_order
from penstock.tables.sql import upsert
from penstock.tables.sql.loading import StagedRows
from penstock.tables.unchanged_values import UNKNOWN, column_numbers, has_value

_RELATION = {"postgres": "pg_temp.penstock_latest", "sqlite": "temp.penstock_latest"}


def collect(tx: Transaction, layout: Layout, source: StagedRows) -> str:
    """Collect the last change of each key, and with history the last one of each key and sequence.

    The relation has the columns ``c0``, ``c1`` and so on, which but for the keys are null in a delete,
    ``sequence``, ``present``, and ``unknown`` where changes may leave values out. The caller drops it.

    Raises
    ------
    TableRefusedError
        When a key has several last changes that differ.
    CommitRefusedError
        When staged rows are gone.
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
        key = upsert.shown_key(layout.keys, ambiguous[0])
        raise ambiguous_order(key, layout.name.sql, layout.sequence.name)


def _carried(tx: Transaction, layout: Layout, source: StagedRows) -> str:
    """Return the staged rows in SQL, with unchanged values carried over from earlier changes of the key.

    ``unknown`` has the columns whose value no earlier change has.
    """
    plain = f"{source.relation} where {source.where}"
    numbers = [] if layout.unchanged is None else _left_out(tx, plain)
    if not numbers:
        return plain
    keys, order = ", ".join(layout.staged_keys), ", ".join(layout.order)
    # Rows that follow one with a value have its number, up to the next one with a value.
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


def fill_from_table(tx: Transaction, layout: Layout, latest: str) -> None:
    """Fill the values that are still left out from the rows of the table that the changes updated.

    Raises
    ------
    TableRefusedError
        When the table has no such row.
    """
    numbers = [] if layout.unchanged is None else _left_out(tx, f"{latest} where true")
    if not numbers:
        return
    values = ", ".join(
        f"c{n} = case when {has_value(f'{latest}.{UNKNOWN}', n)} then {latest}.c{n} "
        f"else kept.{layout.columns[n].sql} end"
        for n in numbers
    )
    updated = f"{latest}.{UNKNOWN} is not null and {layout.same_key('kept', latest)}"
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
        key = upsert.shown_key(layout.keys, left[0][1:])
        raise layout.unchanged.not_stored(name, layout.name.sql, key)


def _left_out(tx: Transaction, rows: str) -> list[int]:
    """Return the numbers of the columns whose values some rows leave out."""
    return column_numbers(
        row[0] for row in tx.query(f"select distinct {UNKNOWN} from {rows} and {UNKNOWN} is not null")
    )
