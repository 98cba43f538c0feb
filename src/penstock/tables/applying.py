"""Change rows applied to a table: the last change of each key counts, whatever the order in which changes come.

The sequence of each key's last change is kept beside the table, also when that was a delete, so that a change which comes late, or
again, is known to be an old one. (The rule is that of Lamport's last-writer-wins register, with tombstones.)
"""

from __future__ import annotations

from penstock.store.database import Transaction
from penstock.tables import applied, merging
from penstock.tables.columns import Layout
from penstock.tables.filling import fill
from penstock.tables.latest import gather
from penstock.tables.names import TableName
from penstock.tables.stages import Source


def apply(tx: Transaction, layout: Layout, source: Source) -> int:
    """Apply staged changes; the number of keys that changed.

    Raises
    ------
    TableRefused
        When a key has several last changes that differ.
    CommitRefused
        When staged rows are gone.
    """
    beside = applied.relation(tx, layout)
    applied.lock(tx, beside)
    latest = gather(tx, layout, source)
    tx.change(
        f"delete from {latest} where exists (select 1 from {beside.sql} as applied "
        f"where {applied.same_key(layout, 'applied', latest)} "
        f"and (applied.sequence, applied.present) >= ({latest}.sequence, {latest}.present))"
    )
    fill(tx, layout, latest)
    changed = int(tx.query(f"select count(*) from {latest}")[0][0])
    _delete(tx, layout, latest)
    merging.upsert(tx, layout, Source(latest, "present = 1"))
    _remember(tx, layout, beside, latest)
    tx.execute(f"drop table {latest}")
    return changed


def _delete(tx: Transaction, layout: Layout, latest: str) -> None:
    keys = ", ".join(key.sql for key in layout.keys)
    gone = f"select {', '.join(layout.staged_keys)} from {latest} where present = 0"
    tx.change(f"delete from {layout.name.sql} where ({keys}) in ({gone})")


def _remember(tx: Transaction, layout: Layout, beside: TableName, latest: str) -> None:
    keys = ", ".join(applied.key_names(layout))
    tx.change(
        f"insert into {beside.sql} ({keys}, sequence, present) "
        f"select {', '.join(layout.staged_keys)}, sequence, present from {latest} where true "
        f"on conflict ({keys}) do update set sequence = excluded.sequence, present = excluded.present"
    )
