"""Values that staged changes leave out, from the rows that they changed: earlier ones of the micro-batch, else those in the table."""

from __future__ import annotations

from penstock.store.database import Transaction
from penstock.tables import merging
from penstock.tables.columns import VALID_FROM, VALID_TO, Layout
from penstock.tables.names import quoted
from penstock.tables.stages import Source
from penstock.tables.unchanged import UNKNOWN, has_value, numbers_of


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
        shown = merging.shown_key(layout.keys, left[0][1:])
        raise layout.unchanged.lost(name, layout.name.sql, shown)


def _unknown(tx: Transaction, rows: str) -> list[int]:
    """The numbers of the columns that some rows leave out."""
    return numbers_of(
        row[0] for row in tx.query(f"select distinct {UNKNOWN} from {rows} and {UNKNOWN} is not null")
    )
