"""The relation beside a table that records which changes were applied.

For type 1 it has the sequence of each key's last change, also when that was a delete, so that a late or
repeated change is known to be old. For type 2 it has the deletes, since the table itself has the rest.
"""

from __future__ import annotations

import hashlib

from penstock.errors import SchemaMismatch
from penstock.store.database import Transaction
from penstock.tables.columns import Layout
from penstock.tables.names import TableName
from penstock.tables.sql import ddl


def relation(tx: Transaction, layout: Layout) -> TableName:
    """Return the name of the relation."""
    digest = hashlib.sha256(layout.name.ledger_name.encode()).hexdigest()[:32]
    if tx.dialect == "sqlite":
        return TableName("main", f"penstock_applied_{digest}")
    return TableName(tx.schema[1:-1].replace('""', '"'), f"applied_{digest}")


def prepare(tx: Transaction, layout: Layout) -> None:
    """Create the table and the relation, or check them; a new table gets a new relation.

    Raises
    ------
    SchemaMismatch
        When the table does not take the rows, or its changes were ordered by a column of another type before.
    """
    new_table = ddl.find_table(tx, layout.name) is None
    ddl.ensure_table(tx, layout.stored, complete=False)
    if new_table and layout.history:
        ddl.index_current_versions(tx, layout)
    applied = relation(tx, layout)
    if new_table:
        tx.execute(f"drop table if exists {applied.sql}")
    existing = ddl.find_table(tx, applied)
    if existing is None:
        _create(tx, layout, applied)
        return
    assert layout.sequence is not None
    keys, needed = sum(name.startswith("k") for name in existing.types), layout.sequence.sql_type
    if existing.types["sequence"] != needed or keys != len(layout.keys):
        raise SchemaMismatch(
            f"the changes of {layout.name.sql} were ordered by {existing.types['sequence']} before, with "
            f"{keys} keys, and are by {needed} now, with {len(layout.keys)}: keep keys and sequence_by, or "
            "drop the table to start over",
            table=layout.name.sql,
        )


def _create(tx: Transaction, layout: Layout, applied: TableName) -> None:
    assert layout.sequence is not None
    keys = key_names(layout)
    columns = [f"{name} {key.declared} not null" for name, key in zip(keys, layout.keys, strict=True)]
    columns += [f"sequence {layout.sequence.declared} not null"]
    primary = [*keys, "sequence"] if layout.history else keys
    columns += [] if layout.history else ["present integer not null"]
    columns += [f"primary key ({', '.join(primary)})"]
    tx.execute(f"create table {applied.sql} ({', '.join(columns)})")


def key_names(layout: Layout) -> list[str]:
    """Return the relation's columns with the keys."""
    return [f"k{n}" for n in range(len(layout.keys))]


def same_key(layout: Layout, staged: str) -> str:
    """Return the SQL condition that a row of the relation, aliased ``applied``, and a staged row have the
    same key.
    """
    pairs = zip(key_names(layout), layout.staged_keys, strict=True)
    return " and ".join(f"applied.{key} = {staged}.{column}" for key, column in pairs)


def lock(tx: Transaction, applied: TableName) -> None:
    """Serialise writers, each of which compares its changes with what the one before has applied."""
    if tx.dialect == "postgres":
        tx.execute(f"lock table {applied.sql} in share row exclusive mode")
