"""What is remembered of applied changes, in a relation beside the table.

Of a table with the rows as they are now: for each key that was ever changed, the sequence of its last change, also when that was a
delete. Of a table with history: every delete, since the table itself has the rest.
"""

from __future__ import annotations

import hashlib

from penstock.errors import SchemaMismatch
from penstock.store.database import Transaction
from penstock.tables import existing
from penstock.tables.columns import Layout
from penstock.tables.names import TableName


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
