"""``exactly_once``: a ledger for user-written ``foreachBatch`` functions, in the database that they write to
and through their own connection (psycopg 3, sqlite3 or SQLAlchemy).
"""

from __future__ import annotations

import sqlite3
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.arguments import refusal
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    InvalidInputError,
    InvalidNameError,
    StoreUnsafeError,
)
from penstock.json_text import Json
from penstock.queue.checks import check_name
from penstock.store.postgres.session import DEFAULT_LOCK_WAIT, SEARCH_PATH
from penstock.store.postgres.trusted_owners import find_foreign_owner
from penstock.store.statements import bind
from penstock.tables.names import quoted

if TYPE_CHECKING:
    import psycopg
    import sqlalchemy
    from sqlalchemy import CursorResult

_SET_SEARCH_PATH = "select pg_catalog.set_config('search_path', :path, true)"
_SUPPORTED_CONNECTIONS = (
    "an open connection of psycopg 3, of sqlite3, or of SQLAlchemy to PostgreSQL or SQLite"
)
LEDGER = "penstock_exactly_once"
# Advisory lock that serializes creation, since one of two concurrent CREATE TABLE statements fails.
CREATION_LOCK = 7235416081274634
_LOCK_RETRY_SECONDS = 0.05
# One row for each sink and app, with its newest micro-batch: Spark never replays an earlier one.
CREATE = """
create table if not exists {ledger} (
    sink varchar(255) not null,
    app_id varchar(255) not null,
    batch_id bigint not null,
    query_id varchar(255),
    committed_at timestamp default current_timestamp not null,
    primary key (sink, app_id)
)
"""
# Finds the existing ledger in the caller's search path, and the schema in which it would be created.
_LOCATE_LEDGER = (
    f"select cast(pg_catalog.to_regclass('{LEDGER}') as pg_catalog.oid), pg_catalog.current_schema()"
)
_SELECT_LEDGER_SCHEMA = (
    "select n.nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace "
    "where c.oid = cast(:oid as oid)"
)
_SAME_APP = "sink = :sink and app_id = :app_id"
_SELECT_NEWEST = f"select batch_id, query_id from {{ledger}} where {_SAME_APP}"
_INSERT_FIRST = (
    "insert into {ledger} (sink, app_id, batch_id, query_id) values (:sink, :app_id, :batch_id, :query_id) "
    "on conflict do nothing"
)
# Compare-and-set: it waits for the transaction of another driver of the query, and then sees its commit.
_UPDATE_TO_NEXT = (
    "update {ledger} set batch_id = :batch_id, query_id = coalesce(:query_id, query_id), "
    f"committed_at = current_timestamp where {_SAME_APP} and batch_id = :newest"
)


@dataclass(frozen=True)
class Batch:
    """A micro-batch inside its transaction; true if it is new."""

    sink: str
    app_id: str
    batch_id: int
    new: bool
    """False if the micro-batch was committed before: skip its statements."""

    def __bool__(self) -> bool:
        return self.new


@dataclass(frozen=True)
class _Entry:
    sink: str
    app_id: str
    batch_id: int
    query_id: str | None

    def app(self) -> dict[str, str]:
        return {"sink": self.sink, "app_id": self.app_id}


@contextmanager
def exactly_once(
    connection: object,
    sink: str,
    app_id: str,
    batch_id: int,
    *,
    query_id: str | None = None,
    new_sink: bool = False,
    ledger_owner: str | None = None,
) -> Iterator[Batch]:
    """Commit the statements of a micro-batch together with its ledger row, once.

    The ledger is a table ``penstock_exactly_once`` in the connection's database, created on first use. It
    records the newest micro-batch of each sink and app.

    Parameters
    ----------
    connection
        An open connection of psycopg 3, of sqlite3, or of SQLAlchemy to PostgreSQL or SQLite. The transaction
        commits when the block ends, and rolls back when it raises; a transaction that is already open is the
        caller's to commit.
    sink
        The sink's name in the ledger, such as the name of the table that is written.
    app_id
        The query's identity: the same in all runs with one checkpoint, and different for each checkpoint.
    batch_id
        The micro-batch's number, which Spark passes to ``foreachBatch``. Enter the block for every
        micro-batch, including empty ones.
    query_id
        The query's id, which Spark keeps in the checkpoint; inside the function it is Spark's local property
        ``sql.streaming.queryId``. With it, a new checkpoint with another checkpoint's ``app_id`` is refused
        even if the other one has committed only micro-batch 0.
    new_sink
        Whether the first micro-batch of the app may have a number other than 0: for a query that has run
        before without this function, or under another ``app_id``.
    ledger_owner
        In PostgreSQL, a role that may own the ledger and its schema, besides the connection's own role,
        superusers and the database's owner. The owner's triggers run with the rights of the role that writes.

    Returns
    -------
    Batch
        Its ``new`` is False when the micro-batch was committed before. If the query keeps state, Spark still
        requires the rows to be computed: run the action before the block, or write the rows to the ``noop``
        format.

    Raises
    ------
    CheckpointRewoundError
        When the micro-batch is earlier than the newest one: the checkpoint is an old copy, or a new one.
    CheckpointMismatchError
        When micro-batches before this one are missing, or another query has used the ``app_id``.
    InvalidInputError
        When an argument has the wrong type.
    StoreUnsafeError
        When the ledger or its schema belongs to a role that is not trusted.
    """
    check_name("sink", sink)
    check_name("app", app_id)
    if query_id is not None:
        check_name("query", query_id)
    if ledger_owner is not None:
        check_name("owner", ledger_owner)
    if type(batch_id) is not int or batch_id < 0:
        raise refusal("batch_id", batch_id, "the number of a micro-batch, from 0")
    wrapped = wrap_connection(connection)
    with wrapped.transaction():
        entry = _Entry(sink, app_id, batch_id, query_id)
        new = _record_batch(wrapped, entry, new_sink=new_sink, ledger_owner=ledger_owner)
        yield Batch(sink, app_id, batch_id, new)


def _record_batch(
    connection: CallerConnection, entry: _Entry, *, new_sink: bool, ledger_owner: str | None
) -> bool:
    """Record the micro-batch in the ledger; return False if it is already there."""
    ledger_location = connection.row(_LOCATE_LEDGER) if connection.dialect == "postgres" else None
    with connection.trusted_search_path():
        if ledger_location is None:
            ledger = Ledger(connection, LEDGER)
            ledger.create()
        else:
            oid, current_schema = ledger_location
            schema = _ledger_schema(connection, oid, current_schema)
            _require_trusted_owner(connection, schema, ledger_owner)
            ledger = Ledger(connection, _qualified_ledger_name(schema))
            if oid is None:
                _wait_for_other_creators(connection)
                ledger.create()
                # Another session may have created the ledger during the wait.
                _require_trusted_owner(connection, schema, ledger_owner)
        return ledger.enter(entry, new_sink=new_sink)


def _ledger_schema(connection: CallerConnection, oid: int | None, current_schema: str | None) -> str:
    """Return the schema of an existing ledger, or else the first schema of the search path."""
    row = None if oid is None else connection.row(_SELECT_LEDGER_SCHEMA, oid=oid)
    schema = current_schema if row is None else str(row[0])
    if schema is None:
        raise InvalidNameError(
            "the connection's search path has no schema for the ledger of exactly_once: set one, as in "
            "`set search_path to orders`",
            condition="INVALID_NAME.NO_SCHEMA",
        )
    return schema


def _require_trusted_owner(connection: CallerConnection, schema: str, ledger_owner: str | None) -> None:
    trusted = () if ledger_owner is None else (ledger_owner,)
    foreign = find_foreign_owner(connection.row, schema, [LEDGER], trusted=trusted)
    if foreign is not None:
        raise StoreUnsafeError(
            f"the ledger of exactly_once: {foreign}. Set another search_path, or pass "
            f"ledger_owner={foreign.owner!r} to trust that role",
            condition="STORE_UNSAFE.LEDGER_OWNER",
            schema=schema,
            owner=foreign.owner,
        )


def _qualified_ledger_name(schema: str) -> str:
    if ":" not in schema:
        return f"{quoted(schema)}.{LEDGER}"
    # A colon would start a parameter, so write it as a Unicode escape.
    escaped = quoted(schema.replace("\\", "\\\\").replace(":", "\\003A"))
    return f"U&{escaped}.{LEDGER}"


def _wait_for_other_creators(connection: CallerConnection) -> None:
    """Acquire the creation lock, with a timeout, because any role that may connect can hold it."""
    deadline = time.monotonic() + DEFAULT_LOCK_WAIT
    while time.monotonic() < deadline:
        row = connection.row("select pg_try_advisory_xact_lock(:lock)", lock=CREATION_LOCK)
        if row is not None and row[0]:
            return
        time.sleep(_LOCK_RETRY_SECONDS)


@dataclass(frozen=True)
class Ledger:
    """The ledger table, accessed through the caller's connection."""

    connection: CallerConnection
    name: str

    def create(self) -> None:
        self._change(CREATE)

    def enter(self, entry: _Entry, *, new_sink: bool) -> bool:
        while True:
            newest = self.newest(entry)
            if newest is None:
                if entry.batch_id and not new_sink:
                    raise _batches_missing_error(entry)
                changed_rows = self._change(_INSERT_FIRST, **vars(entry))
            else:
                _require_next(entry, *newest)
                if newest[0] == entry.batch_id:
                    return False
                changed_rows = self._change(_UPDATE_TO_NEXT, newest=newest[0], **vars(entry))
            # If no row changed, another driver of the query was faster: read its entry.
            if changed_rows:
                return True

    def newest(self, entry: _Entry) -> tuple[int, str | None] | None:
        """Return the newest micro-batch of the sink and app, and its query."""
        row = self.connection.row(_SELECT_NEWEST.format(ledger=self.name), **entry.app())
        return None if row is None else (row[0], row[1])

    def _change(self, text: str, **parameters: object) -> int:
        return self.connection.change(text.format(ledger=self.name), **parameters)


def _batches_missing_error(entry: _Entry) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"app {entry.app_id!r} has no micro-batches in {entry.sink}, and its checkpoint is at "
        f"{entry.batch_id}: was only the database restored? If the query uses this app_id for the first "
        "time, pass new_sink=True",
        condition="CHECKPOINT_MISMATCH.BATCHES_MISSING",
        app_id=entry.app_id,
        batch_id=entry.batch_id,
        last=None,
    )


def _require_next(entry: _Entry, newest: int, query_id: str | None) -> None:
    """Refuse a micro-batch that is neither the newest nor the next one."""
    parameters: Json = {"app_id": entry.app_id, "batch_id": entry.batch_id, "last": newest}
    position = f"app {entry.app_id!r} is at micro-batch {newest} in {entry.sink}"
    if None not in (query_id, entry.query_id) and query_id != entry.query_id:
        raise CheckpointMismatchError(
            f"{position}, which another query wrote, and this is micro-batch {entry.batch_id} of a query "
            "with another checkpoint: give each checkpoint its own app_id",
            condition="CHECKPOINT_MISMATCH.OTHER_QUERY",
            **parameters,
        )
    if entry.batch_id < newest:
        raise CheckpointRewoundError(
            f"{position} and its checkpoint at {entry.batch_id}: it is an old copy, or a new checkpoint. Use "
            "the newest checkpoint; a new one needs its own app_id",
            **parameters,
        )
    if entry.batch_id > newest + 1:
        raise CheckpointMismatchError(
            f"{position} and its checkpoint at {entry.batch_id}: the micro-batches between are missing. Was "
            "only the database restored, or the block left out for empty micro-batches? A new app_id with "
            "new_sink=True continues without them",
            condition="CHECKPOINT_MISMATCH.BATCHES_MISSING",
            **parameters,
        )


class CallerConnection(ABC):
    """Adapter for a caller's connection; statements have ``:name`` parameters."""

    dialect: str

    @abstractmethod
    def change(self, text: str, **parameters: object) -> int:
        """Execute a statement and return the number of rows that it changed."""

    @abstractmethod
    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        """Execute a query and return its first row."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """Open a transaction, or a savepoint inside an open one, which the caller commits."""

    @contextmanager
    def trusted_search_path(self) -> Iterator[None]:
        """Use the store's search path inside the block; a rollback also restores the caller's."""
        if self.dialect != "postgres":
            yield
            return
        row = self.row("select pg_catalog.current_setting('search_path')")
        assert row is not None
        self.row(_SET_SEARCH_PATH, path=SEARCH_PATH)
        yield
        self.row(_SET_SEARCH_PATH, path=row[0])


def wrap_connection(connection: object) -> CallerConnection:
    if isinstance(connection, sqlite3.Connection):
        return _Sqlite(connection)
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        return _Psycopg(connection)
    alchemy = sys.modules.get("sqlalchemy")
    if alchemy is not None and isinstance(connection, alchemy.Connection):
        return _SqlAlchemy(connection)
    raise refusal("connection", connection, _SUPPORTED_CONNECTIONS)


class _Sqlite(CallerConnection):
    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def change(self, text: str, **parameters: object) -> int:
        return self._cursor().execute(text, parameters).rowcount

    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        cursor = self._cursor()
        row: Sequence[Any] | None = cursor.execute(text, parameters).fetchone()
        cursor.close()  # a statement with unread rows blocks the commit
        return row

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None  # ignore a row factory of the caller's connection
        return cursor

    @contextmanager
    def transaction(self) -> Iterator[None]:
        is_nested = self._connection.in_transaction
        begin, end, rollback = (
            ("savepoint exactly_once", "release exactly_once", "rollback to exactly_once")
            if is_nested
            else ("begin immediate", "commit", "rollback")
        )
        self._connection.execute(begin)
        try:
            yield
        except BaseException:
            # An error may already have ended the whole transaction.
            if self._connection.in_transaction:
                self._connection.execute(rollback)
                if is_nested:
                    self._connection.execute(end)
            raise
        self._connection.execute(end)


class _Psycopg(CallerConnection):
    dialect = "postgres"

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        self._connection = connection
        # Do not use the connection's cursor class and row factory, which the caller may have changed.
        self._cursor: Cursor[Any] = Cursor(connection, row_factory=tuple_row)

    def change(self, text: str, **parameters: object) -> int:
        return self._cursor.execute(bind(text, self.dialect).encode(), parameters).rowcount

    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        return self._cursor.execute(bind(text, self.dialect).encode(), parameters).fetchone()

    def transaction(self) -> AbstractContextManager[object]:
        return self._connection.transaction()


class _SqlAlchemy(CallerConnection):
    def __init__(self, connection: sqlalchemy.Connection) -> None:
        names = {"postgresql": "postgres", "sqlite": "sqlite"}
        if connection.dialect.name not in names:
            raise InvalidInputError(
                f"connection leads to {connection.dialect.name}, and exactly_once supports PostgreSQL and "
                "SQLite: connect to one of them",
                parameter="connection",
            )
        self.dialect = names[connection.dialect.name]
        self._connection = connection

    def change(self, text: str, **parameters: object) -> int:
        return int(self._execute(text, parameters).rowcount)

    def row(self, text: str, **parameters: object) -> Sequence[Any] | None:
        return self._execute(text, parameters).first()

    def _execute(self, text: str, parameters: dict[str, object]) -> CursorResult[Any]:
        # The caller has imported SQLAlchemy to create the connection.
        return self._connection.execute(sys.modules["sqlalchemy"].text(text), parameters)

    def transaction(self) -> AbstractContextManager[object]:
        is_nested = self._connection.in_transaction()
        return self._connection.begin_nested() if is_nested else self._connection.begin()
