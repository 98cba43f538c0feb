"""``ps.exactly_once``: for people who write their own ``foreachBatch``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.errors import CheckpointRewound
from penstock.kinds import refusal
from penstock.queue.names import check_name
from penstock.store.ledger import KEEP
from penstock.tables.connections import Borrowed, borrowed

LEDGER = "penstock_exactly_once"
# One maker at a time: two that make a table at once make one of them fail.
_LOCK = 7235416081274634
_CREATE = f"""
create table if not exists {LEDGER} (
    sink varchar(255) not null,
    app_id varchar(255) not null,
    batch_id bigint not null,
    committed_at timestamp default current_timestamp not null,
    primary key (sink, app_id, batch_id)
)
"""
_ENTER = (
    f"insert into {LEDGER} (sink, app_id, batch_id) values (:sink, :app_id, :batch_id) on conflict do nothing"
)
_NEWEST = f"select max(batch_id) from {LEDGER} where sink = :sink and app_id = :app_id"
_PRUNE = f"delete from {LEDGER} where sink = :sink and app_id = :app_id and batch_id < :before"


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


@contextmanager
def exactly_once(connection: Any, sink: str, app_id: str, batch_id: int) -> Iterator[Batch]:
    """Put the statements of a micro-batch and its ledger row into one transaction, once.

    The ledger is a table ``penstock_exactly_once`` in the connection's database, made when it is first used.

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
        The micro-batch's number, as ``foreachBatch`` is told it.

    Returns
    -------
    Batch
        Its ``new`` is False when the micro-batch was committed before. Spark wants its rows to be computed all the same where
        the query keeps state: run the action before the block, or write the rows to the ``noop`` format.

    Raises
    ------
    CheckpointRewound
        When the micro-batch is so old that the ledger may have forgotten it (1,000 are remembered).
    InvalidInput
        When an argument is of another kind.
    """
    check_name("sink", sink)
    check_name("app", app_id)
    if type(batch_id) is not int or batch_id < 0:
        raise refusal("batch_id", batch_id, "the number of a micro-batch, from 0")
    inside = borrowed(connection)
    with inside.transaction():
        yield Batch(sink, app_id, batch_id, _enter(inside, sink, app_id, batch_id))


def _enter(inside: Borrowed, sink: str, app_id: str, batch_id: int) -> bool:
    _make_ledger(inside)
    newest = inside.first(_NEWEST, sink=sink, app_id=app_id)
    if newest is not None and newest > batch_id + KEEP:
        raise CheckpointRewound(
            f"app {app_id!r} is at micro-batch {newest} in {sink} and its checkpoint at {batch_id}, further back than the ledger "
            "remembers: it is an old copy; use the newest one",
            app_id=app_id,
            batch_id=batch_id,
            last=newest,
        )
    if not inside.change(_ENTER, sink=sink, app_id=app_id, batch_id=batch_id):
        return False
    inside.change(_PRUNE, sink=sink, app_id=app_id, before=batch_id - KEEP)
    return True


def _make_ledger(inside: Borrowed) -> None:
    if inside.dialect == "postgres":
        if inside.first(f"select count(to_regclass('{LEDGER}'))"):
            return
        inside.first("select count(pg_advisory_xact_lock(:lock))", lock=_LOCK)
    inside.change(_CREATE)
