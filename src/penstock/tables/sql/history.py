"""Change rows applied to a table that keeps each row's history: a row for each version, with the sequences between which it held.

A version holds from its own change to the next change of its key, of whatever kind. So the table is a function of the set of
changes, not of the order in which they came: the versions are in the table, the deletes beside it, and a change that comes late
ends the version that it falls into and holds up to the next change. (Type 2 of the slowly changing dimensions of Kimball, "The Data
Warehouse Toolkit".)
"""

from __future__ import annotations

from penstock.store.database import Transaction
from penstock.tables.columns import VALID_FROM, VALID_TO, Layout
from penstock.tables.names import TableName, quoted
from penstock.tables.sql import apply as applied
from penstock.tables.sql.apply import fill, gather
from penstock.tables.sql.stage import Source

_FROM, _TO = quoted(VALID_FROM), quoted(VALID_TO)


def apply(tx: Transaction, layout: Layout, source: Source) -> int:
    """Apply staged changes; the number of those that were new.

    Raises
    ------
    TableRefused
        When a key has several changes with one sequence that differ.
    CommitRefused
        When staged rows are gone.
    """
    beside = applied.relation(tx, layout)
    applied.lock(tx, beside)
    latest = gather(tx, layout, source)
    _forget_known(tx, layout, beside, latest)
    fill(tx, layout, latest)
    changed = int(tx.query(f"select count(*) from {latest}")[0][0])
    _end(tx, layout, latest)
    _begin(tx, layout, beside, latest)
    _remember(tx, layout, beside, latest)
    tx.execute(f"drop table {latest}")
    return changed


def _forget_known(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    """A change with a sequence that is in is a repeated one; a row that is there comes after one that is gone."""
    tx.change(
        f"delete from {latest} where exists (select 1 from {layout.name.sql} as kept "
        f"where {layout.same_key('kept', latest)} and kept.{_FROM} = {latest}.sequence)"
    )
    tx.change(
        f"delete from {latest} where present = 0 and exists (select 1 from {beside.sql} as applied "
        f"where {applied.same_key(layout, 'applied', latest)} and applied.sequence = {latest}.sequence)"
    )


def _end(tx: Transaction, layout: Layout, latest: str) -> None:
    """Each version that a change falls into ends with the first of them."""
    keys = [key.sql for key in layout.keys]
    grouped = ", ".join(f"kept.{key}" for key in [*keys, _FROM])
    ended = " and ".join(f"{layout.name.sql}.{key} = ended.{key}" for key in [*keys, _FROM])
    tx.change(
        f"update {layout.name.sql} set {_TO} = ended.sequence from ("
        f"select {grouped}, min(latest.sequence) as sequence from {latest} as latest join {layout.name.sql} as kept "
        f"on {layout.same_key('kept', 'latest')} and kept.{_FROM} < latest.sequence "
        f"and (kept.{_TO} is null or latest.sequence < kept.{_TO}) group by {grouped}) as ended where {ended}"
    )


def _begin(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    """Each new version holds to the next change, which is new as well, or in the table, or beside it."""
    names = ", ".join(column.sql for column in layout.kept.columns)
    columns = ", ".join(f"c{n}" for n in range(len(layout.columns)))
    following = (
        f"select min(kept.{_FROM}) from {layout.name.sql} as kept where {layout.same_key('kept', 'latest')} "
        f"and kept.{_FROM} > latest.sequence union all select min(applied.sequence) from {beside.sql} as applied "
        f"where {applied.same_key(layout, 'applied', 'latest')} and applied.sequence > latest.sequence"
    )
    tx.change(
        f"insert into {layout.name.sql} ({names}) select {columns}, sequence, "
        f"(select min(upto) from (select latest.coming as upto union all {following}) as ends) "
        "from (select *, lead(sequence) over "
        f"(partition by {', '.join(layout.staged_keys)} order by sequence) as coming from {latest}) as latest where present = 1"
    )


def _remember(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    keys = ", ".join(applied.key_names(layout))
    tx.change(
        f"insert into {beside.sql} ({keys}, sequence) "
        f"select {', '.join(layout.staged_keys)}, sequence from {latest} where present = 0"
    )
