"""Parts of a table, read in the order of its key, each as one transaction sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.feeds.postgres.catalog import Table, Tables
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.key_order import Key, KeyOrder
from penstock.feeds.postgres.pgoutput import Column, Decoder, Integers, Mask, Truncation
from penstock.feeds.postgres.row_messages import qualified, row_messages, source_of
from penstock.feeds.postgres.rows import RowReader
from penstock.feeds.postgres.schema_changes import holds
from penstock.feeds.postgres.server import Connection, Server, first_chunk, run

_HALF = 2**31


@dataclass(frozen=True)
class Visible:
    """Which transactions a snapshot of the database shows: PostgreSQL's ``pg_snapshot``."""

    oldest: int
    """Each earlier transaction has ended."""
    next: int
    """This one and later ones have not begun."""
    running: tuple[int, ...]
    """Those in between that have not ended."""

    def shows(self, transactions: Integers) -> Mask:
        """Return the mask of the transactions that it shows, of committed ones.

        Parameters
        ----------
        transactions
            The lower 32 bits of their ids, as the log has them; all are within 2³¹ of the oldest one.
        """
        low = np.int64(self.oldest & 0xFFFFFFFF)
        distance = (transactions - low + _HALF) % (2 * _HALF) - _HALF
        ids = self.oldest + distance
        found: Mask = (ids < self.next) & ~np.isin(ids, np.array(self.running, np.int64))
        return found


@dataclass(frozen=True)
class Chunk:
    """Rows of a table, those between two keys."""

    table: Table
    """How they were read."""
    rows: pa.RecordBatch | None
    """The rows as inserts, in the order of their keys, and then those of the gaps; None if there are none."""
    keys: Sequence[pa.StringArray]
    """Their keys as text, an array for each column."""
    count: int
    """How many there are without those of the gaps."""
    last: Key | None
    """The key of the last one of these; None if there is none."""
    more: bool
    """Whether there may be rows after it."""
    gaps: Sequence[Key]
    """The keys that were looked for besides; not each has a row."""
    visible: Visible
    """The transactions whose rows they are."""
    position: int
    """A position in the log after all of those."""
    timestamp: int
    """When they were read, by the server's clock, in microseconds since 1970."""


class TableChanged(Exception):
    """A table does not have the form in which it was to be read."""


def require_backfills(server: Server, publication: str) -> None:
    """Refuse a server or a publication whose tables cannot be backfilled.

    Raises
    ------
    FeedUnavailableError
    """
    (now,) = server.fetch("transaction")
    if not now.timeline:
        raise server.unavailable(
            "BACKFILL_ON_STANDBY",
            "the server is a standby, which does not report running transactions: read from the primary, or "
            "start the pump with schema_changes='ignore' (--schema-changes ignore)",
        )
    rows = server.fetch("publication", publication=publication)
    if rows and not rows[0].all_changes:
        raise server.unavailable(
            "PARTLY_PUBLISHED",
            f"the publication {publication!r} does not publish inserts, updates and deletes, so rows of a "
            "table cannot be read while it changes: alter publication … set (publish = 'insert, update, "
            "delete'), or start the pump with schema_changes='ignore' (--schema-changes ignore)",
            publication=publication,
        )


def visible_now(connection: Connection) -> tuple[Visible, int]:
    """Return what a new transaction sees, and the server's time in microseconds since 1970."""
    (row,) = run(connection, "visible")
    return Visible(row.oldest, row.next, tuple(row.running)), row.timestamp


def read_chunk(
    feed: OpenPostgresFeed,
    connection: Connection,
    tables: Tables,
    order: KeyOrder,
    after: Key | None,
    gaps: Sequence[Key],
    limit: int,
) -> Chunk:
    """Read the rows after a key, up to a number of them or a few megabytes, and some before it.

    Parameters
    ----------
    feed
        The open feed, for what is checked in other sessions.
    connection
        One without a transaction.
    tables
        The table, alone.
    gaps
        The keys of rows to read besides.

    Raises
    ------
    TableChanged
        When the table was altered: the log says how.
    """
    (table,) = tables.tables
    feed.snapshots.require_trusted_functions([table])
    psycopg = feed.server.psycopg
    with feed.server.translating():
        try:
            with connection.transaction():
                run(connection, "read_chunk")
                # Before the snapshot: a table that is rewritten meanwhile looks empty in an earlier one.
                connection.execute(f"LOCK TABLE {source_of(table)} IN ACCESS SHARE MODE".encode())
                visible, timestamp = visible_now(connection)
                filtered = _filter(connection, feed.settings.publication, table)
                gone = _gone(connection, tables)
                clauses = order.clauses(connection, after, filtered, limit)
                messages, more = first_chunk(connection, row_messages(table, clauses, without=gone))
                count = len(messages)
                if gaps:
                    clauses = order.clauses_of(connection, gaps, filtered)
                    cursor = connection.cursor(row_factory=psycopg.rows.tuple_row)
                    query = row_messages(table, clauses, without=gone)
                    cursor.execute(query.encode(), binary=True)
                    messages += [message for (message,) in cursor]
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            raise TableChanged from error
        (mark,) = run(connection, "mark")
    position = int(mark.position)
    rows, keys = _decoded(feed, tables, messages, position, timestamp)
    more = more or count == limit
    last = tuple(texts[count - 1].as_py() for texts in keys) if count else None
    return Chunk(table, rows, keys, count, last, more, gaps, visible, position, timestamp)


def _filter(connection: Connection, publication: str, table: Table) -> str | None:
    """Return the row filter of a table; raise if it is another one, or another table has its name."""
    oid, partitioned = table.relation.oid, table.partitioned
    (held,) = run(connection, "is_table", name=qualified(table), oid=oid, partitioned=partitioned)
    filters = [row.rowfilter for row in run(connection, "row_filter", publication=publication, oid=oid)]
    if not held.same or filters != [table.filter]:
        raise TableChanged
    (found,) = filters
    return None if found is None else str(found)


def _gone(connection: Connection, tables: Tables) -> list[str]:
    """Return the columns that a table does not have any more; raise if one has another type."""
    (table,) = tables.tables
    now = {row.name: row for row in run(connection, "current_columns", oid=table.relation.oid)}
    gone = [name for name in table.relation.names if name not in now]
    if set(gone) & set(table.key):
        raise TableChanged
    for name, planned in zip(table.relation.names, table.bases, strict=True):
        current = now.get(name)
        if current is None:
            continue
        if not holds(planned, tables.base(Column(name, current.type, current.modifier))):
            raise TableChanged
    return gone


def _decoded(
    feed: OpenPostgresFeed, tables: Tables, messages: Sequence[bytes], version: int, timestamp: int
) -> tuple[pa.RecordBatch | None, Sequence[pa.StringArray]]:
    """Return the rows of messages, and their keys."""
    (table,) = tables.tables
    if not messages:
        return None, [pa.array([], pa.string()) for _ in table.key]
    reader = RowReader(feed.settings, tables, tables.schema(), 0, from_log=False)
    decoder = Decoder(version - 1, version, reader.wants)
    decoder.begin(version, timestamp, 0, table.relation)
    (part,) = decoder.decode(messages)
    assert not isinstance(part, Truncation)
    (changes,) = part
    keys = [changes.text(table.relation.names.index(name)) for name in table.key]
    rows = reader.rows_of(part)
    reader.report_invalid()
    return rows, keys
