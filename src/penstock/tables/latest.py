"""Of the staged changes, those that may count: what comes later in the same micro-batch has taken the place of the others."""

from __future__ import annotations

from penstock.errors import TableRefused
from penstock.store.database import Transaction
from penstock.tables import merging
from penstock.tables.columns import Layout
from penstock.tables.filling import carried
from penstock.tables.names import quoted
from penstock.tables.stages import Source
from penstock.tables.unchanged import UNKNOWN

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
    merging.require_all(tx, source)
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
        shown = merging.shown_key(layout.keys, found[0])
        assert layout.sequence is not None
        raise TableRefused(
            f"the key {shown} of {layout.name.sql} has several changes with one value of {quoted(layout.sequence.name)}, and nothing says "
            "which of them is the last one: take the feed's net changes (deduplication_mode='netChanges', net_window='commit'), or name a "
            "column as sequence_by that orders all changes of a key",
            condition="TABLE_REFUSED.AMBIGUOUS_ORDER",
            key=shown,
        )
