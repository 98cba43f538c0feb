"""The schema's version: create it, bring an older one up to date, refuse a newer one."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sqlite3
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from penstock.arguments import in_quotes
from penstock.errors import (
    StoreError,
    StoreNotFound,
    StoreReadOnly,
    StoreTooNew,
    StoreUnavailable,
    StoreUnsafe,
)
from penstock.store.database import Database, Transaction
from penstock.store.postgres.database import PostgresDatabase
from penstock.store.sqlite.database import SqliteDatabase
from penstock.store.statements import migrations, newest_version, own_relations, parse, qualify
from penstock.store.url import parse_url, with_options

log = logging.getLogger("penstock.store")

VERSION = newest_version()
# A schema, a table, a type or an index that another program has made since it was looked for.
_MADE_MEANWHILE = ("23505", "42710", "42P06", "42P07")
_TRIES = 5


@dataclass(frozen=True)
class StoreIdentity:
    """Which store this is, wherever it is reached from."""

    uuid: str
    version: int


def open_database(
    url: str, *, create: bool, patience: float | None = None, as_it_is: bool = False
) -> tuple[Database, StoreIdentity]:
    """Connect to a store's database and see to its schema.

    Parameters
    ----------
    create
        Whether to make a store where there is none.
    patience
        For how many seconds to try again while the database does not answer.
    as_it_is
        Whether nothing is written, for those who only look: a store of an older version is refused.

    Raises
    ------
    StoreNotFound
        When there is no store at the URL and ``create`` is False.
    StoreTooNew
        When a newer Penstock made it.
    StoreError
        When it is of an older version and has to stay as it is.
    """
    parsed = parse_url(url)
    database = SqliteDatabase(parsed) if parsed.dialect == "sqlite" else PostgresDatabase(parsed)
    database.may_create = create
    try:
        identity = _found(database, patience) if as_it_is else _opened(database, create, patience)
    except BaseException:
        database.close()
        raise
    database.may_create = False
    database.uuid = identity.uuid
    return database, identity


def _opened(database: Database, create: bool, patience: float | None) -> StoreIdentity:
    identity = None
    if database.exists():
        identity = database.run(lambda tx: _identity(tx, database), write=False, patience=patience)
    if identity is None and not create:
        raise _missing(database)
    if isinstance(database, SqliteDatabase):
        _use_wal(database, identity is None, patience)
    if identity is None or identity.version < VERSION:
        before = None if identity is None else identity.version
        identity = _prepared(database, patience)
        log.info(
            "the store %s is %s",
            database.url,
            "created" if before is None else "migrated",
            extra={
                "action": "store_prepared",
                "store": str(database.url),
                "before": before,
                "version": identity.version,
            },
        )
    return identity


def _prepared(database: Database, patience: float | None) -> StoreIdentity:
    for left in reversed(range(_TRIES)):
        try:
            return database.run(lambda tx: _prepare(tx, database), idempotent=True, patience=patience)
        except StoreError as error:
            if not left or getattr(error.__cause__, "sqlstate", None) not in _MADE_MEANWHILE:
                raise
    raise AssertionError("unreachable")


def _found(database: Database, patience: float | None) -> StoreIdentity:
    found = None
    if database.exists():
        found = database.run(lambda tx: _identity(tx, database), write=False, patience=patience)
    if found is None:
        raise _missing(database)
    if found.version < VERSION:
        raise StoreError(
            f"{database.url} has schema version {found.version}, and this Penstock reads {VERSION}: `penstock store init` brings it "
            "up to date",
            condition="STORE_TOO_OLD",
            found=found.version,
            known=VERSION,
        )
    return found


def _use_wal(database: SqliteDatabase, new: bool, patience: float | None) -> None:
    if new:
        database.retried(database.use_wal, patience=patience)
        return
    # A copy of a store may have lost the mode; where it cannot be set now the store works all the same.
    with contextlib.suppress(StoreReadOnly, StoreUnavailable):
        database.use_wal()


def _missing(database: Database) -> StoreNotFound:
    url = database.url
    hidden = ", with its password in the URL" if url.secrets else ""
    named = with_options(url) if url.dialect == "sqlite" else url.redacted
    command = f"penstock store init --url {shlex.quote(named)}"
    return StoreNotFound(f"there is no store at {url}: make one with `{command}`{hidden}")


def _identity(tx: Transaction, database: Database) -> StoreIdentity | None:
    """Which store is there; None when there is none."""
    _require_trusted_owner(tx, database)
    if not tx.one("store_exists", **_named_schema(database)).found:
        return None
    row = tx.one("read_store")
    if row is None:
        raise StoreError(
            f"{database.url} has a store's tables and no identity: it is damaged; restore a backup"
        )
    if row.version > VERSION:
        raise StoreTooNew(
            f"{database.url} has schema version {row.version}, this Penstock knows {VERSION}: upgrade Penstock",
            found=row.version,
            known=VERSION,
        )
    return StoreIdentity(row.uuid, row.version)


def _require_trusted_owner(tx: Transaction, database: Database) -> None:
    """Refuse a schema that a stranger made first: whoever owns it can run code with the rights of whoever uses the store."""
    if database.dialect != "postgres":
        return
    trusted = database.url.options.get("owner", "")
    relations = sorted(own_relations("postgres"))
    found = tx.one("foreign_owner", **_named_schema(database), relations=relations, trusted=trusted)
    if found is None:
        return
    what = (
        f"the schema {database.url.schema}"
        if found.what is None
        else f"{found.what} in the schema {database.url.schema}"
    )
    raise StoreUnsafe(
        f"{database.url}: {what} belongs to the role {in_quotes(found.owner)}, which could run code with the rights of whoever uses the "
        f"store. Name another schema, or write owner={quote(found.owner, safe='')} in the URL if that role may",
        condition="STORE_UNSAFE.SCHEMA_OWNER",
        schema=database.url.options["schema"],
        owner=found.owner,
    )


def _named_schema(database: Database) -> dict[str, Any]:
    return {"schema": database.url.options["schema"]} if database.dialect == "postgres" else {}


def _prepare(tx: Transaction, database: Database) -> StoreIdentity:
    found = _identity(tx, database)
    if found is not None and database.dialect == "postgres":
        # One migration at a time, by a lock that takes a right to the store; two that make a store find each other's tables.
        tx.execute(f"lock table {database.url.schema}.store in exclusive mode")
        found = _identity(tx, database)
    _migrate(tx, database, 0 if found is None else found.version)
    identity = StoreIdentity(str(uuid.uuid4()) if found is None else found.uuid, VERSION)
    if found is None:
        tx.run("insert_store", uuid=identity.uuid, version=VERSION, now=tx.now())
    else:
        tx.run("set_version", version=VERSION)
    return identity


def _migrate(tx: Transaction, database: Database, version: int) -> None:
    if database.dialect == "postgres" and not tx.one("schema_exists", **_named_schema(database)).found:
        tx.execute(f"create schema {database.url.schema}")
    for target, script in migrations(database.dialect).items():
        if target > version:
            for statement in _statements(script):
                tx.execute(qualify(statement, database.dialect, database.url.schema))


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; there are semicolons inside triggers, and inside texts."""
    pending = ""
    for part in parse(f"-- name: migration\n{script}")["migration"].split(";"):
        pending += f"{part};"
        if sqlite3.complete_statement(pending):
            if pending.strip(" \n;"):
                yield pending
            pending = ""
