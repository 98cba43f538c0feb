"""The schema's version: create it, bring an older one up to date, refuse a newer one."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from penstock.errors import StoreNotFound, StoreTooNew
from penstock.store.database import Database, Transaction
from penstock.store.postgres import PostgresDatabase
from penstock.store.sqlite import SqliteDatabase
from penstock.store.statements import migrations, parse, qualify
from penstock.store.url import parse_url

VERSION = 1


@dataclass(frozen=True)
class StoreIdentity:
    """Which store this is, wherever it is reached from."""

    uuid: str
    version: int


def open_database(url: str, *, create: bool) -> tuple[Database, StoreIdentity]:
    """Connect to a store's database and see to its schema.

    Raises
    ------
    StoreNotFound
        When there is no store at the URL and ``create`` is False.
    StoreTooNew
        When a newer Penstock made it.
    """
    parsed = parse_url(url)
    database = SqliteDatabase(parsed) if parsed.dialect == "sqlite" else PostgresDatabase(parsed)
    try:
        if not create and not database.exists():
            raise _missing(database)
        identity = _current(database) or database.run(lambda tx: _prepare(tx, database, create), idempotent=True)
    except BaseException:
        database.close()
        raise
    return database, identity


def _missing(database: Database) -> StoreNotFound:
    return StoreNotFound(f"there is no store at {database.url}: make one with `penstock store init`")


def _current(database: Database) -> StoreIdentity | None:
    """The identity of a store that needs nothing done, read without a lock."""
    if isinstance(database, SqliteDatabase) and not database.exists():
        return None
    return database.run(lambda tx: _identity(tx, database), write=False)


def _identity(tx: Transaction, database: Database) -> StoreIdentity | None:
    if not tx.one("store_exists", **_named_schema(database)).found:
        return None
    row = tx.one("read_store")
    return StoreIdentity(row.uuid, row.version) if row is not None and row.version == VERSION else None


def _named_schema(database: Database) -> dict[str, Any]:
    return {"schema": database.url.options["schema"]} if database.dialect == "postgres" else {}


def _prepare(tx: Transaction, database: Database, create: bool) -> StoreIdentity:
    if database.dialect == "postgres":
        # One migration at a time; the lock goes with the transaction.
        tx.execute("select pg_advisory_xact_lock(7235416081274633)")
    found = bool(tx.one("store_exists", **_named_schema(database)).found)
    if not found and not create:
        raise _missing(database)
    row = tx.one("read_store") if found else None
    version = row.version if row else 0
    if version > VERSION:
        raise StoreTooNew(
            f"{database.url} has schema version {version}, this Penstock knows {VERSION}: upgrade Penstock",
            found=version,
            known=VERSION,
        )
    _migrate(tx, database, version)
    if row is None:
        row_uuid = str(uuid.uuid4())
        tx.run("insert_store", uuid=row_uuid, version=VERSION, now=tx.now())
        return StoreIdentity(row_uuid, VERSION)
    tx.run("set_version", version=VERSION)
    return StoreIdentity(row.uuid, VERSION)


def _migrate(tx: Transaction, database: Database, version: int) -> None:
    if database.dialect == "postgres" and not tx.one("schema_exists", **_named_schema(database)).found:
        tx.execute(f"create schema {database.url.schema}")
    for target, script in migrations(database.dialect).items():
        if target > version:
            for statement in _statements(script):
                tx.execute(qualify(statement, database.url.schema))


def _statements(script: str) -> list[str]:
    text = parse(f"-- name: migration\n{script}")["migration"]
    return [statement for statement in text.split(";") if statement.strip()]
