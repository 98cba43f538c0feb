"""Staging relations: unlogged PostgreSQL tables in which tasks stage the rows of a table sink. Each try of a
micro-batch has its own.

The comment on each table records which query uses it, so there is no other record that could disagree.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import StoreError, condition_of
from penstock.json_text import parse_json
from penstock.redaction import redacted_message
from penstock.store.database import Database, Row, Transaction
from penstock.store.postgres.database import PostgresDatabase

log = logging.getLogger("penstock.store")

NAME_PREFIX = "staged_rows_"


@dataclass(frozen=True)
class Relation:
    """The staging relation of one try of one micro-batch."""

    name: str
    sink: str
    app_id: str
    used_at: int
    """When the relation was created or last used, in microseconds since 1970."""
    droppable: bool
    """Whether this session's role may drop the relation. Another role may have created it."""


def create(tx: Transaction, columns: Sequence[str], *, sink: str, app_id: str) -> str:
    """Create a relation with columns such as ``c0 bigint``, and return its unique name.

    ``sink`` is the table's name in the ledger.
    """
    name = NAME_PREFIX + uuid.uuid4().hex
    qualified_name = qualified(tx, name)
    tx.execute(
        f"create unlogged table {qualified_name} ({', '.join(columns)}) with (autovacuum_enabled = false)"
    )
    describe(tx, name, sink=sink, app_id=app_id)
    return name


def describe(tx: Transaction, name: str, *, sink: str, app_id: str) -> None:
    """Record which query uses a relation, and that it uses the relation now."""
    comment = json.dumps({"sink": sink, "app_id": app_id, "used_at": tx.now()})
    literal = comment.replace("\\", "\\\\").replace("'", "''")
    tx.execute(f"comment on table {qualified(tx, name)} is E'{literal}'")


def qualified(tx: Transaction, name: str) -> str:
    """Return the qualified and quoted name of a relation. Other roles may create relations with any name in
    the schema.
    """
    escaped = name.replace('"', '""')
    return f'{tx.schema}."{escaped}"'


def list_relations(tx: Transaction) -> list[Relation]:
    """Return all staging relations; a SQLite store has none."""
    if tx.dialect != "postgres":
        return []
    rows = tx.all("list_relations", schema=_unquoted(tx.schema))
    return [relation for row in rows if (relation := _relation(row)) is not None]


def _relation(row: Row) -> Relation | None:
    """Return the relation that a comment describes; None if another program created the relation."""
    try:
        comment = parse_json(row.comment or "null")
        sink, app_id, used_at = str(comment["sink"]), str(comment["app_id"]), int(comment["used_at"])
        return Relation(row.name, sink, app_id, used_at, row.droppable)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"')


def exists(tx: Transaction, name: str) -> bool:
    return any(relation.name == name for relation in list_relations(tx))


def lock_relation(tx: Transaction, name: str) -> None:
    """Lock a relation so that nobody drops it before the transaction ends. Refuse it if an untrusted role has
    replaced it.
    """
    tx.lock_table(_unquoted(tx.schema), name)


def drop(tx: Transaction, name: str) -> None:
    tx.execute(f"drop table if exists {qualified(tx, name)}")


def drop_earlier_relations(database: Database, sink: str, app_id: str) -> None:
    """Drop the relations of an app's earlier tries. A relation that a task still writes to is left to the
    next try or to maintenance.
    """
    if not isinstance(database, PostgresDatabase):
        return
    for relation in database.run(list_relations, write=False):
        if relation.droppable and (relation.sink, relation.app_id) == (sink, app_id):
            _drop_if_idle(database, relation.name)


def _drop_if_idle(database: Database, name: str) -> None:
    def work(tx: Transaction) -> None:
        tx.execute("set local lock_timeout = '1s'")
        drop(tx, name)

    try:
        database.run(work, idempotent=True, timeout=0)
    except StoreError as error:
        log.info(
            "a staged relation is still in use: %s",
            redacted_message(error),
            extra={"action": "stage_in_use", "relation": name, "error": condition_of(error)},
        )
