"""Open a store: create its tables, or check that this version of Penstock can read them."""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import uuid

from penstock.errors import (
    StoreError,
    StoreNotFoundError,
    StoreReadOnlyError,
    StoreTooNewError,
    StoreUnavailableError,
)
from penstock.store.database import Database, Transaction
from penstock.store.postgres.connection import CREATED_CONCURRENTLY
from penstock.store.postgres.database import PostgresDatabase
from penstock.store.sqlite.database import SqliteDatabase
from penstock.store.statements import create_statements
from penstock.store.url import parse_url, with_options

log = logging.getLogger("penstock.store")

VERSION = 17
"""The version of the schema in ``sql/*_schema.sql``. Stores of any other version are refused."""
_TRIES = 5

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def open_database(
    url: str, *, create: bool, timeout: float | None = None, keep_journal_mode: bool = False
) -> Database:
    """Connect to a store's database. If it has no store and ``create`` is set, create one.

    ``timeout`` is how many seconds to retry while the database does not answer. ``keep_journal_mode`` is for
    readers that must not change anything: it leaves the journal mode of a SQLite file unchanged.
    """
    parsed = parse_url(url)
    database: Database
    if parsed.dialect == "sqlite":
        database = SqliteDatabase(parsed)
    else:
        database = PostgresDatabase(parsed)
    database.may_create = create
    try:
        database.uuid = _open(database, create, timeout, keep_journal_mode)
    except BaseException:
        database.close()
        raise
    database.may_create = False
    return database


def _open(database: Database, create: bool, timeout: float | None, keep_journal_mode: bool) -> str:
    store_uuid = None
    if database.exists():
        store_uuid = database.run(lambda tx: _store_uuid(tx, database), write=False, timeout=timeout)
    if store_uuid is None and not create:
        raise store_not_found(database)
    if isinstance(database, SqliteDatabase) and not keep_journal_mode:
        _use_wal(database, store_uuid is None, timeout)
    return _create(database, timeout) if store_uuid is None else store_uuid


def _create(database: Database, timeout: float | None) -> str:
    for tries_left in reversed(range(_TRIES)):
        try:
            store_uuid = database.run(
                lambda tx: _create_tables(tx, database), idempotent=True, timeout=timeout
            )
            break
        except StoreError as error:
            if not tries_left or getattr(error.__cause__, "sqlstate", None) not in CREATED_CONCURRENTLY:
                raise
    url = str(database.url)
    log.info(
        "created the store %s",
        url,
        extra={"action": "store_created", "store": url, "version": VERSION},
    )
    return store_uuid


def _create_tables(tx: Transaction, database: Database) -> str:
    existing = _store_uuid(tx, database)
    if existing is not None:
        return existing
    if database.dialect == "postgres" and not tx.one("schema_exists", **_schema_parameter(database)).found:
        tx.execute(f"create schema {database.url.schema}")
    for statement in create_statements(database.dialect, database.url.schema):
        tx.execute(statement)
    store_uuid = str(uuid.uuid4())
    tx.run("insert_store", uuid=store_uuid, version=VERSION, now=tx.now())
    return store_uuid


def _use_wal(database: SqliteDatabase, new: bool, timeout: float | None) -> None:
    if new:
        database.retry(database.use_wal, timeout=timeout)
        return
    # A copy of a store may have lost the journal mode. The store also works if the mode cannot be set now.
    with contextlib.suppress(StoreReadOnlyError, StoreUnavailableError):
        database.use_wal()


def store_not_found(database: Database) -> StoreNotFoundError:
    url = database.url
    password_hint = ", with its password in the URL" if url.secrets else ""
    url_text = with_options(url) if url.dialect == "sqlite" else url.redacted
    command = f"penstock store init --url {shlex.quote(url_text)}"
    return StoreNotFoundError(f"there is no store at {url}: create one with `{command}`{password_hint}")


def _store_uuid(tx: Transaction, database: Database) -> str | None:
    """Return the UUID of the store in the database; None if there is no store."""
    database.require_trusted_owner(tx)
    if not tx.one("store_exists", **_schema_parameter(database)).found:
        return None
    row = tx.one("read_store")
    if row is None:
        raise StoreError(
            f"{database.url} has the tables of a store but no store UUID: the store is damaged; restore a "
            "backup",
            condition="STORE_ERROR.DAMAGED",
        )
    require_version(database, row.version)
    if not _UUID.fullmatch(row.uuid):
        # The UUID is part of the names of objects and locks, so check it.
        raise StoreError(
            f"the store UUID of {database.url} is not valid: the store is damaged; restore a backup",
            condition="STORE_ERROR.DAMAGED",
        )
    return str(row.uuid)


def require_version(database: Database, version: int) -> None:
    """Refuse a store whose schema version this Penstock cannot read."""
    if version > VERSION:
        raise StoreTooNewError(
            f"{database.url} has schema version {version}, and this Penstock reads version {VERSION}: "
            "upgrade Penstock",
            found=version,
            known=VERSION,
        )
    if version < VERSION:
        raise StoreError(
            f"{database.url} has schema version {version}, and this Penstock reads version {VERSION}: use "
            "the Penstock that created the store, or create a new store at another URL",
            condition="STORE_TOO_OLD",
            found=version,
            known=VERSION,
        )


def _schema_parameter(database: Database) -> dict[str, str]:
    return {"schema": database.url.options["schema"]} if database.dialect == "postgres" else {}
