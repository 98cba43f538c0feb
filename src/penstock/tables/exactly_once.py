"""``ps.exactly_once``: for people who write their own ``foreachBatch``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.arguments import refusal
from penstock.errors import CheckpointMismatch, CheckpointRewound, InvalidName
from penstock.queue.checks import check_name
from penstock.store.postgres.session import LOCK_WAIT
from penstock.tables.connections import Borrowed, borrowed
from penstock.tables.names import quoted

LEDGER = "penstock_exactly_once"
# One maker at a time: two that make a table at once make one of them fail.
_LOCK = 7235416081274634
_PAUSE = 0.05
# One row for each sink and app: its newest micro-batch. A replay repeats no earlier one.
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
# A table that an earlier version made has a row for each micro-batch, and no query_id.
_ADD_QUERY = "alter table {ledger} add column query_id varchar(255)"
_KEEP_NEWEST = (
    "delete from {ledger} as one where exists (select 1 from {ledger} as later where later.sink = one.sink "
    "and later.app_id = one.app_id and later.batch_id > one.batch_id)"
)
_IS_MADE = f"select count(*) from pragma_table_info('{LEDGER}') where name = 'query_id'"
_IS_MADE_IN = (
    "select count(*) from pg_attribute as a join pg_class as c on c.oid = a.attrelid join pg_namespace as n on n.oid = c.relnamespace "
    f"where n.nspname = :schema and c.relname = '{LEDGER}' and a.attname = 'query_id'"
)
# By the caller's search path: where the ledger is, else where it is to be.
_FOUND = f"select cast(pg_catalog.to_regclass('{LEDGER}') as pg_catalog.oid), pg_catalog.current_schema()"
_SCHEMA_OF = "select n.nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace where c.oid = cast(:oid as oid)"
_OF_APP = "sink = :sink and app_id = :app_id"
_NEWEST = f"select batch_id, query_id from {{ledger}} where {_OF_APP} order by batch_id desc limit 1"
_FIRST = (
    "insert into {ledger} (sink, app_id, batch_id, query_id) values (:sink, :app_id, :batch_id, :query_id) "
    "on conflict do nothing"
)
# By compare-and-set, which waits for another driver of the query, and sees what that has committed.
_NEXT = (
    "update {ledger} set batch_id = :batch_id, query_id = coalesce(:query_id, query_id), committed_at = current_timestamp "
    f"where {_OF_APP} and batch_id = :newest"
)


@dataclass(frozen=True)
class Batch:
    """A micro-batch in its transaction; it is true when it is new."""

    sink: str
    app_id: str
    batch_id: int
    new: bool
    """False when it was committed before, and its statements are to be skipped."""

    def __bool__(self) -> bool:
        return self.new


@dataclass(frozen=True)
class _Entry:
    """What the ledger is to have of a micro-batch."""

    sink: str
    app_id: str
    batch_id: int
    query_id: str | None

    def app(self) -> dict[str, str]:
        return {"sink": self.sink, "app_id": self.app_id}

    def fields(self) -> dict[str, Any]:
        return {**self.app(), "batch_id": self.batch_id, "query_id": self.query_id}


@contextmanager
def exactly_once(
    connection: Any, sink: str, app_id: str, batch_id: int, *, query_id: str | None = None
) -> Iterator[Batch]:
    """Put the statements of a micro-batch and its ledger row into one transaction, once.

    The ledger is a table ``penstock_exactly_once`` in the connection's database, made when it is first used. It has the newest
    micro-batch of each sink and app.

    Parameters
    ----------
    connection
        An open connection of psycopg 3, of sqlite3, or of SQLAlchemy to PostgreSQL or SQLite. The transaction is committed when
        the block ends, and rolled back when it raises; one that is open already is the caller's to commit.
    sink
        What is written: a name for the ledger, such as the table's.
    app_id
        The query's identity: the same in each run with one checkpoint, another one with another checkpoint.
    batch_id
        The micro-batch's number, as ``foreachBatch`` is told it. Enter the block for every micro-batch, also for an empty one.
        The first one of an app may have any number.
    query_id
        The query's id, which Spark keeps in the checkpoint; inside the function it is Spark's local property
        ``sql.streaming.queryId``. With it, a new checkpoint under the ``app_id`` of another is refused also where the other one has
        come as far as micro-batch 0 only.

    Returns
    -------
    Batch
        Its ``new`` is False when the micro-batch was committed before. Spark wants its rows to be computed all the same where
        the query keeps state: run the action before the block, or write the rows to the ``noop`` format.

    Raises
    ------
    CheckpointRewound
        When the micro-batch comes before the newest one: the checkpoint is an old copy, or a new one.
    CheckpointMismatch
        When micro-batches are missing between the newest one and this one, or another query has used the ``app_id``.
    InvalidInput
        When an argument is of another kind.
    """
    check_name("sink", sink)
    check_name("app", app_id)
    if query_id is not None:
        check_name("query", query_id)
    if type(batch_id) is not int or batch_id < 0:
        raise refusal("batch_id", batch_id, "the number of a micro-batch, from 0")
    inside = borrowed(connection)
    with inside.transaction():
        new = _enter(inside, _Entry(sink, app_id, batch_id, query_id))
        yield Batch(sink, app_id, batch_id, new)


def _enter(inside: Borrowed, entry: _Entry) -> bool:
    """Enter the micro-batch; False when it is the newest one already."""
    found = inside.row(_FOUND) if inside.dialect == "postgres" else None
    with inside.looking_up_safely():
        ledger = _Ledger(inside, None if found is None else _schema(inside, *found))
        ledger.make()
        return ledger.enter(entry)


def _schema(inside: Borrowed, oid: int | None, first: str | None) -> str:
    """The schema of the ledger, which else is to be in the first one of the search path."""
    row = None if oid is None else inside.row(_SCHEMA_OF, oid=oid)
    schema = first if row is None else str(row[0])
    if schema is None:
        raise InvalidName(
            "the connection's search path has no schema for the ledger of exactly_once: set one, as in `set search_path to orders`"
        )
    return schema


def _identifier(name: str) -> str:
    """The name in quotes, without what would be taken for a parameter."""
    if ":" not in name:
        return quoted(name)
    return "U&" + quoted(name.replace("\\", "\\\\").replace(":", "\\003A"))


@dataclass(frozen=True)
class _Ledger:
    """The ledger of a caller's connection."""

    inside: Borrowed
    schema: str | None
    """None in SQLite."""

    @property
    def name(self) -> str:
        """As SQL has it."""
        return LEDGER if self.schema is None else f"{_identifier(self.schema)}.{LEDGER}"

    def enter(self, entry: _Entry) -> bool:
        while True:
            newest = _newest(self, entry)
            if newest is None:
                entered = self._change(_FIRST, **entry.fields())
            else:
                _require_fitting(entry, *newest)
                if newest[0] == entry.batch_id:
                    return False
                entered = self._change(_NEXT, newest=newest[0], **entry.fields())
            # Where nothing was entered, another driver of the query was faster: look again.
            if entered:
                return True

    def make(self) -> None:
        if self._is_made():
            return
        if self.schema is not None:
            self._wait_for_others()
        self._change(_CREATE)
        if not self._is_made():
            self._change(_ADD_QUERY)
            self._change(_KEEP_NEWEST)

    def _wait_for_others(self) -> None:
        """Let whoever else makes the ledger be done. Any role that may connect can hold such a lock, so it is not waited for for ever."""
        deadline = time.monotonic() + LOCK_WAIT
        while time.monotonic() < deadline:
            row = self.inside.row("select pg_try_advisory_xact_lock(:lock)", lock=_LOCK)
            if row is not None and row[0]:
                return
            time.sleep(_PAUSE)

    def _is_made(self) -> bool:
        row = (
            self.inside.row(_IS_MADE)
            if self.schema is None
            else self.inside.row(_IS_MADE_IN, schema=self.schema)
        )
        return row is not None and row[0] > 0

    def _change(self, text: str, **parameters: Any) -> int:
        return self.inside.change(text.format(ledger=self.name), **parameters)


def _newest(ledger: _Ledger, entry: _Entry) -> tuple[int, str | None] | None:
    """The newest micro-batch of the sink and app, and its query."""
    row = ledger.inside.row(_NEWEST.format(ledger=ledger.name), **entry.app())
    return None if row is None else (row[0], row[1])


def _require_fitting(entry: _Entry, newest: int, query_id: str | None) -> None:
    """Refuse what is neither the newest micro-batch nor the next one."""
    parameters: dict[str, Any] = {"app_id": entry.app_id, "batch_id": entry.batch_id, "last": newest}
    known = f"app {entry.app_id!r} is at micro-batch {newest} in {entry.sink}"
    if None not in (query_id, entry.query_id) and query_id != entry.query_id:
        raise CheckpointMismatch(
            f"{known}, which another query wrote, and this is micro-batch {entry.batch_id} of a query with another checkpoint: give "
            "each checkpoint an app_id of its own",
            condition="CHECKPOINT_MISMATCH.OTHER_QUERY",
            **parameters,
        )
    if entry.batch_id < newest:
        raise CheckpointRewound(
            f"{known} and its checkpoint is at {entry.batch_id}: it is an old copy, or a new checkpoint. Use the newest checkpoint; a "
            "new one needs an app_id of its own",
            **parameters,
        )
    if entry.batch_id > newest + 1:
        raise CheckpointMismatch(
            f"{known} and its checkpoint is at {entry.batch_id}: what lies between is missing. Was the database restored alone, or "
            "the block left out for empty micro-batches? A new app_id continues without the missing ones",
            condition="CHECKPOINT_MISMATCH.BATCHES_MISSING",
            **parameters,
        )
