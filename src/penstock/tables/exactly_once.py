"""``exactly_once``: a ledger for user-written ``foreachBatch`` functions, in the database that they write
to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.arguments import refusal
from penstock.errors import CheckpointMismatchError, CheckpointRewoundError, InvalidNameError
from penstock.json_text import Json
from penstock.queue.checks import check_name
from penstock.store.postgres.session import LOCK_WAIT
from penstock.tables.connections import CallerConnection, wrap_connection
from penstock.tables.names import quoted

LEDGER = "penstock_exactly_once"
# Creation is serialised: of two concurrent CREATE TABLEs one fails.
_LOCK = 7235416081274634
_PAUSE_SECONDS = 0.05
# One row for each sink and app: its newest micro-batch. A replay never repeats an earlier one.
_CREATE = """
create table if not exists {ledger} (
    sink varchar(255) not null,
    app_id varchar(255) not null,
    batch_id bigint not null,
    query_id varchar(255),
    committed_at timestamp default current_timestamp not null,
    primary key (sink, app_id)
)
"""
# A ledger of an earlier version has a row for each micro-batch, and no query_id.
_ADD_QUERY = "alter table {ledger} add column query_id varchar(255)"
_KEEP_NEWEST = (
    "delete from {ledger} as one where exists (select 1 from {ledger} as later where later.sink = one.sink "
    "and later.app_id = one.app_id and later.batch_id > one.batch_id)"
)
_IS_CURRENT = f"select count(*) from pragma_table_info('{LEDGER}') where name = 'query_id'"
_IS_CURRENT_IN = (
    "select count(*) from pg_attribute as a join pg_class as c on c.oid = a.attrelid "
    "join pg_namespace as n on n.oid = c.relnamespace "
    f"where n.nspname = :schema and c.relname = '{LEDGER}' and a.attname = 'query_id'"
)
# By the caller's search path: the existing ledger, and the schema in which it would be created.
_LOCATE = f"select cast(pg_catalog.to_regclass('{LEDGER}') as pg_catalog.oid), pg_catalog.current_schema()"
_SCHEMA_OF = (
    "select n.nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace "
    "where c.oid = cast(:oid as oid)"
)
_OF_APP = "sink = :sink and app_id = :app_id"
_NEWEST = f"select batch_id, query_id from {{ledger}} where {_OF_APP} order by batch_id desc limit 1"
_FIRST = (
    "insert into {ledger} (sink, app_id, batch_id, query_id) values (:sink, :app_id, :batch_id, :query_id) "
    "on conflict do nothing"
)
# By compare-and-set, which waits for another driver of the query, and then sees what it has committed.
_NEXT = (
    "update {ledger} set batch_id = :batch_id, query_id = coalesce(:query_id, query_id), "
    f"committed_at = current_timestamp where {_OF_APP} and batch_id = :newest"
)


@dataclass(frozen=True)
class Batch:
    """A micro-batch in its transaction, truthy when it is new."""

    sink: str
    app_id: str
    batch_id: int
    new: bool
    """False when it was committed before: skip its statements."""

    def __bool__(self) -> bool:
        return self.new


@dataclass(frozen=True)
class _Entry:
    """The ledger row of a micro-batch."""

    sink: str
    app_id: str
    batch_id: int
    query_id: str | None

    def app(self) -> dict[str, str]:
        return {"sink": self.sink, "app_id": self.app_id}

    def fields(self) -> dict[str, object]:
        return {**self.app(), "batch_id": self.batch_id, "query_id": self.query_id}


@contextmanager
def exactly_once(
    connection: object, sink: str, app_id: str, batch_id: int, *, query_id: str | None = None
) -> Iterator[Batch]:
    """Commit the statements of a micro-batch together with its ledger row, once.

    The ledger is a table ``penstock_exactly_once`` in the connection's database, created on first use. It has
    the newest micro-batch of each sink and app.

    Parameters
    ----------
    connection
        An open connection of psycopg 3, of sqlite3, or of SQLAlchemy to PostgreSQL or SQLite. The transaction
        commits when the block ends, and rolls back when it raises; a transaction that is already open is the
        caller's to commit.
    sink
        What is written: a name for the ledger, such as the table's.
    app_id
        The query's identity: the same in each run with one checkpoint, another one with another checkpoint.
    batch_id
        The micro-batch's number, which Spark passes to ``foreachBatch``. Enter the block for every
        micro-batch, also for an empty one. The first one of an app may have any number.
    query_id
        The query's id, which Spark keeps in the checkpoint; inside the function it is Spark's local property
        ``sql.streaming.queryId``. With it, a new checkpoint under the ``app_id`` of another is refused even
        when the other has committed only micro-batch 0.

    Returns
    -------
    Batch
        Its ``new`` is False when the micro-batch was committed before. Spark still requires its rows to be
        computed where the query keeps state: run the action before the block, or write the rows to the
        ``noop`` format.

    Raises
    ------
    CheckpointRewoundError
        When the micro-batch comes before the newest one: the checkpoint is an old copy, or a new one.
    CheckpointMismatchError
        When micro-batches are missing between the newest one and this one, or another query has used the
        ``app_id``.
    InvalidInputError
        When an argument has the wrong type.
    """
    check_name("sink", sink)
    check_name("app", app_id)
    if query_id is not None:
        check_name("query", query_id)
    if type(batch_id) is not int or batch_id < 0:
        raise refusal("batch_id", batch_id, "the number of a micro-batch, from 0")
    adapted = wrap_connection(connection)
    with adapted.transaction():
        new = _enter(adapted, _Entry(sink, app_id, batch_id, query_id))
        yield Batch(sink, app_id, batch_id, new)


def _enter(connection: CallerConnection, entry: _Entry) -> bool:
    """Enter the micro-batch; False when it is the newest one already."""
    located = connection.row(_LOCATE) if connection.dialect == "postgres" else None
    with connection.trusted_search_path():
        ledger = _Ledger(connection, None if located is None else _schema(connection, *located))
        ledger.ensure_exists()
        return ledger.enter(entry)


def _schema(connection: CallerConnection, oid: int | None, first: str | None) -> str:
    """Return the schema of the ledger, by default the first one of the search path."""
    row = None if oid is None else connection.row(_SCHEMA_OF, oid=oid)
    schema = first if row is None else str(row[0])
    if schema is None:
        raise InvalidNameError(
            "the connection's search path has no schema for the ledger of exactly_once: set one, as in "
            "`set search_path to orders`"
        )
    return schema


def _identifier(name: str) -> str:
    """Quote a name, escaping a colon, which would be read as a parameter."""
    if ":" not in name:
        return quoted(name)
    return "U&" + quoted(name.replace("\\", "\\\\").replace(":", "\\003A"))


@dataclass(frozen=True)
class _Ledger:
    """The ledger table, accessed through the caller's connection."""

    connection: CallerConnection
    schema: str | None
    """None in SQLite."""

    @property
    def name(self) -> str:
        return LEDGER if self.schema is None else f"{_identifier(self.schema)}.{LEDGER}"

    def enter(self, entry: _Entry) -> bool:
        while True:
            newest = self._newest(entry)
            if newest is None:
                entered = self._change(_FIRST, **entry.fields())
            else:
                _require_next(entry, *newest)
                if newest[0] == entry.batch_id:
                    return False
                entered = self._change(_NEXT, newest=newest[0], **entry.fields())
            # When nothing was entered, another driver of the query was faster: read its entry.
            if entered:
                return True

    def _newest(self, entry: _Entry) -> tuple[int, str | None] | None:
        """Return the newest micro-batch of the sink and app, and its query."""
        row = self.connection.row(_NEWEST.format(ledger=self.name), **entry.app())
        return None if row is None else (row[0], row[1])

    def ensure_exists(self) -> None:
        if self._is_current():
            return
        if self.schema is not None:
            self._wait_for_other_creators()
        self._change(_CREATE)
        if not self._is_current():
            self._change(_ADD_QUERY)
            self._change(_KEEP_NEWEST)

    def _wait_for_other_creators(self) -> None:
        """Take the creation lock. Any role that may connect can hold it, so the wait has a limit."""
        deadline = time.monotonic() + LOCK_WAIT
        while time.monotonic() < deadline:
            row = self.connection.row("select pg_try_advisory_xact_lock(:lock)", lock=_LOCK)
            if row is not None and row[0]:
                return
            time.sleep(_PAUSE_SECONDS)

    def _is_current(self) -> bool:
        row = (
            self.connection.row(_IS_CURRENT)
            if self.schema is None
            else self.connection.row(_IS_CURRENT_IN, schema=self.schema)
        )
        return row is not None and row[0] > 0

    def _change(self, text: str, **parameters: object) -> int:
        return self.connection.change(text.format(ledger=self.name), **parameters)


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
            "the newest checkpoint; a new one needs an app_id of its own",
            **parameters,
        )
    if entry.batch_id > newest + 1:
        raise CheckpointMismatchError(
            f"{position} and its checkpoint at {entry.batch_id}: the micro-batches between are missing. Was "
            "the database restored alone, or the block left out for empty micro-batches? A new app_id "
            "continues without them",
            condition="CHECKPOINT_MISMATCH.BATCHES_MISSING",
            **parameters,
        )
